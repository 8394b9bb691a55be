// The product of a few rows with vectors of the KV cache, which both halves of attention are: queries times K, with
// lanes over tokens, and weights times V, with lanes over dims. Sums stay in registers and run in the order of the
// steps. attention.cpp uses it.
#pragma once

#include "simd.h"

#include <type_traits>

constexpr int MAX_ROWS = 6;  // that are multiplied at once
constexpr int DEPTH = 64;    // numbers of a left row that lie side by side; rows are that far apart

// Vectors that a row is multiplied with at once, so that sums and what is multiplied fit the registers.
constexpr int vectors_at_once(int rows) { return LANES == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : rows == 3 ? 3 : 2; }

// Vectors of the cache, step after step, and those that are likely to be read next, which are fetched meanwhile: a page
// is too short for the processor to notice that it is read from end to end.
template <typename T>
struct Columns {
    const T *from, *next;
    const int64_t *places, *next_places;  // of each vector, behind `from` and `next`
    int64_t stride;                       // from step to step
};

// The even (PART 0) or odd numbers of pairs.
template <int PART, int R, int N>
inline void add_half(Floats (&sum)[R][N], const float* left, const Bf16* const (&column)[N], int64_t at) {
    Floats numbers[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        const Words pairs = load_as<Words>(column[n] + at);
        numbers[n] = PART ? (Floats)(pairs & 0xffff0000u) : (Floats)(pairs << 16);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = add_product(sum[r][n], left[r * DEPTH + PART], numbers[n]);
}

template <typename T, int R, int N>
inline void add_step(Floats (&sum)[R][N], const typename Product<T>::Activation* left, const T* const (&column)[N],
                     int64_t at) {
    if constexpr (std::is_same_v<T, typename Product<T>::Activation>) {
        typename Product<T>::Right numbers[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) numbers[n] = Product<T>::right(column[n] + at);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sum[r][n] = Product<T>::add(sum[r][n], left + r * DEPTH, numbers[n]);
    } else {  // as Product<Bf16>::add, but with half of the numbers in registers at a time
        add_half<0>(sum, left, column, at);
        asm("" : "+r"(at));  // so that the compiler loads the pairs again
        add_half<1>(sum, left, column, at);
    }
}

// sums[r][n] += left[r] times vector first + n, for R rows and N vectors.
template <typename T, int R, int N>
inline void add_block(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left,
                      const Columns<T>& columns, int first, int64_t depth) {
    Floats sum[R][N];
    const T* column[N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = sums[r * sums_stride + first + n];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) column[n] = columns.from + columns.places[first + n];
    const T* const next = columns.next + columns.next_places[first];
    const T* const next_last = columns.next + columns.next_places[first + N - 1];
    for (int64_t k = 0, at = 0; k < depth; k += Product<T>::STEP, at += columns.stride) {
        __builtin_prefetch(next + at);
        if (N * sizeof(Floats) > 64) __builtin_prefetch(next_last + at);
        add_step<T>(sum, left + k, column, at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[r * sums_stride + first + n] = sum[r][n];
}

template <typename T, int R>
__attribute__((noinline)) void add_rows(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left,
                                        const Columns<T>& columns, int vectors, int64_t depth) {
    constexpr int N = vectors_at_once(R);
    int n = 0;
    for (; n + N <= vectors; n += N) add_block<T, R, N>(sums, sums_stride, left, columns, n, depth);
    for (; N > 2 && n + 2 <= vectors; n += 2) add_block<T, R, 2>(sums, sums_stride, left, columns, n, depth);
    if (n < vectors) add_block<T, R, 1>(sums, sums_stride, left, columns, n, depth);
}

// sums[r][n] += left[r] times vector n, over `depth` numbers of the left rows; at most MAX_ROWS rows.
template <typename T>
inline void add_products(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left,
                        const Columns<T>& columns, int rows, int vectors, int64_t depth) {
    auto add = rows == 1   ? add_rows<T, 1>
               : rows == 2 ? add_rows<T, 2>
               : rows == 3 ? add_rows<T, 3>
               : rows == 4 ? add_rows<T, 4>
               : rows == 5 ? add_rows<T, 5>
                           : add_rows<T, MAX_ROWS>;
    add(sums, sums_stride, left, columns, vectors, depth);
}
