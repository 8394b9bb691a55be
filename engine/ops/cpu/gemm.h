// Matrix multiplication by packed weights: how they lie in memory, and the sums of a block of rows and panels.
//
// A weight [N, K] (outputs, inputs) lies in panels of PANEL outputs. A panel holds, step after step along K, the STEP
// numbers of each of its outputs; the last panel and the last step are filled up with zeros. 8-bit weights are integers,
// whose sums are multiplied by their output's scale.
//
// Every output is one fp32 sum along K, in order, whatever is computed beside it: its bits depend on nothing else.
// linear.cpp divides products into blocks and finishes the sums.
#pragma once

#include "simd.h"

// Of outputs and rows whose sums are kept in registers.
#if LANES == 16
constexpr int REGISTERS = 32, VECTORS = 3, ROWS = 8;
#else
constexpr int REGISTERS = 16, VECTORS = 2, ROWS = 6;
#endif
constexpr int PANEL = VECTORS * LANES;

inline float to_float(int8_t x) { return x; }

inline Floats load(const int8_t* from) {  // by instructions, since GCC makes scalar code of vectors of bytes
#if defined(__AVX512F__) && LANES == 16
    const Ints wide = widened16(from);
#elif defined(__AVX2__) && LANES == 8
    const Ints wide = widened8(from);
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    const Ints wide = __builtin_convertvector(load_as<Bytes>(from), Ints);
#endif
    return __builtin_convertvector(wide, Floats);
}

// ---- What weights are stored as
//
// STEP numbers of each output follow each other; `place` is that of number k of an output among those of a panel. A
// step is multiplied in PARTS, one after another, so that no more than one part of the weights fills registers.

template <typename T>
struct Plain : Product<T> {
    typedef T Stored;
    typedef Plain Wide;  // as it is multiplied
    static constexpr int STEP = Product<T>::STEP, PARTS = 1;
    static int64_t place(int64_t k, int64_t output) { return output * STEP + k; }
    template <int>
    static typename Product<T>::Right part(const T* from) { return Product<T>::right(from); }
};

#if !defined(BF16_DOT)
template <>
struct Plain<Bf16> : Product<float> {
    typedef Bf16 Stored;
    typedef Plain Wide;
    static constexpr int STEP = 2, PARTS = 2;
    static int64_t place(int64_t k, int64_t output) { return output * STEP + k; }
    template <int K>
    static Floats part(const Bf16* from) {
        const Words pairs = load_as<Words>(from);
        return (Floats)(K ? pairs & 0xffff0000u : pairs << 16);
    }
};
#endif

// Bytes are widened to what T is multiplied as. Of pairs, all even numbers of a vector come before the odd ones.
template <typename T>
struct Quantized : Product<T> {
    typedef int8_t Stored;
    typedef Plain<T> Wide;
    static constexpr int STEP = Product<T>::STEP, PARTS = 1;
    static int64_t place(int64_t k, int64_t output) { return (output / LANES * STEP + k) * LANES + output % LANES; }
    template <int>
    static typename Product<T>::Right part(const int8_t* from) {
        if constexpr (STEP == 1) return load(from);
        else return (Words)load(from) >> 16 | (Words)load(from + LANES);  // whole numbers below 2^8 are bf16 numbers
    }
};

template <typename T>
void widen(const int8_t* panel, int64_t steps, T* wide) {  // to the panel that Plain<T> multiplies
    constexpr int NUMBERS = LANES * Product<T>::STEP;
    for (int64_t i = 0; i < steps * PANEL * Product<T>::STEP; i += NUMBERS) {
        const typename Product<T>::Right numbers = Quantized<T>::template part<0>(panel + i);
        memcpy(wide + i, &numbers, sizeof numbers);
    }
}

// ---- Sums

template <typename W, int PART, int R, int N>
inline void add_part(Floats (&sum)[R][N], const typename W::Activation* left, int64_t left_stride,
                     const typename W::Stored* right, int64_t panel_stride) {
    auto column = [=](int n) {
        return W::template part<PART>(right + n / VECTORS * panel_stride + n % VECTORS * LANES * W::STEP);
    };
    if constexpr (R == 1) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[0][n] = W::add(sum[0][n], left + PART, column(n));
    } else {
        decltype(column(0)) columns[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) columns[n] = column(n);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) sum[r][n] = W::add(sum[r][n], left + r * left_stride + PART, columns[n]);
    }
}

// Panels that are multiplied at once: with few rows one has too few sums to hide the latency of an addition.
constexpr int together(int rows) { return rows == 1 ? 4 : (rows + 1) * 2 * VECTORS + 1 <= REGISTERS ? 2 : 1; }

constexpr int LINE = 64;  // bytes that memory is fetched in

template <typename W>
struct Lines {  // of memory that a step of a panel takes, if it takes whole ones, and steps that share a line
    static constexpr int BYTES = PANEL * W::STEP * sizeof(typename W::Stored);
    static constexpr int COUNT = (BYTES + LINE - 1) / LINE, STEPS = BYTES < LINE ? LINE / BYTES : 1;
};

// Adds to sums [R, P * PANEL] (or sets them) the products of R rows with P panels over `steps` steps. For each line of
// weights that it reads it has one fetched, from `ahead` on, `ahead_stride` bytes after the last.
template <typename W, int R, int P>
__attribute__((noinline)) void add_products(const typename W::Activation* left, int64_t left_stride,
                                            const typename W::Stored* right, int64_t panel_stride, int64_t steps,
                                            float* sums, int64_t sums_stride, bool set, const char* ahead,
                                            int64_t ahead_stride) {
    constexpr int N = P * VECTORS;
    Floats sum[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[r][n] = set ? Floats{} : load(sums + r * sums_stride + n * LANES);
    for (int64_t step = 0; step < steps; step++) {
        if (Lines<W>::STEPS == 1 || step % Lines<W>::STEPS == 0)
#pragma GCC unroll 16
            for (int line = 0; line < Lines<W>::COUNT; line++, ahead += ahead_stride)
#pragma GCC unroll 16
                for (int p = 0; p < P; p++)
                    __builtin_prefetch(ahead + p * panel_stride * int64_t(sizeof(typename W::Stored)));
        add_part<W, 0>(sum, left, left_stride, right, panel_stride);
        if constexpr (W::PARTS == 2) add_part<W, 1>(sum, left, left_stride, right, panel_stride);
        left += W::STEP;
        right += PANEL * W::STEP;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(sums + r * sums_stride + n * LANES, sum[r][n]);
}
