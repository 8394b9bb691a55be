// What a decoder layer does between its matrix products and attention: norms, rotary positions, gathering rows.
//
// layers.py makes the ops. Each row is computed by itself, in fp32 and always in the same order, so that it does not
// depend on its neighbours. T is the dtype of activations.

#include "kernels.h"
#include "simd.h"

#include <algorithm>

namespace {

// Calls work(row) for each of `rows`, divided between the threads.
template <typename Work>
inline void for_rows(int64_t rows, Team& team, Work work) {
    const int64_t piece = std::clamp<int64_t>(rows / (4 * team.threads), 1, 16);
    for (int64_t first; (first = team.take() * piece) < rows;)
        for (int64_t row = first; row < std::min(first + piece, rows); row++) work(row);
}

// Calls work(column, count) for LANES columns at a time; count < LANES at the end of a width that is no multiple.
template <typename Work>
inline void for_columns(int64_t width, Work work) {
    int64_t column = 0;
    for (; column + LANES <= width; column += LANES) work(column, int64_t(LANES));
    if (column < width) work(column, width - column);
}

template <typename T>
inline Floats load_some(const T* from, int64_t count) {
    return count == LANES ? load(from) : load_first(from, count);
}

template <typename T>
inline void store_some(T* to, Floats value, int64_t count) {
    if (count == LANES) store(to, value);
    else store_first(to, value, count);
}

inline float sum_of(Floats value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

// 1 / sqrt(mean of squares + epsilon)
template <typename T>
inline float inverse_rms(const T* x, int64_t width, float epsilon) {
    Floats sums[4] = {};
    int64_t column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            Floats value = load(x + column + i * LANES);
            sums[i] += value * value;
        }
    for_columns(width - column, [&](int64_t rest, int64_t count) {
        Floats value = load_some(x + column + rest, count);
        sums[0] += value * value;
    });
    return 1.0f / __builtin_sqrtf(sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(width) + epsilon);
}

// ---- Norms

struct NormArguments {
    float* x;                   // [rows, width], the residual stream
    const float* added;         // [rows, width], normalized with `added_weight` and added to x; null: nothing is
    const float* added_weight;  // [width]
    const float* weight;        // [width]; null: `out` is x as it is
    void* out;                  // [rows, width] of T: the norm of x
    int64_t width;
    float epsilon;
    int32_t kept;  // rows are the step's kept ones, lying side by side
};

template <typename T>
inline void norm_row(const NormArguments& a, int64_t row) {
    float* x = a.x + row * a.width;
    T* out = (T*)a.out + row * a.width;
    if (a.added) {
        const float* added = a.added + row * a.width;
        const float scale = inverse_rms(added, a.width, a.epsilon);
        for_columns(a.width, [&](int64_t c, int64_t count) {
            Floats term = load_some(added + c, count) * scale * load_some(a.added_weight + c, count);
            store_some(x + c, load_some(x + c, count) + term, count);
        });
    }
    const float scale = a.weight ? inverse_rms(x, a.width, a.epsilon) : 1;
    for_columns(a.width, [&](int64_t c, int64_t count) {
        Floats value = load_some(x + c, count);
        store_some(out + c, a.weight ? value * scale * load_some(a.weight + c, count) : value, count);
    });
}

template <typename T>
inline void norm(const NormArguments& a, const Step& step, Team& team) {
    for_rows(a.kept ? step.kept : step.tokens, team, [&](int64_t row) { norm_row<T>(a, row); });
}

// ---- Queries and keys: their norms and rotary positions, in place

struct RotateArguments {
    void* qkv;              // [rows, stride] of T: query heads, KV heads of keys, and what is left alone
    const float* table;     // [positions, 2, rotary / 2]: cosines, then sines; null: positions are not encoded
    const float* q_weight;  // [dim], or [heads * dim] if `whole`; null: no norm
    const float* k_weight;  // likewise
    int64_t stride, heads, kv_heads, dim, rotary;
    float epsilon;
    int32_t whole;  // one norm over all heads
};

// `weight` is that of the head's own dimensions, or null; `table` the line of the token's position, or null.
template <typename T>
inline void rotate_head(T* x, const float* weight, float scale, const float* table, int64_t dim, int64_t rotary) {
    const auto normed = [&](int64_t d, int64_t count) {
        Floats value = load_some(x + d, count);
        return weight ? value * scale * load_some(weight + d, count) : value;
    };
    const int64_t half = table ? rotary / 2 : 0;
    for_columns(half, [&](int64_t c, int64_t count) {
        Floats first = normed(c, count), second = normed(half + c, count);
        Floats cosine = load_some(table + c, count), sine = load_some(table + half + c, count);
        store_some(x + c, first * cosine - second * sine, count);
        store_some(x + half + c, second * cosine + first * sine, count);
    });
    if (weight)
        for_columns(dim - 2 * half, [&](int64_t c, int64_t count) {
            store_some(x + 2 * half + c, normed(2 * half + c, count), count);
        });
}

template <typename T>
inline void rotate_heads(T* x, int64_t heads, const float* weight, const float* table, const RotateArguments& a) {
    float scale = weight && a.whole ? inverse_rms(x, heads * a.dim, a.epsilon) : 1;
    for (int64_t head = 0; head < heads; head++) {
        T* own = x + head * a.dim;
        if (weight && !a.whole) scale = inverse_rms(own, a.dim, a.epsilon);
        rotate_head(own, weight && a.whole ? weight + head * a.dim : weight, scale, table, a.dim, a.rotary);
    }
}

template <typename T>
inline void rotate(const RotateArguments& a, const Step& step, Team& team) {
    for_rows(step.tokens, team, [&](int64_t row) {
        T* queries = (T*)a.qkv + row * a.stride;
        const float* table = a.table ? a.table + step.positions[row] * a.rotary : nullptr;
        rotate_heads(queries, a.heads, a.q_weight, table, a);
        rotate_heads(queries + a.heads * a.dim, a.kv_heads, a.k_weight, table, a);
    });
}

// ---- Rows

struct GatherArguments {
    const char* from;  // [tokens, bytes]
    char* to;          // [kept, bytes]: the kept rows side by side
    int64_t bytes;
};

}  // namespace

extern "C" void norm_fp32(const void* arguments, const Step& step, Team& team) {
    norm<float>(*(const NormArguments*)arguments, step, team);
}

extern "C" void norm_bf16(const void* arguments, const Step& step, Team& team) {
    norm<Bf16>(*(const NormArguments*)arguments, step, team);
}

extern "C" void rotate_fp32(const void* arguments, const Step& step, Team& team) {
    rotate<float>(*(const RotateArguments*)arguments, step, team);
}

extern "C" void rotate_bf16(const void* arguments, const Step& step, Team& team) {
    rotate<Bf16>(*(const RotateArguments*)arguments, step, team);
}

extern "C" void gather_rows(const void* arguments, const Step& step, Team& team) {
    const GatherArguments& a = *(const GatherArguments*)arguments;
    for_rows(step.kept, team, [&](int64_t row) { memcpy(a.to + row * a.bytes, a.from + step.keep[row] * a.bytes, a.bytes); });
}
