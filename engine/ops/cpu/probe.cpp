// How fast this machine can multiply and read: kernels that do nothing else. Called by engine.bench alone.

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int SUMS = 12;

struct Probe {
    const char* bytes;  // to be read
    int64_t count;      // bytes to read, or rounds of products
    int64_t operations;  // of the rounds, set by the kernel
    float result;       // so that nothing is optimised away
};

template <typename T>
void multiply(const void* arguments, const Step&, Team&) {
    Probe& probe = *(Probe*)arguments;
    typename Product<T>::Activation zeros[2] = {};
    Floats sum[SUMS] = {};
    asm volatile("" : : "r"(zeros) : "memory");
    for (int64_t i = 0; i < probe.count; i++)
#pragma GCC unroll 12
        for (int n = 0; n < SUMS; n++)
            sum[n] = Product<T>::add(sum[n], zeros, (typename Product<T>::Right)sum[n]);
    for (int n = 0; n < SUMS; n++) probe.result += sum[n][0];
    probe.operations = probe.count * SUMS * LANES * Product<T>::STEP * 2;
}

#if defined(TILES)
void multiply_tiles(const void* arguments) {
    Probe& probe = *(Probe*)arguments;
    shape_tiles(TileShapes(TILE));
    for_each_tile<RIGHT + 1>([](auto n) { zero_tile<n>(); });
    for (int64_t i = 0; i < probe.count; i++) for_each_tile<LEFT>([](auto n) { add_tile_product<n>(); });
    release_tiles();
    probe.operations = probe.count * LEFT * TILE * TILE * TILE * 2 * 2;
}
#endif

}  // namespace

extern "C" void probe_multiply_fp32(const void* a, const Step& step, Team& team) { multiply<float>(a, step, team); }

extern "C" void probe_multiply_bf16(const void* a, const Step& step, Team& team) {
#if defined(TILES)
    if (tiles_allowed()) return multiply_tiles(a);
#endif
#if defined(BF16_DOT)
    multiply<Bf16>(a, step, team);
#else
    multiply<float>(a, step, team);
#endif
}

extern "C" void probe_read(const void* arguments, const Step&, Team& team) {
    Probe& probe = *(Probe*)arguments;
    constexpr int64_t PIECE = 1 << 18;
    Words sum[4] = {};
    for (int64_t begin = team.take() * PIECE; begin + PIECE <= probe.count; begin = team.take() * PIECE)
        for (int64_t i = begin; i < begin + PIECE; i += sizeof sum)
            for (int n = 0; n < 4; n++) sum[n] += load_as<Words>(probe.bytes + i + n * sizeof(Words));
    const Words all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    if (all[0] == 1) probe.result = 1;
}
