// Writes a step's K and V into the paged KV cache, in the layouts that attention.cpp reads. attention.py makes the ops.
//
// K of one block and KV head is [dim / STEP][page][STEP], V is [page / STEP][dim][STEP]. Tokens that follow each other
// in a block are written together, so that whole cache lines of K are.

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int PIECE = 16;  // tokens: a cache line of K in bf16

struct Arguments {
    const void *key, *value;  // [tokens, kv_heads, dim], strides in numbers
    int64_t key_stride, key_head_stride, value_stride, value_head_stride;
    void *keys, *values;  // [blocks, kv_heads, page * dim]
    int64_t layer_group;
    int64_t kv_heads, page, dim;
    int32_t inputs_are_bf16;
};

// Lines [count, dim] to the K of a block that begins at `to`.
template <typename T, int STEP>
void write_keys(T* to, const T* lines, int64_t slot, int64_t count, int64_t page, int64_t dim) {
    struct Group { T numbers[STEP]; };
    for (int64_t d = 0; d < dim; d += STEP)
        for (int64_t t = 0; t < count; t++)
            ((Group*)(to + d * page))[slot + t] = *(const Group*)(lines + t * dim + d);
}

template <typename T, int STEP>
void write_values(T* to, const T* lines, int64_t slot, int64_t count, int64_t dim) {
    int64_t t = 0;
    while (t < count) {
        const int64_t place = slot + t, within = place % STEP;
        T* step = to + (place - within) * dim;
        if (within == 0 && t + STEP <= count) {  // a whole step
            for (int64_t d = 0; d < dim; d++)
                for (int i = 0; i < STEP; i++) step[d * STEP + i] = lines[(t + i) * dim + d];
            t += STEP;
        } else {
            for (int64_t d = 0; d < dim; d++) step[d * STEP + within] = lines[t * dim + d];
            t++;
        }
    }
}

template <typename T>
void convert_lines(T* to, const void* from, int64_t at, int64_t stride, int64_t count, const Arguments& a) {
    for (int64_t t = 0; t < count; t++, at += stride, to += a.dim) {
        if (a.inputs_are_bf16) convert(to, (const Bf16*)from + at, a.dim);
        else convert(to, (const float*)from + at, a.dim);
    }
}

template <typename T>
void write(const void* arguments, const Step& step, Team& team) {
    const Arguments& a = *(const Arguments*)arguments;
    constexpr int STEP = Product<T>::STEP;
    static thread_local std::vector<T> scratch;
    if ((int64_t)scratch.size() < PIECE * a.dim) scratch.resize(PIECE * a.dim);
    T* const lines = scratch.data();
    const GroupRows& rows = step.groups[a.layer_group];
    T* const keys = (T*)(rows.keys ? rows.keys : a.keys);
    T* const values = (T*)(rows.values ? rows.values : a.values);
    for (int64_t piece; (piece = team.take() * PIECE) < step.tokens;) {
        const int64_t end = std::min(step.tokens, piece + PIECE);
        for (int64_t token = piece, count; token < end; token += count) {
            const int64_t block = rows.slots[token] / a.page, slot = rows.slots[token] % a.page;
            for (count = 1; token + count < end && slot + count < a.page; count++)
                if (rows.slots[token + count] != rows.slots[token] + count) break;
            if (count == 1)  // one number pair in every line: ask for all lines before the first is written
                for (int64_t at = block * a.kv_heads, head = 0; head < a.kv_heads; head++)
                    for (int64_t d = 0; d < a.dim; d += STEP)
                        __builtin_prefetch(keys + (at + head) * a.page * a.dim + d * a.page + slot * STEP, 1);
            for (int64_t head = 0; head < a.kv_heads; head++) {
                const int64_t key = token * a.key_stride + head * a.key_head_stride;
                const int64_t value = token * a.value_stride + head * a.value_head_stride;
                const int64_t at = (block * a.kv_heads + head) * a.page * a.dim;
                convert_lines(lines, a.key, key, a.key_stride, count, a);
                write_keys<T, STEP>(keys + at, lines, slot, count, a.page, a.dim);
                convert_lines(lines, a.value, value, a.value_stride, count, a);
                write_values<T, STEP>(values + at, lines, slot, count, a.dim);
            }
        }
    }
}

}  // namespace

extern "C" void write_bf16(const void* a, const Step& step, Team& team) { write<Bf16>(a, step, team); }
extern "C" void write_fp32(const void* a, const Step& step, Team& team) { write<float>(a, step, team); }
