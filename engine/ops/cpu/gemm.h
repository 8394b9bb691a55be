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

#if LANES == 16
constexpr int VECTORS = 3, ROWS = 8;  // 24 of 32 registers hold sums
#else
constexpr int VECTORS = 2, ROWS = 6;  // 12 of 16
#endif
constexpr int PANEL = VECTORS * LANES;

typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Floats load(const int8_t* from) { return __builtin_convertvector(load_as<Bytes>(from), Floats); }

inline float to_float(int8_t x) { return x; }

// ---- What weights are stored as. `place`: of a number of a step among those of a panel.

template <typename T>
struct Plain : Product<T> {
    typedef T Stored;
    static int64_t place(int64_t k, int64_t output) { return output * Product<T>::STEP + k; }
};

// Bytes are widened to what T is multiplied as. Vectors of pairs: all even numbers before the odd ones.
template <typename T>
struct Quantized : Product<T> {
    typedef int8_t Stored;
    static constexpr int STEP = Product<T>::STEP;
    static int64_t place(int64_t k, int64_t output) {
        return (output / LANES * STEP + k) * LANES + output % LANES;
    }
    static typename Product<T>::Right right(const int8_t* from) {
        if constexpr (STEP == 1) return load(from);
        else return (Words)load(from) >> 16 | (Words)load(from + LANES);  // whole numbers below 2^8 are bf16 numbers
    }
};

// ---- Sums

// Adds to sums [R, P * PANEL] (or sets them) the products of R rows with P panels over `steps` steps.
template <typename W, int R, int P>
__attribute__((noinline)) void add_products(const typename W::Activation* left, int64_t left_stride,
                                            const typename W::Stored* right, int64_t panel_stride, int64_t steps,
                                            float* sums, int64_t sums_stride, bool set) {
    constexpr int N = P * VECTORS;
    Floats sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = set ? Floats{} : load(sums + r * sums_stride + n * LANES);
    for (int64_t step = 0; step < steps; step++) {
        typename W::Right columns[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++)
            columns[n] = W::right(right + n / VECTORS * panel_stride + n % VECTORS * LANES * W::STEP);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) sum[r][n] = W::add(sum[r][n], left + r * left_stride, columns[n]);
        left += W::STEP;
        right += PANEL * W::STEP;
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(sums + r * sums_stride + n * LANES, sum[r][n]);
}
