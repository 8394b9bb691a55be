// Attention of a step's rows, one-token rows and chunks of a prompt alike, over the paged KV cache. attention.py makes
// the ops; knows nothing of torch, nor how K and V came into the cache (kv_write.cpp).
//
// K of one block and KV head is [dim / STEP][page][STEP], V is [page / STEP][dim][STEP]: both products of attention read
// the cache as it lies, queries times K with lanes over tokens, weights times V with lanes over dim.
//
// A unit of work is some consecutive queries of one row with the query heads of one KV head. It walks the tokens that
// any of them sees in tiles, which begin at multiples of TILE in the row; a tile is scores -> softmax so far (online) ->
// weighted values, for a few (query, head) pairs at a time, in fp32. Every number is a sum in the order of its own row's
// tokens or dims, and a hidden token adds an exact zero, so a query's result depends on its own context alone: not on
// chunks, page size, threads or neighbours. Hidden tokens are dropped by selection; what they hold never counts.

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int TILE = 64;       // tokens
constexpr int DEPTH = 64;      // numbers of a left row that lie side by side; queries are cut into such slices
constexpr int MAX_ROWS = 6;    // (query, head) pairs whose sums are in registers at once
constexpr int UNIT_ROWS = 96;  // pairs of a unit, about
constexpr int TILE_VECTORS = TILE / LANES;
static_assert(TILE == DEPTH, "weights are left rows, too");

struct Arguments {
    const void* query;  // [tokens, kv_heads * group, dim], strides in numbers
    int64_t query_stride, query_head_stride;
    void* out;  // [tokens, kv_heads * group * dim], stride in numbers
    int64_t out_stride;
    const void *keys, *values;  // [blocks, kv_heads, page * dim]
    const float* sinks;         // [kv_heads * group] or null
    int64_t layer_group;
    int64_t kv_heads, group, page, dim;
    float scaling, softcap;  // 0: no cap
    int32_t query_is_bf16, out_is_bf16;
};

// ---- The product

// sums[r][n] += left[r] times the columns at right + columns[n], over `depth` numbers. Left rows are DEPTH apart.
template <typename T, int R, int N>
inline void add_block(Floats* sums, int64_t sums_stride, const typename Product<T>::Activation* left, const T* right,
                      const int64_t* columns, int64_t right_stride, int64_t depth) {
    typedef Product<T> P;
    Floats sum[R][N];
    const T* column[N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = sums[r * sums_stride + n];
    for (int n = 0; n < N; n++) column[n] = right + columns[n];
    for (int64_t k = 0; k < depth; k += P::STEP) {
        typename P::Right numbers[N];
        for (int n = 0; n < N; n++) {
            numbers[n] = P::right(column[n]);
            column[n] += right_stride;
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = P::add(sum[r][n], left + r * DEPTH + k, numbers[n]);
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r * sums_stride + n] = sum[r][n];
}

template <typename T, int R>
__attribute__((noinline)) void add_rows(int vectors, Floats* sums, int64_t sums_stride,
                                        const typename Product<T>::Activation* left, const T* right,
                                        const int64_t* columns, int64_t right_stride, int64_t depth) {
    constexpr int N = LANES == 16 || R <= 3 ? 4 : 2;
    int n = 0;
    for (; n + N <= vectors; n += N) add_block<T, R, N>(sums + n, sums_stride, left, right, columns + n, right_stride, depth);
    for (; n + 2 <= vectors; n += 2) add_block<T, R, 2>(sums + n, sums_stride, left, right, columns + n, right_stride, depth);
    if (n < vectors) add_block<T, R, 1>(sums + n, sums_stride, left, right, columns + n, right_stride, depth);
}

template <typename T>
inline void add_product(int rows, int vectors, Floats* sums, int64_t sums_stride,
                        const typename Product<T>::Activation* left, const T* right, const int64_t* columns,
                        int64_t right_stride, int64_t depth) {
    auto add = rows == 1   ? add_rows<T, 1>
               : rows == 2 ? add_rows<T, 2>
               : rows == 3 ? add_rows<T, 3>
               : rows == 4 ? add_rows<T, 4>
               : rows == 5 ? add_rows<T, 5>
                           : add_rows<T, MAX_ROWS>;
    add(vectors, sums, sums_stride, left, right, columns, right_stride, depth);
}

// ---- Softmax

struct Softmax {  // of one (query, head), over the tokens so far
    Floats sums;  // lane t: of the weights of tokens t, t + LANES, ...
    float peak;
};

struct Span { int first, last; };  // tokens [first, last) of a tile

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b if one is NaN

inline float largest(Floats x, float atleast) {
    const float* lanes = (const float*)&x;
    float most[4] = {atleast, atleast, atleast, atleast};
    for (int i = 0; i < LANES; i++) most[i % 4] = lanes[i] > most[i % 4] ? lanes[i] : most[i % 4];
    for (int i = 1; i < 4; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    return most[0];
}

// Turns a tile's products into weights relative to the new peak; returns the factor for what came before. `seen` are the
// tokens that this query sees, `vectors` what was computed.
template <bool MASKED, typename Activation>
inline float weigh(Softmax& softmax, Floats* scores, Span vectors, Span seen, float scaling, float softcap,
                   Activation* weights) {
    Ints lane;
    for (int t = 0; t < LANES; t++) lane[t] = t;
    Floats most = broadcast(-INF);
    for (int v = vectors.first; v < vectors.last; v++) {
        scores[v] *= scaling;
        if (softcap) scores[v] = softcap * tanh_lanes(scores[v] / softcap);
        if (MASKED) {
            const Ints token = lane + v * LANES;
            scores[v] = (token >= seen.first) & (token < seen.last) ? scores[v] : broadcast(-INF);
        }
        most = larger(scores[v], most);
    }
    const float before = softmax.peak, peak = largest(most, before);
    // A peak of infinity, from a sink or a score, makes everything NaN.
    const float decay = before == -INF ? 0 : peak > before ? exp_negative(broadcast(before - peak))[0] : 1 + (peak - peak);
    Floats sums = softmax.sums * decay;
    for (int v = vectors.first; v < vectors.last; v++) {
        Floats weight = exp_negative(scores[v] - peak);
        if (MASKED) {
            const Ints token = lane + v * LANES;
            weight = (token >= seen.first) & (token < seen.last) ? weight : Floats{};
        }
        sums += weight;
        store(weights + v * LANES, weight);
    }
    softmax = {sums, peak};
    return decay;
}

// ---- One thread's part of a call

struct Scratch {
    std::vector<Floats> memory;

    void* take(size_t& used, size_t bytes) {
        void* taken = (char*)memory.data() + used;
        used += (bytes + 63) / 64 * 64;
        return taken;
    }
};

template <typename T>
class Attender {
    typedef typename Product<T>::Activation Activation;
    static constexpr int STEP = Product<T>::STEP;

public:
    Attender(const Arguments& arguments, const GroupRows& rows, Scratch& scratch)
        : a(arguments), rows(rows), keys((const T*)(rows.keys ? rows.keys : a.keys)),
          values((const T*)(rows.values ? rows.values : a.values)), width((a.dim + LANES - 1) / LANES),
          most_queries(std::max<int64_t>(1, UNIT_ROWS / a.group)), most_rows(most_queries * a.group),
          lies_in_vectors(a.page % LANES == 0 && a.dim >= LANES) {
        const size_t tile_bytes = (TILE * a.dim + LANES * STEP) * sizeof(T);
        for (int pass = 0; pass < 2; pass++) {
            size_t used = 0;
            queries = (Activation*)scratch.take(used, slices() * most_rows * DEPTH * sizeof(Activation));
            sums = (Floats*)scratch.take(used, most_rows * width * sizeof(Floats));
            softmax = (Softmax*)scratch.take(used, most_rows * sizeof(Softmax));
            columns = (int64_t*)scratch.take(used, width * sizeof(int64_t));
            key_copy = (T*)scratch.take(used, tile_bytes);
            value_copy = (T*)scratch.take(used, tile_bytes);
            for (T*& edge : edges) edge = (T*)scratch.take(used, (a.dim + LANES) * STEP * sizeof(T));
            if (scratch.memory.size() * sizeof(Floats) < used) scratch.memory.resize(used / sizeof(Floats) + 1);
        }
        for (int64_t v = 0; v < width; v++) columns[v] = first_dim(v) * STEP;
    }

    // Units in the order in which they should begin, the longest first: the chunks' of `queries_a_unit` queries, last
    // ones first; then one-token rows, head by head, so that a prefix that rows share stays in the core's cache.
    void run(Team& team) {
        int64_t phase = 0, row = 0, before = 0, unit = team.take();
        while (phase <= a.kv_heads) {
            const int64_t count = row < rows.rows ? rows.counts[row] : 0;
            const int64_t blocks = (count + most_queries - 1) / most_queries;
            const int64_t units = phase == 0 ? (count > 1 ? blocks * a.kv_heads : 0) : count == 1;
            for (; unit < before + units; unit = team.take()) {
                const int64_t piece = unit - before, block = phase ? 0 : blocks - 1 - piece % blocks;
                const int64_t first_query = block * most_queries;
                attend(row, phase ? phase - 1 : piece / blocks, first_query, std::min(count, first_query + most_queries));
            }
            before += units;
            if (++row >= rows.rows) row = 0, phase++;
        }
    }

private:
    const Arguments& a;
    const GroupRows& rows;
    const T *keys, *values;
    const int64_t width, most_queries, most_rows;  // width: vectors of a head
    const bool lies_in_vectors;                    // whether vectors can be read from the cache as it lies

    // The unit
    int64_t row, kv_head, first_position, count;  // count: queries
    Activation* queries;                          // [slices][most_rows][DEPTH], rows by query, then head
    Floats* sums;                                 // [most_rows][width]
    Softmax* softmax;                             // [most_rows]
    int64_t* columns;                             // [width] where a vector of V begins

    // The tile
    struct Run { const T* from; int first, last; };  // V of some tokens, in whole steps
    int64_t key_columns[TILE_VECTORS], key_stride;
    const T* tile_keys;
    Run runs[TILE + 2];
    int num_runs;
    T *key_copy, *value_copy, *edges[2];

    int64_t slices() const { return (a.dim + DEPTH - 1) / DEPTH; }

    // The last vector of a head that is no multiple of LANES overlaps the one before it.
    int64_t first_dim(int64_t vector) const {
        return std::max<int64_t>(0, std::min<int64_t>(vector * LANES, a.dim - LANES));
    }

    void attend(int64_t row_, int64_t kv_head_, int64_t first_query, int64_t last_query) {
        row = row_, kv_head = kv_head_, count = last_query - first_query;
        first_position = rows.starts[row] + first_query;
        const int64_t first_token = rows.offsets[row] + first_query;
        if (a.query_is_bf16) begin((const Bf16*)a.query + first_token * a.query_stride);
        else begin((const float*)a.query + first_token * a.query_stride);
        const int64_t end = first_position + count;
        for (int64_t tile = sees_from(0) / TILE * TILE; tile < end; tile += TILE) attend_tile(tile, 0, count);
        if (a.out_is_bf16) finish((Bf16*)a.out + first_token * a.out_stride);
        else finish((float*)a.out + first_token * a.out_stride);
    }

    template <typename From>
    void begin(const From* from) {
        for (int64_t r = 0; r < count * a.group; r++) {
            const int64_t head = kv_head * a.group + r % a.group;
            const From* line = from + r / a.group * a.query_stride + head * a.query_head_stride;
            for (int64_t d = 0; d < a.dim; d++)
                from_float(queries[(d / DEPTH * most_rows + r) * DEPTH + d % DEPTH], to_float(line[d]));
            for (int64_t v = 0; v < width; v++) sums[r * width + v] = Floats{};
            softmax[r] = {Floats{}, -INF};
            if (a.sinks) {  // as a token without a value that came before all others
                softmax[r].peak = a.sinks[head];
                softmax[r].sums[0] = 1;
            }
        }
    }

    template <typename To>
    void finish(To* to) {
        for (int64_t r = 0; r < count * a.group; r++) {
            To* line = to + r / a.group * a.out_stride + (kv_head * a.group + r % a.group) * a.dim;
            float total = 0;
            for (int t = 0; t < LANES; t++) total += softmax[r].sums[t];
            for (int64_t v = 0; v < width; v++)
                store_first(line + first_dim(v), sums[r * width + v] / total, std::min<int64_t>(a.dim, LANES));
        }
    }

    // The first position that a query of the unit sees.
    int64_t sees_from(int64_t query) const {
        return rows.window ? std::max<int64_t>(0, first_position + query - rows.window + 1) : 0;
    }

    // What any of queries [first, last) sees of a tile.
    Span seen(int64_t tile, int64_t first, int64_t last) const {
        return {(int)std::max<int64_t>(0, sees_from(first) - tile),
                (int)std::min<int64_t>(TILE, first_position + last - tile)};
    }

    void attend_tile(int64_t tile, int64_t first, int64_t last) {
        const Span all = seen(tile, first, last);
        if (all.first >= all.last) return;
        locate(tile, all);
        const bool some_see_less = sees_from(last - 1) > tile + all.first || first_position + first + 1 < tile + all.last;
        if (last - first > 1 && some_see_less && !values_are_finite()) {
            // Weights of zero would not keep a query from a later token's NaN.
            for (int64_t query = first; query < last; query++) attend_tile(tile, query, query + 1);
            return;
        }
        const int64_t end = last * a.group;
        for (int64_t r = first * a.group, size; r < end; r += size) {
            const int64_t blocks = (end - r + MAX_ROWS - 1) / MAX_ROWS;
            size = (end - r + blocks - 1) / blocks;
            attend_block(tile, r, size);
        }
    }

    // Rows [first, first + size) of the unit with the tile.
    void attend_block(int64_t tile, int64_t first, int size) {
        const Span any = seen(tile, first / a.group, (first + size - 1) / a.group + 1);
        if (any.first >= any.last) return;
        const Span vectors = {any.first / LANES, (any.last + LANES - 1) / LANES};
        Floats scores[MAX_ROWS][TILE_VECTORS];
        Activation weights[MAX_ROWS * DEPTH];
        for (int i = 0; i < size; i++)
            for (int v = vectors.first; v < vectors.last; v++) scores[i][v] = Floats{};
        for (int64_t d = 0; d < a.dim; d += DEPTH)
            add_product<T>(size, vectors.last - vectors.first, scores[0] + vectors.first, TILE_VECTORS,
                           queries + d * most_rows + first * DEPTH, tile_keys + d / STEP * key_stride,
                           key_columns + vectors.first, key_stride, std::min<int64_t>(DEPTH, a.dim - d));
        for (int i = 0; i < size; i++) {
            const int64_t query = (first + i) / a.group;
            const Span own = seen(tile, query, query + 1);
            const bool masked = own.first > vectors.first * LANES || own.last < vectors.last * LANES;
            auto weigh_row = masked ? weigh<true, Activation> : weigh<false, Activation>;
            const float decay = weigh_row(softmax[first + i], scores[i], vectors, own, a.scaling, a.softcap,
                                          weights + i * DEPTH);
            if (decay != 1)
                for (int64_t v = 0; v < width; v++) sums[(first + i) * width + v] *= decay;
        }
        const Span steps = {any.first / STEP * STEP, (any.last + STEP - 1) / STEP * STEP};
        for (int i = 0; i < num_runs; i++) {
            const int begin = std::max(runs[i].first, steps.first), end = std::min(runs[i].last, steps.last);
            if (begin < end)
                add_product<T>(size, width, sums + first * width, width, weights + begin,
                               runs[i].from + (begin - runs[i].first) * a.dim, columns, a.dim * STEP, end - begin);
        }
    }

    // Finds tokens [seen.first, seen.last) of the tile in the cache, or copies them where vectors cannot be read there.
    void locate(int64_t tile, Span seen) {
        const int align = lies_in_vectors ? LANES : STEP;
        int64_t page = (tile + seen.first) / a.page, slot = (tile + seen.first) % a.page;
        int token = seen.first / align * align;
        slot -= seen.first - token;
        num_runs = 0;
        tile_keys = lies_in_vectors ? keys : key_copy;
        key_stride = (lies_in_vectors ? a.page : TILE) * STEP;
        while (token < seen.last) {
            const int64_t block = (rows.tables[row * rows.width + page] * a.kv_heads + kv_head) * a.page * a.dim;
            const int end = std::min<int64_t>(token + a.page - slot, TILE);
            if (lies_in_vectors) {
                for (int t = token; t < end; t += LANES) key_columns[t / LANES] = block + (slot + t - token) * STEP;
                add_runs(values + block + slot * a.dim, token, end, seen);
            } else {
                copy(block, slot, token, std::min(end, (seen.last + STEP - 1) / STEP * STEP));
            }
            token = end, slot = 0, page++;
        }
        if (lies_in_vectors) return;
        for (int v = 0; v < TILE_VECTORS; v++) key_columns[v] = v * LANES * STEP;
        add_runs(value_copy, 0, TILE, seen);
    }

    void copy(int64_t block, int64_t slot, int token, int end) {
        const int64_t size = (end - token) * sizeof(T);
        for (int64_t d = 0; d < a.dim; d += STEP)
            memcpy(key_copy + d * TILE + token * STEP, keys + block + d * a.page + slot * STEP, size * STEP);
        memcpy(value_copy + token * a.dim, values + block + slot * a.dim, size * a.dim);
    }

    // Of V of tokens [first, last) that lie at `from`, those that are seen. Where only one of a step is, the other is
    // replaced by zeros.
    void add_runs(const T* from, int first, int last, Span seen) {
        const int begin = std::max(first, seen.first), end = std::min(last, seen.last);
        if (begin >= end) return;
        const int whole_begin = (begin + STEP - 1) / STEP * STEP, whole_end = end / STEP * STEP;
        if (begin < whole_begin) add_edge(edges[0], from + (begin - 1 - first) * a.dim, begin - 1, 1);
        if (whole_begin < whole_end)
            runs[num_runs++] = {from + (whole_begin - first) * a.dim, whole_begin, whole_end};
        if (whole_end < end) add_edge(edges[1], from + (whole_end - first) * a.dim, whole_end, 0);
    }

    void add_edge(T* edge, const T* from, int token, int kept) {
        for (int64_t i = 0; i < a.dim * STEP; i++) edge[i] = i % STEP == kept ? from[i] : T{};
        runs[num_runs++] = {edge, token, token + STEP};
    }

    bool values_are_finite() const {
        Floats nothing = {};  // or NaN
        for (int i = 0; i < num_runs; i++) {
            const int64_t size = (runs[i].last - runs[i].first) * a.dim;
            int64_t at = 0;
            for (; at + LANES <= size; at += LANES) nothing += load(runs[i].from + at) * 0.0f;
            if (at < size) nothing += load_first(runs[i].from + at, size - at) * 0.0f;
        }
        return largest(nothing == 0.0f ? Floats{} : broadcast(1), 0) == 0;
    }
};

template <typename T>
void attend(const void* arguments, const Step& step, Team& team) {
    static thread_local Scratch scratch;
    const Arguments& a = *(const Arguments*)arguments;
    Attender<T>(a, step.groups[a.layer_group], scratch).run(team);
}

}  // namespace

extern "C" void attend_bf16(const void* arguments, const Step& step, Team& team) { attend<Bf16>(arguments, step, team); }
extern "C" void attend_fp32(const void* arguments, const Step& step, Team& team) { attend<float>(arguments, step, team); }
