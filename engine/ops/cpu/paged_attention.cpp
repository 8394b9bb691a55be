// Attention of one-token rows over the paged KV cache, and the cache write, for bf16 and fp32. Knows nothing of torch:
// build.py compiles this file, cpu_ops.py passes addresses.
//
// A page is [kv_heads, page, dim]; K and V of a layer are [blocks, kv_heads, page, dim], contiguous.
// A unit of work is one (row, KV head) with all query heads of its group. It walks the row's tokens in tiles of LANES,
// each tile: scores -> softmax so far (online) -> weighted values, everything accumulated in fp32. Tiles begin at
// multiples of LANES in the row, whatever the page size and the window, so a result depends on nothing but the row.
// No token at or beyond a row's length, or behind its window, is read.

#include "simd.h"

#include <cstdint>
#include <cstring>
#include <vector>

#if LANES == 16
#define EVEN_ODD_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define EVEN_ODD_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define EVEN_ODD_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define EVEN_ODD_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif

namespace {

constexpr int HEADS = 4;  // query heads that share a register-resident pass over a tile

// ---- Lanes

inline Floats interleaved_sum(Floats a, Floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, EVEN_ODD_LOW) + __builtin_shufflevector(a, b, EVEN_ODD_HIGH);
#else
    return __builtin_shuffle(a, b, Ints{EVEN_ODD_LOW}) + __builtin_shuffle(a, b, Ints{EVEN_ODD_HIGH});
#endif
}

// Lane t of the result is the sum over the lanes of rows[t]. Overwrites `rows`.
inline Floats sums_of_rows(Floats* rows) {
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) rows[i] = interleaved_sum(rows[i], rows[i + half]);
    return rows[0];
}

// ---- One tile: LANES tokens of one KV head, G query heads, of which tokens [skip, count) are seen. Queries and outputs are [G][width] vectors.

struct Softmax {  // of one query head, over the tokens so far
    Floats sums;  // lane t: sum of the weights of tokens t, t + LANES, ...
    float peak;
};

template <int G, typename T>
inline void tile_scores(const T* const* keys, const Floats* query, int dim, int width, Floats* scores) {
    Floats parts[G][LANES];
    for (int t = 0; t < LANES; t++) {
        Floats part[G] = {};
        int c = 0;
        for (; (c + 1) * LANES <= dim; c++) {
            Floats key = load(keys[t] + c * LANES);
            for (int g = 0; g < G; g++) part[g] += query[g * width + c] * key;
        }
        if (c < width) {
            Floats key = load_first(keys[t] + c * LANES, dim - c * LANES);
            for (int g = 0; g < G; g++) part[g] += query[g * width + c] * key;
        }
        for (int g = 0; g < G; g++) parts[g][t] = part[g];
    }
    for (int g = 0; g < G; g++) scores[g] = sums_of_rows(parts[g]);
}

// Turns the scores of the tokens seen into weights relative to the new peak; returns the factor for what came before.
inline float update_softmax(Softmax& softmax, Floats& scores, int skip, int count) {
    Ints lane;
    for (int t = 0; t < LANES; t++) lane[t] = t;
    const Ints seen = (lane >= skip) & (lane < count);
    scores = seen ? scores : Floats{} - INF;
    float peak = softmax.peak;
    for (int t = 0; t < LANES; t++) peak = scores[t] > peak ? scores[t] : peak;
    float decay = exp_negative(Floats{} + (softmax.peak - peak))[0];
    if (softmax.peak == -INF) decay = 0;
    scores = seen ? exp_negative(scores - peak) : Floats{};
    softmax.sums = softmax.sums * decay + scores;
    softmax.peak = peak;
    return decay;
}

template <int G, int N, typename Load>
inline void add_values(Load load_value, int skip, int count, const Floats* weights, const float* decay, Floats* out,
                       int width) {
    Floats sums[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) sums[g][n] = out[g * width + n] * decay[g];
    for (int t = skip; t < count; t++)
        for (int n = 0; n < N; n++) {
            Floats value = load_value(t, n);
            for (int g = 0; g < G; g++) sums[g][n] += value * ((const float*)&weights[g])[t];
        }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) out[g * width + n] = sums[g][n];
}

template <int G, typename T>
void attend_tile(const T* const* keys, const T* const* values, int skip, int count, const Floats* query, int dim,
                 int width, float softcap, Softmax* softmax, Floats* out) {
    Floats weights[G];
    float decay[G];
    tile_scores<G>(keys, query, dim, width, weights);
    if (softcap)
        for (int g = 0; g < G; g++) weights[g] = softcap * tanh_lanes(weights[g] / softcap);
    for (int g = 0; g < G; g++) decay[g] = update_softmax(softmax[g], weights[g], skip, count);
    int c = 0;
    for (; (c + 4) * LANES <= dim; c += 4)
        add_values<G, 4>([=](int t, int n) { return load(values[t] + (c + n) * LANES); }, skip, count, weights,
                         decay, out + c, width);
    for (; (c + 1) * LANES <= dim; c++)
        add_values<G, 1>([=](int t, int) { return load(values[t] + c * LANES); }, skip, count, weights, decay,
                         out + c, width);
    if (c < width)
        add_values<G, 1>([=](int t, int) { return load_first(values[t] + c * LANES, dim - c * LANES); }, skip,
                         count, weights, decay, out + c, width);
}

// ---- One row and KV head

struct Sizes { int64_t kv_heads, group, page, dim, window, width; };
struct Rule { float scaling, softcap; const float* sinks; };

// Block b of the row is tables[offset + b]; a row with a window has no entries for blocks wholly behind it.
template <typename T>
void attend_row(const T* query, int64_t head_stride, const T* keys, const T* values, const int32_t* tables,
                int64_t offset, int64_t length, int64_t kv_head, const Sizes& s, const Rule& rule, Floats* query_lanes,
                Floats* sums, Softmax* softmax, T* out) {
    for (int64_t g = 0; g < s.group; g++) {
        softmax[g] = {Floats{}, -INF};
        if (rule.sinks) {  // as a token without a value that came before all others
            softmax[g].peak = rule.sinks[kv_head * s.group + g];
            softmax[g].sums[0] = 1;
        }
        for (int64_t c = 0; c < s.width; c++) {
            int64_t count = s.dim - c * LANES < LANES ? s.dim - c * LANES : LANES;
            query_lanes[g * s.width + c] = load_first(query + g * head_stride + c * LANES, count) * rule.scaling;
            sums[g * s.width + c] = Floats{};
        }
    }
    const int64_t begin = s.window && s.window < length ? length - s.window : 0;
    int64_t block = offset + begin / s.page, slot = begin % s.page;
    for (int64_t first = begin / LANES * LANES; first < length; first += LANES) {
        const T *tile_keys[LANES], *tile_values[LANES];
        const int skip = begin > first ? begin - first : 0, count = length - first < LANES ? length - first : LANES;
        for (int t = skip; t < count; t++) {
            int64_t line = ((tables[block] * s.kv_heads + kv_head) * s.page + slot) * s.dim;
            tile_keys[t] = keys + line;
            tile_values[t] = values + line;
            if (++slot == s.page) slot = 0, block++;
        }
        // Tokens that are not seen: one that is, again; its score is dropped.
        for (int t = 0; t < skip; t++) tile_keys[t] = tile_keys[skip];
        for (int t = count; t < LANES; t++) tile_keys[t] = tile_keys[count - 1];
        for (int64_t g = 0; g < s.group; g += HEADS) {
            auto attend = s.group - g == 1   ? attend_tile<1, T>
                          : s.group - g == 2 ? attend_tile<2, T>
                          : s.group - g == 3 ? attend_tile<3, T>
                                             : attend_tile<HEADS, T>;
            attend(tile_keys, tile_values, skip, count, query_lanes + g * s.width, s.dim, s.width, rule.softcap,
                   softmax + g, sums + g * s.width);
        }
    }
    for (int64_t g = 0; g < s.group; g++) {
        float total = 0;
        for (int t = 0; t < LANES; t++) total += softmax[g].sums[t];
        for (int64_t c = 0; c < s.width; c++) {
            int64_t count = s.dim - c * LANES < LANES ? s.dim - c * LANES : LANES;
            store_first(out + g * s.dim + c * LANES, sums[g * s.width + c] / total, count);
        }
    }
}

template <typename T>
void attend_rows(const T* query, int64_t row_stride, int64_t head_stride, const T* keys, const T* values,
                 const int32_t* tables, const int64_t* offsets, const int64_t* lengths, int64_t rows, Sizes s,
                 Rule rule, int threads, T* out) {
    s.width = (s.dim + LANES - 1) / LANES;
    const int64_t units = rows * s.kv_heads, piece = 1 + units / (16 * threads);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Floats> lanes(2 * s.group * s.width);
        std::vector<Softmax> softmax(s.group);
#pragma omp for schedule(dynamic, piece)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t row = unit / s.kv_heads, kv_head = unit % s.kv_heads, head = kv_head * s.group;
            attend_row(query + row * row_stride + head * head_stride, head_stride, keys, values, tables, offsets[row],
                       lengths[row], kv_head, s, rule, lanes.data(), lanes.data() + s.group * s.width, softmax.data(),
                       out + (row * s.kv_heads * s.group + head) * s.dim);
        }
    }
}

}  // namespace

// query [rows, heads, dim] with strides in elements, `dim` contiguous. tables: the blocks that the rows see, one row
// after another; block b of row r is tables[offsets[r] + b]. lengths: tokens of each row, its newest included.
// sinks [heads] or null. window, softcap: 0 for none. out [rows, heads, dim], contiguous.
#define ATTEND(name, T)                                                                                              \
    extern "C" void name(const T* query, int64_t row_stride, int64_t head_stride, const T* keys, const T* values,    \
                         const int32_t* tables, const int64_t* offsets, const int64_t* lengths, const float* sinks,  \
                         int64_t rows, int64_t kv_heads, int64_t group, int64_t page, int64_t dim, int64_t window,   \
                         float scaling, float softcap, int32_t threads, T* out) {                                    \
        attend_rows(query, row_stride, head_stride, keys, values, tables, offsets, lengths, rows,                    \
                    {kv_heads, group, page, dim, window, 0}, {scaling, softcap, sinks}, threads, out);               \
    }

ATTEND(attend_bf16, Bf16)
ATTEND(attend_fp32, float)

// Copies new [heads, tokens, *] lines of `bytes` contiguous bytes (strides in bytes) to line slots[head, token] of the
// cache.
extern "C" void write_lines(const char* lines, int64_t head_stride, int64_t token_stride, const int64_t* slots,
                            int64_t heads, int64_t tokens, int64_t bytes, char* cache) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t token = 0; token < tokens; token++)
            memcpy(cache + slots[head * tokens + token] * bytes, lines + head * head_stride + token * token_stride,
                   bytes);
}
