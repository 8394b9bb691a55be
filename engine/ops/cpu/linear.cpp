// Linear layers and embeddings from packed weights (gemm.h), and the packing. linear.py passes the addresses.
//
// The rows and panels of a product are divided into pieces that threads take. A piece goes along K in blocks that the
// caches hold, adds up its sums in scratch memory and then finishes them: scale, bias, activation, softcap, residual.

#include "gemm.h"
#include "kernels.h"
#include "tiles.h"

#include <algorithm>

namespace {

// ---- Arguments, from linear.py

struct Weight {
    void* panels;
    float* scales;      // [outputs] of 8-bit weights, else null
    int64_t outputs, inputs;
    int64_t interleaved;  // 1: panels of the first and the second half of the outputs take turns
};

enum Act { NONE, SILU, GELU_TANH, GELU };

struct Linear {
    const Weight* weight;
    const void* x;  // [rows, inputs], Activation
    int64_t x_stride;
    void* out;  // [rows, outputs]; with interleaved weights outputs / 2
    int64_t out_stride;
    int64_t out_fp32;   // 1: fp32, 0: Activation
    const float* bias;  // [outputs] or null
    int64_t kept;       // 1: rows are step.kept, 0: step.tokens
    int64_t add;        // 1: added to `out`, which is fp32
    int64_t act;
    float softcap;  // 0: none
};

struct Embedding {
    const Weight* weight;
    float* out;  // [tokens, inputs]
    int64_t out_stride;
    float scale;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Where things lie

struct Layout {
    int64_t half, panels;  // outputs that follow each other; panels in all

    explicit Layout(const Weight& w)
        : half(w.interleaved ? w.outputs / 2 : w.outputs), panels(ceil_div(half, PANEL) * (w.interleaved ? 2 : 1)) {}
};

// Calls visit(k, number k of the output) for all its numbers.
template <typename W, typename Visit>
inline void for_each_number(const Weight& w, int64_t output, Visit visit) {
    const Layout layout(w);
    const int64_t row = output % layout.half, part = output / layout.half;
    const int64_t panel = w.interleaved ? row / PANEL * 2 + part : row / PANEL;
    const int64_t steps = ceil_div(w.inputs, W::STEP), whole = w.inputs / W::STEP;
    auto* step = (typename W::Stored*)w.panels + panel * steps * W::STEP * PANEL + W::place(0, row % PANEL);
    for (int64_t i = 0; i < whole; i++, step += W::STEP * PANEL)
        for (int64_t k = 0; k < W::STEP; k++) visit(i * W::STEP + k, step[W::place(k, 0)]);
    if (whole < steps) visit(whole * W::STEP, step[0]);
}

// ---- Finishing sums

inline Floats sigmoid(Floats x) {
    Floats e = exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? (x < -87.0f ? Floats{} : e) : Floats{} + 1.0f) / (1.0f + e);
}

inline Floats normal_cdf(Floats x) {  // to 1e-7; Abramowitz and Stegun 7.1.26
    Floats z = (x < 0.0f ? -x : x) * 0.707106781f, t = 1.0f / (z * 0.3275911f + 1.0f);
    Floats p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    Floats tail = p * t * exp_negative(-z * z) * 0.5f;
    return x < 0.0f ? tail : 1.0f - tail;
}

inline Floats activated(Floats x, int64_t act) {
    switch (act) {
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
        case GELU: return x * normal_cdf(x);
        default: return x;
    }
}

template <typename A>
void put(A* to, Floats value, int64_t count, bool add) {
    if (count >= LANES) store(to, add ? load(to) + value : value);
    else store_first(to, add ? load_first(to, count) + value : value, count);
}

inline Floats load_some(const float* from, int64_t count) {
    return count >= LANES ? load(from) : load_first(from, count);
}

// One row's sums of panels [first, last); their outputs to the row at `out`.
template <typename A>
void finish(const Linear& op, const float* sums, int64_t first, int64_t last, A* out) {
    const Weight& w = *op.weight;
    const Layout layout(w);
    auto complete = [&](const float* sum, int64_t output, int64_t count) {
        Floats value = load(sum);
        if (w.scales) value *= load_some(w.scales + output, count);
        if (op.bias) value += load_some(op.bias + output, count);
        return value;
    };
    const int64_t parts = w.interleaved ? 2 : 1;
    for (int64_t panel = first; panel < last; panel += parts, sums += parts * PANEL) {
        const int64_t begin = panel / parts * PANEL;
        for (int64_t i = 0; i < PANEL && begin + i < layout.half; i += LANES) {
            const int64_t count = layout.half - begin - i;
            Floats value = activated(complete(sums + i, begin + i, count), op.act);
            if (w.interleaved) value *= complete(sums + PANEL + i, layout.half + begin + i, count);
            if (op.softcap) value = op.softcap * tanh_lanes(value / op.softcap);
            put(out + begin + i, value, count, op.add);
        }
    }
}

// ---- Blocks

constexpr int64_t BLOCK_ROWS = 16 * ROWS;
constexpr int64_t BLOCK_BYTES = 24 << 10;  // of a panel, as it is multiplied: half of a first-level cache, or more
constexpr int64_t GROUP = 8;               // panels that a piece of BLOCK_ROWS rows has room for
constexpr int64_t PIECES = 16;             // for each thread, so that one that is held up does less
constexpr int64_t AHEAD = 4096;            // bytes between what is read and what is fetched

struct Scratch {
    float sums[BLOCK_ROWS * GROUP * PANEL];
    char wide[BLOCK_BYTES];
};

template <typename W>
using AddProducts = decltype(&add_products<W, 1, 1>);

template <typename W, int R = ROWS>
AddProducts<W> products_of(int64_t rows, bool alone) {
    if constexpr (R > 1)
        if (rows < R) return products_of<W, R - 1>(rows, alone);
    return alone ? add_products<W, R, 1> : add_products<W, R, together(R)>;
}

template <typename W>
struct Block {  // `steps` steps of some rows and panels
    const typename W::Activation* left;
    int64_t left_stride, rows;
    const typename W::Stored* right;
    int64_t panel_stride, panels, steps;
    float* sums;  // [rows, panels * PANEL]
    int64_t sums_stride;
    bool set;  // the sums, instead of adding to them
};

// Up to ROWS rows: every weight is used once. It is fetched a while before; the last steps fetch what comes next.
template <typename W>
void add_few_rows(const Block<W>& b) {
    const int64_t most = together(b.rows), last = std::min(b.steps, AHEAD / Lines<W>::BYTES), first = b.steps - last;
    for (int64_t panel = 0, count; panel < b.panels; panel += count) {
        count = panel + most <= b.panels ? most : 1;
        const auto add = products_of<W>(b.rows, count == 1);
        const typename W::Stored *right = b.right + panel * b.panel_stride, *rest = right + first * W::STEP * PANEL;
        float* sums = b.sums + panel * PANEL;
        if (first)
            add(b.left, b.left_stride, right, b.panel_stride, first, sums, b.sums_stride, b.set,
                (const char*)(right + last * W::STEP * PANEL), LINE);
        add(b.left + first * W::STEP, b.left_stride, rest, b.panel_stride, last, sums, b.sums_stride, b.set && !first,
            (const char*)(right + count * b.panel_stride), LINE);
    }
}

// Parts of rows differ by one row at most, since small ones are slow. They share the fetching of the next panel, so that
// products and memory work side by side.
template <typename W>
void add_block(const Block<W>& b) {
    const int64_t parts = ceil_div(b.rows, ROWS);
    if (parts == 1) return add_few_rows(b);
    for (int64_t panel = 0; panel < b.panels; panel++) {
        const typename W::Stored *right = b.right + panel * b.panel_stride, *next = right + b.panel_stride;
        for (int64_t i = 0; i < parts; i++) {
            const int64_t begin = b.rows * i / parts, end = b.rows * (i + 1) / parts;
            products_of<W>(end - begin, true)(b.left + begin * b.left_stride, b.left_stride, right, b.panel_stride,
                                              b.steps, b.sums + begin * b.sums_stride + panel * PANEL, b.sums_stride,
                                              b.set, (const char*)next + b.steps * Lines<W>::BYTES * i / parts,
                                              LINE / parts);
        }
    }
}

// With many rows pairs of bytes are widened once for all. (Single bytes are widened in time: other units do it.)
template <typename T>
void add_block_in(const Block<Plain<T>>& block, void*) { add_block(block); }

template <typename T>
void add_block_in(const Block<Quantized<T>>& b, void* scratch) {
    if (Product<T>::STEP == 1 || b.rows <= 2 * ROWS) return add_block(b);
    T* wide = (T*)scratch;
    for (int64_t panel = 0; panel < b.panels; panel++) {
        widen(b.right + panel * b.panel_stride, b.steps, wide);
        add_block(Block<Plain<T>>{b.left, b.left_stride, b.rows, wide, 0, 1, b.steps, b.sums + panel * PANEL,
                                  b.sums_stride, b.set});
    }
}

// By tiles, where there are any for these weights, from the first step to the last whole tile: how many steps that is.
// It does not depend on the rows, whose sums are then made in the same way whatever is beside them.
template <typename W>
int64_t add_tiled(const Linear&, const typename W::Activation*, int64_t, const typename W::Stored*, int64_t, int64_t,
                  Scratch&) {
    return 0;
}

#if defined(TILES)
constexpr int64_t TILED_STEPS = 96;  // of a block: those of two panels, and of the rows, stay in the first-level cache

template <>
int64_t add_tiled<Plain<Bf16>>(const Linear& op, const Bf16* x, int64_t rows, const Bf16* right, int64_t panel_stride,
                               int64_t panels, Scratch& scratch) {
    const int64_t whole = op.weight->inputs / 2 / TILE, stride = panels * PANEL;
    if (!tiles_allowed() || whole == 0) return 0;
    const int64_t blocks = rows <= TILE ? 1 : ceil_div(whole * TILE, TILED_STEPS);
    int64_t shaped = 0;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t begin = whole * i / blocks * TILE, end = whole * (i + 1) / blocks * TILE;
        for (int64_t panel = 0, count; panel < panels; panel += count) {
            count = std::min<int64_t>(panels - panel, 2);
            const auto add = count == 2 ? add_tiles<PANEL, 2> : add_tiles<PANEL, 1>;
            for (int64_t row = 0; row < rows; row += TILE) {
                const int64_t height = std::min<int64_t>(rows - row, TILE);
                if (height != shaped) shape_tiles(TileShapes(shaped = height));
                add(x + row * op.x_stride + begin * 2, op.x_stride, right + panel * panel_stride + begin * 2 * PANEL,
                    panel_stride, end - begin, scratch.sums + row * stride + panel * PANEL, stride, i == 0);
            }
        }
    }
    release_tiles();
    return whole * TILE;
}
#endif

template <typename W>
void add_up(const Linear& op, const typename W::Activation* x, int64_t rows, int64_t first, int64_t panels,
            Scratch& scratch) {
    constexpr int64_t NUMBERS = W::STEP * PANEL;  // of a step
    constexpr int64_t MOST = BLOCK_BYTES / (NUMBERS * sizeof(typename W::Wide::Stored));
    const int64_t inputs = op.weight->inputs, whole = inputs / W::STEP;
    const int64_t panel_stride = ceil_div(inputs, W::STEP) * NUMBERS, sums_stride = panels * PANEL;
    const auto* right = (const typename W::Stored*)op.weight->panels + first * panel_stride;
    const int64_t tiled = add_tiled<W>(op, x, rows, right, panel_stride, panels, scratch), rest = whole - tiled;
    const int64_t blocks = rows <= ROWS ? std::min<int64_t>(rest, 1) : ceil_div(rest, MOST);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t begin = tiled + rest * i / blocks, end = tiled + rest * (i + 1) / blocks;
        add_block_in(Block<W>{x + begin * W::STEP, op.x_stride, rows, right + begin * NUMBERS, panel_stride, panels,
                              end - begin, scratch.sums, sums_stride, begin == 0},
                     scratch.wide);
    }
    if (whole * W::STEP < inputs) {  // K is odd: the last number, and 0
        typename W::Activation last[BLOCK_ROWS][2] = {};
        for (int64_t r = 0; r < rows; r++) last[r][0] = x[r * op.x_stride + inputs - 1];
        add_block(Block<W>{last[0], 2, rows, right + whole * NUMBERS, panel_stride, panels, 1, scratch.sums,
                           sums_stride, whole == 0});
    }
}

// ---- Pieces: `rows` rows and panels [first, last)

template <typename W>
void piece(const Linear& op, int64_t row, int64_t rows, int64_t first, int64_t last, Scratch& scratch) {
    typedef typename W::Activation A;
    add_up<W>(op, (const A*)op.x + row * op.x_stride, rows, first, last - first, scratch);
    for (int64_t r = 0; r < rows; r++) {
        const float* sums = scratch.sums + r * (last - first) * PANEL;
        const int64_t place = (row + r) * op.out_stride;
        if (op.out_fp32) finish(op, sums, first, last, (float*)op.out + place);
        else finish(op, sums, first, last, (A*)op.out + place);
    }
}

// Some pieces for each thread, of as many panels as scratch memory has room for. Pieces of the same rows follow each
// other, so that the rows stay in the second-level cache.
template <typename W>
void linear(const void* arguments, const Step& step, Team& team) {
    alignas(64) static thread_local Scratch own;
    Scratch& scratch = own;
    const Linear& op = *(const Linear*)arguments;
    const int64_t rows = op.kept ? step.kept : step.tokens, panels = Layout(*op.weight).panels;
    if (rows == 0) return;
    const int64_t chunk = ceil_div(rows, ceil_div(rows, BLOCK_ROWS)), chunks = ceil_div(rows, chunk);
    const int64_t least = std::max(2, together(std::min<int64_t>(chunk, ROWS)));
    const int64_t most = BLOCK_ROWS * GROUP / chunk;
    const int64_t fair = ceil_div(panels * chunks, PIECES * team.threads);
    const int64_t group = std::min(std::max(fair, least), most) / 2 * 2;  // interleaved panels stay together
    const int64_t groups = ceil_div(panels, group);
    for (int64_t i = team.take(); i < chunks * groups; i = team.take()) {
        const int64_t row = i / groups * chunk, first = i % groups * group;
        piece<W>(op, row, std::min(chunk, rows - row), first, std::min(first + group, panels), scratch);
    }
}

// ---- Embedding

template <typename W>
void embed(const void* arguments, const Step& step, Team& team) {
    const Embedding& op = *(const Embedding*)arguments;
    const Weight& w = *op.weight;
    for (int64_t token = team.take(); token < step.tokens; token = team.take()) {
        const int64_t id = step.ids[token];
        const float scale = op.scale * (w.scales ? w.scales[id] : 1.0f);
        float* out = op.out + token * op.out_stride;
        for_each_number<W>(w, id, [=](int64_t k, typename W::Stored number) { out[k] = to_float(number) * scale; });
    }
}

// ---- Packing

inline void pack_number(float& to, float x, float) { to = x; }
inline void pack_number(Bf16& to, Bf16 x, float) { to = x; }
inline void pack_number(int8_t& to, float x, float scale) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    to = scale > 0 ? int8_t(int32_t(x / scale + round - round)) : 0;
}
inline void pack_number(int8_t& to, Bf16 x, float scale) { pack_number(to, to_float(x), scale); }

template <typename T>
float scale_of(const T* row, int64_t count) {  // NaN if a number is not finite
    float most = 0;
    bool finite = true;
    for (int64_t k = 0; k < count; k++) {
        const float size = __builtin_fabsf(to_float(row[k]));
        finite &= size < INF;
        most = size > most ? size : most;
    }
    return finite ? most / 127 : std::numeric_limits<float>::quiet_NaN();
}

template <typename W, typename T>
void pack(const Weight& w, const T* rows, int64_t stride, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i++, rows += stride) {
        const float scale = w.scales ? w.scales[first + i] = scale_of(rows, w.inputs) : 1;
        for_each_number<W>(w, first + i,
                           [=](int64_t k, typename W::Stored& number) { pack_number(number, rows[k], scale); });
    }
}

}  // namespace

extern "C" int32_t bf16_activation_bytes() { return sizeof(Product<Bf16>::Activation); }

// Of the panels of a weight; T is the model's dtype.
#define WEIGHTS(name, W, T)                                                                                         \
    extern "C" int64_t packed_bytes_##name(const Weight* w) {                                                       \
        return Layout(*w).panels * ceil_div(w->inputs, W::STEP) * W::STEP * PANEL * sizeof(W::Stored);              \
    }                                                                                                               \
    /* Puts rows [count, inputs] to outputs first, first + 1, ... of zeroed panels. */                              \
    extern "C" void pack_##name(const Weight* w, const T* rows, int64_t stride, int64_t first, int64_t count) {     \
        pack<W>(*w, rows, stride, first, count);                                                                    \
    }                                                                                                               \
    extern "C" void linear_##name(const void* arguments, const Step& step, Team& team) {                            \
        linear<W>(arguments, step, team);                                                                           \
    }                                                                                                               \
    extern "C" void embed_##name(const void* arguments, const Step& step, Team& team) {                             \
        embed<W>(arguments, step, team);                                                                            \
    }

WEIGHTS(fp32, Plain<float>, float)
WEIGHTS(bf16, Plain<Bf16>, Bf16)
WEIGHTS(fp32_int8, Quantized<float>, float)
#if defined(BF16_DOT)
WEIGHTS(bf16_int8, Quantized<Bf16>, Bf16)
#else
WEIGHTS(bf16_int8, Quantized<float>, Bf16)
#endif
