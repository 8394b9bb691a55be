// Attention of a step's rows, one-token rows and chunks of a prompt alike, over the paged KV cache. attention.py makes
// the ops. Knows nothing of torch, nor how K and V came into the cache (kv_write.cpp).
//
// K of one block and KV head is [dim / STEP][page][STEP], V is [page / STEP][dim][STEP]: both products of attention
// read the cache as it lies, queries times K with lanes over tokens, weights times V with lanes over dims.
//
// A unit of work is some consecutive queries of one row with the query heads of one KV head. It walks the tokens that
// any of them sees in tiles, which begin at multiples of TOKENS in the row; a tile is scores -> softmax so far (online)
// -> weighted values, for a few (query, head) pairs at a time, in fp32. Every number is a sum in the order of its own
// row's tokens or dims, and a hidden token adds an exact zero, so a query's result depends on its own context alone:
// not on chunks, page size, threads or neighbours. Hidden tokens are dropped by selection; what they hold never counts.
// Tile registers take whole runs of tokens, which begin at fixed positions: of one that is not seen V is zero there.

#include "attention_units.h"
#include "kernels.h"
#include "online_softmax.h"
#include "simd.h"
#include "tile_product.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int TOKENS = DEPTH;  // of a tile; weights are left rows of a product, too
constexpr int UNIT_ROWS = 96;  // (query, head) pairs of a unit, about
constexpr int TILE_VECTORS = TOKENS / LANES;
constexpr int TILED_DIM = 32;  // of a head, at least, so that tile registers are used

struct Arguments {
    const void* query;  // [tokens, kv_heads * group, dim], strides in numbers
    int64_t query_stride, query_head_stride;
    void* out;  // [tokens, kv_heads * group * dim], stride in numbers
    int64_t out_stride;
    const void *keys, *values;  // [blocks, kv_heads, page * dim]
    const float* sinks;         // [kv_heads * group] or null
    int64_t layer_group;
    int64_t kv_heads, group, page, dim;
    Rule rule;
    int32_t query_is_bf16, out_is_bf16;
};

// ---- One thread's part of a call

template <typename T>
class Attender {
    typedef typename Product<T>::Activation Activation;
    static constexpr int STEP = Product<T>::STEP;

public:
    Attender(const Arguments& arguments, const GroupRows& rows, std::vector<Floats>& scratch)
        : a(arguments), rows(rows), keys((const T*)(rows.keys ? rows.keys : a.keys)),
          values((const T*)(rows.values ? rows.values : a.values)), width((a.dim + LANES - 1) / LANES),
          most_queries(std::max<int64_t>(1, UNIT_ROWS / a.group)), most_rows(most_queries * a.group),
          lies_in_vectors(a.page % LANES == 0 && a.dim >= LANES), products(a.dim >= TILED_DIM) {
        size_t used = divide(nullptr);
        if (scratch.size() * sizeof(Floats) < used) scratch.resize(used / sizeof(Floats) + 1);
        divide((char*)scratch.data());
        for (int64_t v = 0; v < width; v++) value_columns[v] = first_dim(v) * STEP;
    }

    void run(Team& team) {
        Units units(rows, a.kv_heads, most_queries);
        Unit next;
        for (bool found = units.find(team.take(), unit); found; unit = next) {
            found = units.find(team.take(), next);
            attend(found ? &next : nullptr);
        }
    }

private:
    const Arguments& a;
    const GroupRows& rows;
    const T *keys, *values;
    const int64_t width, most_queries, most_rows;  // width: vectors of a head
    const bool lies_in_vectors;                    // whether vectors can be read from the cache as it lies
    int64_t* value_columns;                        // [width] where each begins in a step of V
    Multiplier<T> products;

    Unit unit;
    Activation* queries;  // [slices of DEPTH dims][most_rows][DEPTH], rows by query, then head
    Floats* sums;         // [most_rows][width]
    Softmax* softmax;     // [most_rows]

    struct Run { const T* from; int first, last; };  // V of some tokens of the tile, in whole steps
    const T* tile_keys;
    int64_t key_columns[TILE_VECTORS], key_stride;
    Run runs[TOKENS + 2];
    int num_runs;
    T *key_copy, *value_copy, *edges[2];
    bool has_next;  // whether the next tile is known
    int64_t next_keys[TILE_VECTORS], next_values[TILE_VECTORS];

    // Gives parts of the scratch memory their places; returns its size.
    size_t divide(char* memory) {
        size_t used = 0;
        auto take = [&](auto*& part, int64_t count) {
            part = (std::remove_reference_t<decltype(part)>)(memory + used);
            used += (count * sizeof *part + 63) / 64 * 64;
        };
        take(queries, (a.dim + DEPTH - 1) / DEPTH * most_rows * DEPTH);
        take(sums, most_rows * width);
        take(softmax, most_rows);
        take(value_columns, width);
        take(key_copy, TOKENS * a.dim);
        take(value_copy, (TOKENS * a.dim + LANES * STEP));  // vectors of short heads reach beyond their step
        for (T*& edge : edges) take(edge, (a.dim + LANES) * STEP);
        return used;
    }

    // The last vector of a head that is no multiple of LANES overlaps the one before it.
    int64_t first_dim(int64_t vector) const {
        return std::max<int64_t>(0, std::min<int64_t>(vector * LANES, a.dim - LANES));
    }

    int64_t position(int64_t query) const { return rows.starts[unit.row] + unit.first + query; }

    int64_t sees_from(int64_t position) const {
        return rows.window ? std::max<int64_t>(0, position - rows.window + 1) : 0;
    }

    // What any of the unit's queries [first, last) sees of a tile.
    Span seen(int64_t tile, int64_t first, int64_t last) const {
        return {(int)std::max<int64_t>(0, sees_from(position(first)) - tile),
                (int)std::min<int64_t>(TOKENS, position(last) - tile)};
    }

    int64_t block_of(const Unit& of, int64_t page) const {
        return (rows.tables[rows.table_of[of.row] * rows.width + page] * a.kv_heads + of.kv_head) * a.page * a.dim;
    }

    // ---- A unit

    void attend(const Unit* next) {
        const int64_t token = rows.offsets[unit.row] + unit.first, end = position(unit.count);
        if (a.query_is_bf16) begin((const Bf16*)a.query + token * a.query_stride);
        else begin((const float*)a.query + token * a.query_stride);
        for (int64_t tile = sees_from(position(0)) / TOKENS * TOKENS; tile < end; tile += TOKENS) {
            has_next = lies_in_vectors && unit.count == 1 && (tile + TOKENS < end || next);
            if (has_next && tile + TOKENS < end) look_ahead(unit, tile + TOKENS, end);
            else if (has_next) look_ahead(*next);
            attend_tile(tile, 0, unit.count);
        }
        if (a.out_is_bf16) finish((Bf16*)a.out + token * a.out_stride);
        else finish((float*)a.out + token * a.out_stride);
    }

    template <typename From>
    void begin(const From* from) {
        for (int64_t r = 0; r < unit.count * a.group; r++) {
            const int64_t head = unit.kv_head * a.group + r % a.group;
            const From* line = from + r / a.group * a.query_stride + head * a.query_head_stride;
            for (int64_t d = 0; d < a.dim; d += DEPTH)
                convert(queries + d * most_rows + r * DEPTH, line + d, std::min<int64_t>(DEPTH, a.dim - d));
            for (int64_t v = 0; v < width; v++) sums[r * width + v] = Floats{};
            softmax[r] = {Floats{}, -INF};
            if (a.sinks) {  // as a token without a value that came before all others
                softmax[r].peak = a.sinks[head] * LOG2_E;
                softmax[r].sums[0] = 1;
            }
        }
    }

    template <typename To>
    void finish(To* to) {
        for (int64_t r = 0; r < unit.count * a.group; r++) {
            To* line = to + r / a.group * a.out_stride + (unit.kv_head * a.group + r % a.group) * a.dim;
            float total = 0;
            for (int t = 0; t < LANES; t++) total += softmax[r].sums[t];
            for (int64_t v = 0; v < width; v++) {
                const Floats value = sums[r * width + v] / total;
                if (a.dim >= LANES) store(line + first_dim(v), value);
                else store_first(line, value, a.dim);
            }
        }
    }

    // ---- A tile with the unit's queries [first, last)

    void attend_tile(int64_t tile, int64_t first, int64_t last) {
        const Span all = seen(tile, first, last);
        if (all.first >= all.last) return;
        locate(tile, all);
        const bool some_see_less =
            sees_from(position(last - 1)) > tile + all.first || position(first) + 1 < tile + all.last;
        if (last - first > 1 && some_see_less && !values_are_finite()) {
            // Weights of zero would not keep a query from a later token's NaN.
            for (int64_t query = first; query < last; query++) attend_tile(tile, query, query + 1);
            return;
        }
        const int64_t begin = first * a.group, count = (last - first) * a.group;
        const int64_t parts = (count + products.most_rows - 1) / products.most_rows;
        Floats scores[Multiplier<T>::MOST_ROWS][TILE_VECTORS];
        alignas(64) Activation weights[Multiplier<T>::MOST_ROWS * DEPTH];
        Pairs now = pairs(tile, begin, begin + count / parts);
        score(now, scores);
        for (int64_t i = 1; i <= parts; i++) {
            weigh_rows(tile, now, scores, weights);
            const Pairs weighed = now;
            if (i < parts) {  // before what needs the weights, since tile registers wait for them to reach the cache
                now = pairs(tile, begin + count * i / parts, begin + count * (i + 1) / parts);
                score(now, scores);
            }
            add_values(weighed, weights);
        }
    }

    struct Pairs {  // (query, head) pairs [first, first + size) of the unit, and what any of them sees of a tile
        int64_t first;
        int size;
        Span any, vectors;

        bool see_nothing() const { return any.first >= any.last; }
    };

    Pairs pairs(int64_t tile, int64_t first, int64_t last) const {
        const Span any = seen(tile, first / a.group, (last - 1) / a.group + 1);
        return {first, int(last - first), any, {any.first / LANES, (any.last + LANES - 1) / LANES}};
    }

    void score(const Pairs& p, Floats (*scores)[TILE_VECTORS]) {
        if (p.see_nothing()) return;
        for (int64_t d = 0; d < a.dim; d += DEPTH) {
            const T* from = tile_keys + d / STEP * key_stride;
            const Columns<T> columns = {from, from, key_columns + p.vectors.first,
                                        (has_next ? next_keys : key_columns) + p.vectors.first, key_stride, from};
            products.add(scores[0] + p.vectors.first, TILE_VECTORS, queries + d * most_rows + p.first * DEPTH, columns,
                         p.size, p.vectors.last - p.vectors.first, std::min<int64_t>(DEPTH, a.dim - d), d == 0);
        }
    }

    void weigh_rows(int64_t tile, const Pairs& p, Floats (*scores)[TILE_VECTORS], Activation* weights) {
        if (p.see_nothing()) return;
        if (products.tiled && p.vectors.last - p.vectors.first < TILE_VECTORS)
            memset(weights, 0, p.size * DEPTH * sizeof *weights);
        for (int i = 0; i < p.size; i++) {
            const int64_t query = (p.first + i) / a.group;
            const Span own = seen(tile, query, query + 1);
            const bool masked = own.first > p.vectors.first * LANES || own.last < p.vectors.last * LANES;
            auto weigh_row = masked ? weigh<true, Activation> : weigh<false, Activation>;
            const float decay =
                weigh_row(softmax[p.first + i], scores[i], p.vectors, own, a.rule, weights + i * DEPTH);
            if (decay != 1)
                for (int64_t v = 0; v < width; v++) sums[(p.first + i) * width + v] *= decay;
        }
    }

    void add_values(const Pairs& p, const Activation* weights) {
        if (p.see_nothing()) return;
        const int step = products.step, first = p.any.first / step * step, last = (p.any.last + step - 1) / step * step;
        for (int i = 0; i < num_runs; i++) {
            const int begin = std::max(runs[i].first, first), end = std::min(runs[i].last, last);
            if (begin >= end) continue;
            const T *from = runs[i].from + (begin - runs[i].first) * a.dim, *next = from, *next_half = from;
            if (has_next) {
                next = values + next_values[begin / LANES] + begin % LANES * a.dim;
                if (products.tiled) next_half = values + next_values[begin / LANES + 1] - LANES * a.dim;
            }
            const Columns<T> columns = {from, next, value_columns, value_columns, a.dim * STEP, next_half};
            products.add(sums + p.first * width, width, weights + begin, columns, p.size, width, end - begin, false);
        }
    }

    // ---- Where a tile lies

    // Tokens [seen.first, seen.last) of a tile: in the cache, or copied where vectors cannot be read there.
    void locate(int64_t tile, Span seen) {
        const int align = lies_in_vectors ? LANES : STEP;
        num_runs = 0;
        const Span aligned = {seen.first / align * align, seen.last};
        for_each_page(tile, aligned, [&](int64_t block, int64_t slot, int token, int end) {
            if (lies_in_vectors)
                for (int t = token; t < end; t += LANES) key_columns[t / LANES] = block + (slot + t - token) * STEP;
            else copy_keys(block, slot, token, end);
            if (products.tiled) return;
            if (lies_in_vectors) add_runs(values + block + slot * a.dim, token, end, seen);
            else copy_values(block, slot, token, end);
        });
        tile_keys = lies_in_vectors ? keys : key_copy;
        key_stride = (lies_in_vectors ? a.page : TOKENS) * STEP;
        if (!lies_in_vectors)
            for (int v = 0; v < TILE_VECTORS; v++) key_columns[v] = v * LANES * STEP;
        if (products.tiled)
            for (int first = seen.first / products.step * products.step; first < seen.last; first += products.step)
                add_whole_run(tile, first, seen);
        else if (!lies_in_vectors) add_runs(value_copy, 0, TOKENS, seen);
    }

    // Calls visit(block, slot, first, last) for the tokens of a tile that lie side by side.
    template <typename Visit>
    void for_each_page(int64_t tile, Span tokens, Visit visit) {
        int64_t page = (tile + tokens.first) / a.page, slot = (tile + tokens.first) % a.page;
        for (int token = tokens.first, end; token < tokens.last; token = end, slot = 0, page++) {
            end = std::min<int64_t>(token + a.page - slot, tokens.last);
            visit(block_of(unit, page), slot, token, end);
        }
    }

    void copy_keys(int64_t block, int64_t slot, int first, int last) {
        for (int64_t d = 0; d < a.dim; d += STEP)
            memcpy(key_copy + d * TOKENS + first * STEP, keys + block + d * a.page + slot * STEP,
                   (last - first) * STEP * sizeof(T));
    }

    void copy_values(int64_t block, int64_t slot, int first, int last) {
        last = (last + STEP - 1) / STEP * STEP;
        memcpy(value_copy + first * a.dim, values + block + slot * a.dim, (last - first) * a.dim * sizeof(T));
    }

    // As many tokens from `first` on as a tile register takes: zeros for those that are not seen.
    void add_whole_run(int64_t tile, int first, Span seen) {
        const int size = products.step, last = first + size;
        const Span some = {std::max(first, seen.first), std::min(last, seen.last)};
        if (some.last - some.first == size && a.page % size == 0) {
            const int64_t page = (tile + first) / a.page, slot = (tile + first) % a.page;
            runs[num_runs++] = {values + block_of(unit, page) + slot * a.dim, first, last};
            return;
        }
        T* const copy = value_copy + first * a.dim;
        if (some.last - some.first < size) memset(copy, 0, size * a.dim * sizeof(T));
        for_each_page(tile, {some.first / STEP * STEP, some.last},
                      [&](int64_t block, int64_t slot, int begin, int end) { copy_values(block, slot, begin, end); });
        if (some.first % STEP) clear_value(some.first - 1);  // in a step with one that is seen
        if (some.last % STEP) clear_value(some.last);
        runs[num_runs++] = {copy, first, last};
    }

    void clear_value(int token) {
        T* const step = value_copy + token / STEP * STEP * a.dim;
        for (int64_t d = 0; d < a.dim; d++) step[d * STEP + token % STEP] = T{};
    }

    // V of tokens [first, last) of the tile lies at `from`; takes what is seen. Where only one token of a step is, the
    // other is replaced by zeros.
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
        for (int64_t d = 0; d < a.dim; d++)
            for (int i = 0; i < STEP; i++) edge[d * STEP + i] = i == kept ? from[d * STEP + i] : T{};
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

    void look_ahead(const Unit& of) {
        const int64_t first = rows.starts[of.row] + of.first;
        look_ahead(of, sees_from(first) / TOKENS * TOKENS, first + of.count);
    }

    // Notes where the vectors of a tile lie, to be fetched while another is computed.
    void look_ahead(const Unit& of, int64_t tile, int64_t end) {
        int64_t page = tile / a.page, slot = tile % a.page;
        for (int v = 0; v < TILE_VECTORS; v++) {
            if (tile + v * LANES >= end) {
                next_keys[v] = next_keys[0], next_values[v] = next_values[0];
                continue;
            }
            const int64_t block = block_of(of, page);
            next_keys[v] = block + slot * STEP;
            next_values[v] = block + slot * a.dim;
            if ((slot += LANES) == a.page) slot = 0, page++;
        }
    }
};

template <typename T>
void attend(const void* arguments, const Step& step, Team& team) {
    static thread_local std::vector<Floats> scratch;
    const Arguments& a = *(const Arguments*)arguments;
    Attender<T>(a, step.groups[a.layer_group], scratch).run(team);
}

}  // namespace

extern "C" void attend_bf16(const void* a, const Step& step, Team& team) { attend<Bf16>(a, step, team); }
extern "C" void attend_fp32(const void* a, const Step& step, Team& team) { attend<float>(a, step, team); }
