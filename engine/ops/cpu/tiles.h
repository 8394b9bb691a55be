// Tile registers (AMX): 16 rows of 64 bytes, and the product of bf16 tiles. gemm.h multiplies with them where they are.
//
// An instruction names its registers, so they are template arguments. A build for tests may ask for a twin in plain C++
// (TILES_TWIN), or for none (NO_TILES).
#pragma once

#include "simd.h"

#include <type_traits>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(TILES_TWIN) || (defined(__AMX_BF16__) && defined(__linux__) && defined(BF16_DOT) && !defined(NO_TILES))
#define TILES
#endif

#if defined(TILES)

constexpr int TILE = 16;            // rows, and fp32 numbers or bf16 pairs of a row
constexpr int LEFT = 6, RIGHT = 7;  // registers; those before are sums

// Register by register how many rows it has and how many bytes of each.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int left_rows) {  // of the left factor and the sums
        for (int i = 0; i <= RIGHT; i++) bytes[i] = 64, rows[i] = i == RIGHT ? TILE : left_rows;
    }
};

#if defined(TILES_TWIN)

inline bool tiles_allowed() { return true; }

struct TwinTiles {
    char bytes[8][TILE][64];
    int rows[8];
};

inline TwinTiles& twin() {
    static thread_local TwinTiles tiles;
    return tiles;
}

inline void shape_tiles(const TileShapes& shapes) {
    for (int i = 0; i < 8; i++) twin().rows[i] = shapes.rows[i];
}

inline void release_tiles() {}

template <int N>
inline void zero_tile() { memset(twin().bytes[N], 0, sizeof twin().bytes[N]); }

template <int N>
inline void load_tile(const void* from, int64_t stride) {
    for (int r = 0; r < twin().rows[N]; r++) memcpy(twin().bytes[N][r], (const char*)from + r * stride, 64);
}

template <int N>
inline void store_tile(void* to, int64_t stride) {
    for (int r = 0; r < twin().rows[N]; r++) memcpy((char*)to + r * stride, twin().bytes[N][r], 64);
}

template <int N>
inline void add_tile_product() {
    static_assert(TILE == LANES, "a row of sums is a vector");
    TwinTiles& t = twin();
    for (int r = 0; r < t.rows[N]; r++) {
        Floats sum = load_as<Floats>(t.bytes[N][r]);
        const auto* left = (const Bf16*)t.bytes[LEFT][r];
        for (int pair = 0; pair < TILE; pair++) {
            const Words right = load_as<Words>(t.bytes[RIGHT][pair]);
            sum += to_float(left[2 * pair]) * (Floats)(right << 16);
            sum += to_float(left[2 * pair + 1]) * (Floats)(right & 0xffff0000u);
        }
        memcpy(t.bytes[N][r], &sum, sizeof sum);
    }
}

#else

// Linux gives tile registers only to processes that ask for them.
inline bool tiles_allowed() {
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, of asm/prctl.h
    static const bool allowed = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return allowed;
}

inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

inline void release_tiles() { asm volatile("tilerelease"); }  // else they are saved whenever the thread is switched

template <int N>
inline void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(N)); }

template <int N>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(N) : "memory");
}

template <int N>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(N) : "memory");
}

template <int N>
inline void add_tile_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(N), "i"(LEFT), "i"(RIGHT));
}

#endif

// Calls visit(constant 0), visit(constant 1), ... COUNT times.
template <int COUNT, typename Visit>
inline __attribute__((always_inline)) void for_each_tile(Visit visit) {
    if constexpr (COUNT > 0) {
        for_each_tile<COUNT - 1>(visit);
        visit(std::integral_constant<int, COUNT - 1>());
    }
}

// Adds to sums [rows, P * PANEL] (or sets them) the products of the rows that the tiles were shaped for with P panels of
// weights, whose STEP is a pair, over `steps` steps: a multiple of TILE. Strides count numbers.
template <int PANEL, int P>
__attribute__((noinline)) void add_tiles(const Bf16* left, int64_t left_stride, const Bf16* right, int64_t panel_stride,
                                         int64_t steps, float* sums, int64_t sums_stride, bool set) {
    constexpr int ACROSS = PANEL / TILE, COUNT = P * ACROSS;
    static_assert(PANEL % TILE == 0 && COUNT <= LEFT, "more sums than registers");
    for_each_tile<COUNT>([&](auto n) {
        if (set) zero_tile<n>();
        else load_tile<n>(sums + n * TILE, sums_stride * sizeof(float));
    });
    for (int64_t step = 0; step < steps; step += TILE) {
        load_tile<LEFT>(left + 2 * step, left_stride * sizeof(Bf16));
        for_each_tile<COUNT>([&](auto n) {
            load_tile<RIGHT>(right + n / ACROSS * panel_stride + 2 * (step * PANEL + n % ACROSS * TILE),
                             2 * PANEL * sizeof(Bf16));
            add_tile_product<n>();
        });
    }
    for_each_tile<COUNT>([&](auto n) { store_tile<n>(sums + n * TILE, sums_stride * sizeof(float)); });
}

#endif
