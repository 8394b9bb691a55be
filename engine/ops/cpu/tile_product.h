// The product of a few rows with vectors of the KV cache, which both halves of attention are: queries times K, with
// lanes over tokens, and weights times V, with lanes over dims. Sums stay in registers and run in the order of the
// steps. attention.cpp uses it.
//
// Of bf16 numbers it is made by tile registers where they are, whatever the number of rows.
#pragma once

#include "simd.h"
#include "tiles.h"

#include <algorithm>
#include <type_traits>

constexpr int MAX_ROWS = 6;  // that are multiplied at once, without tile registers
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
    const T* next_half;                   // `next`, for the steps in the second half of a tile register
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
                      const Columns<T>& columns, int first, int64_t depth, bool set) {
    Floats sum[R][N];
    const T* column[N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = set ? Floats{} : sums[r * sums_stride + first + n];
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
                                        const Columns<T>& columns, int vectors, int64_t depth, bool set) {
    constexpr int N = vectors_at_once(R);
    int n = 0;
    for (; n + N <= vectors; n += N) add_block<T, R, N>(sums, sums_stride, left, columns, n, depth, set);
    for (; N > 2 && n + 2 <= vectors; n += 2) add_block<T, R, 2>(sums, sums_stride, left, columns, n, depth, set);
    if (n < vectors) add_block<T, R, 1>(sums, sums_stride, left, columns, n, depth, set);
}

// Adds to sums[r][n] (or sets it) left[r] times vector n, over `depth` numbers of the left rows; at most MAX_ROWS rows.
template <typename T>
inline void add_products(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left,
                         const Columns<T>& columns, int rows, int vectors, int64_t depth, bool set) {
    auto add = rows == 1   ? add_rows<T, 1>
               : rows == 2 ? add_rows<T, 2>
               : rows == 3 ? add_rows<T, 3>
               : rows == 4 ? add_rows<T, 4>
               : rows == 5 ? add_rows<T, 5>
                           : add_rows<T, MAX_ROWS>;
    add(sums, sums_stride, left, columns, vectors, depth, set);
}

// Products of some rows for one thread. What the argument allows is to use tile registers.
template <typename T>
class Multiplier {
public:
    static constexpr int MOST_ROWS = MAX_ROWS, most_rows = MAX_ROWS;  // at once: ever, and by this one
    static constexpr int step = Product<T>::STEP;  // numbers of a left row that are summed up at once
    static constexpr bool tiled = false;

    explicit Multiplier(bool) {}

    void add(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left, const Columns<T>& columns,
             int rows, int vectors, int64_t depth, bool set) {
        add_products<T>(sums, sums_stride, left, columns, rows, vectors, depth, set);
    }
};

// ---- By tile registers

#if defined(TILES)

constexpr int TILE_DEPTH = 2 * TILE;  // numbers of a left row that a register holds
static_assert(TILE == LANES, "a vector of sums is a row of a register");

// The lines of one register and vector, of those that are likely to be read next.
inline void fetch_tile(const Columns<Bf16>& columns, int vector, int64_t at) {
    const int64_t place = columns.next_places[vector] + at;
#pragma GCC unroll 16
    for (int step = 0; step < TILE; step++)
        __builtin_prefetch((step < TILE / 2 ? columns.next : columns.next_half) + place + step * columns.stride);
}

// For the rows that the registers were shaped for and N vectors; `depth` is a multiple of TILE_DEPTH.
template <int N>
__attribute__((noinline)) void add_tiled_block(Floats* sums, int64_t sums_stride, const Bf16* left,
                                               const Columns<Bf16>& columns, int first, int64_t depth, bool set) {
    for_each_tile<N>([&](auto n) {
        if (set) zero_tile<n>();
        else load_tile<n>(sums + first + n, sums_stride * sizeof(Floats));
    });
    const bool fetch = columns.next != columns.from || columns.next_places != columns.places;
    for (int64_t k = 0, at = 0; k < depth; k += TILE_DEPTH, at += TILE * columns.stride) {
        load_tile<LEFT>(left + k, DEPTH * sizeof(Bf16));
        for_each_tile<N>([&](auto n) {
            if (fetch) fetch_tile(columns, first + n, at);
            load_tile<RIGHT>(columns.from + columns.places[first + n] + at, columns.stride * sizeof(Bf16));
            add_tile_product<n>();
        });
    }
    for_each_tile<N>([&](auto n) { store_tile<n>(sums + first + n, sums_stride * sizeof(Floats)); });
}

// As `add_products`, for as many rows as the registers were shaped for. What no register is full of follows by vectors.
inline void add_tiled_products(Floats* sums, int64_t sums_stride, const Bf16* left, const Columns<Bf16>& columns,
                               int rows, int vectors, int64_t depth, bool set) {
    constexpr decltype(&add_tiled_block<1>) ADD[LEFT] = {add_tiled_block<1>, add_tiled_block<2>, add_tiled_block<3>,
                                                         add_tiled_block<4>, add_tiled_block<5>, add_tiled_block<6>};
    const int64_t whole = depth / TILE_DEPTH * TILE_DEPTH;
    const int groups = whole ? (vectors + LEFT - 1) / LEFT : 0;
    for (int i = 0; i < groups; i++) {
        const int first = vectors * i / groups, end = vectors * (i + 1) / groups;
        ADD[end - first - 1](sums, sums_stride, left, columns, first, whole, set);
    }
    if (whole == depth) return;
    const int64_t at = whole / Product<Bf16>::STEP * columns.stride;
    Columns<Bf16> rest = columns;
    rest.from += at, rest.next += at;
    for (int row = 0; row < rows; row += MAX_ROWS)
        add_products<Bf16>(sums + row * sums_stride, sums_stride, left + row * DEPTH + whole, rest,
                     std::min(rows - row, MAX_ROWS), vectors, depth - whole, set && whole == 0);
}

// Products of bf16 numbers: by tile registers, if the process may use them and the caller allows it.
template <>
class Multiplier<Bf16> {
    int shaped = 0;  // rows that the registers were shaped for

public:
    static constexpr int MOST_ROWS = TILE;
    const bool tiled;
    const int most_rows, step;

    explicit Multiplier(bool may)
        : tiled(may && tiles_allowed()), most_rows(tiled ? TILE : MAX_ROWS),
          step(tiled ? TILE_DEPTH : Product<Bf16>::STEP) {}
    Multiplier(const Multiplier&) = delete;
    ~Multiplier() {
        if (shaped) release_tiles();
    }

    void add(Floats* sums, int64_t sums_stride, const Bf16* left, const Columns<Bf16>& columns, int rows, int vectors,
             int64_t depth, bool set) {
        if (!tiled) return add_products<Bf16>(sums, sums_stride, left, columns, rows, vectors, depth, set);
        if (rows != shaped) shape_tiles(TileShapes(shaped = rows));
        add_tiled_products(sums, sums_stride, left, columns, rows, vectors, depth, set);
    }
};

#endif
