// The softmax of a row whose scores come tile after tile. Scores are multiplied by log2(e), so that weights are powers
// of 2. attention.cpp uses it.
#pragma once

#include "simd.h"

constexpr float LOG2_E = 1.44269504f;

struct Softmax {  // over the tokens so far
    Floats sums;  // lane t: of the weights of tokens t, t + LANES, ...
    float peak;   // of the scores, times log2(e)
};

struct Rule { float scaling, softcap; };  // softcap 0: none
struct Span { int first, last; };         // first <= i < last

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b if a is NaN

inline float largest(Floats x, float at_least) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
#pragma GCC unroll 4
    for (int i = 1; i < LANES / 4; i++) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) at_least = parts[0][i] > at_least ? parts[0][i] : at_least;
    return at_least;
}

// 2^x for x <= 0 to about 1 ulp: 2^n 2^r with |r| <= 1/2. Below -125: as -125. NaN stays NaN.
inline Floats power_of_2(Floats x) {
    x = larger(broadcast(-125), x);
    const float round = 12582912.0f + 127;  // 1.5 * 2^23 leaves an integer in the low bits, here the exponent of 2^n
    const Floats shifted = x + round, r = x - (shifted - round);
    Floats p = r * 1.326472579e-3f + 9.671512741e-3f;
    p = p * r + 5.550733748e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
    p = p * r + 1.0f;
    return p * (Floats)((Ints)shifted << 23);
}

// The lanes of vector v of a tile that hold tokens of `seen`.
inline Ints lanes_of(Span seen, int v) {
    Ints token;
    for (int t = 0; t < LANES; t++) token[t] = v * LANES + t;
    return (token >= seen.first) & (token < seen.last);
}

// Turns the products of a tile's vectors into weights relative to the new peak, 0 for tokens that are not seen; returns
// the factor for what came before. MASKED: some are not seen.
template <bool MASKED, typename Activation>
float weigh(Softmax& softmax, Floats* scores, Span vectors, Span seen, Rule rule, Activation* weights) {
    Floats most = broadcast(-INF);
    for (int v = vectors.first; v < vectors.last; v++) {
        if (rule.softcap) scores[v] = rule.softcap * LOG2_E * tanh_lanes(scores[v] * rule.scaling / rule.softcap);
        else scores[v] *= rule.scaling * LOG2_E;
        if (MASKED) scores[v] = lanes_of(seen, v) ? scores[v] : broadcast(-INF);
        most = larger(scores[v], most);
    }
    const float before = softmax.peak, peak = largest(most, before);
    float decay = 1 + (peak - peak);  // a peak of infinity, from a sink or a score, makes everything NaN
    if (before == -INF) decay = 0;
    else if (peak > before) decay = power_of_2(broadcast(before - peak))[0];
    softmax.sums *= decay;
    softmax.peak = peak;
    for (int v = vectors.first; v < vectors.last; v++) {
        Floats weight = power_of_2(scores[v] - peak);
        if (MASKED) weight = lanes_of(seen, v) ? weight : Floats{};
        softmax.sums += weight;
        store_nearest(weights + v * LANES, weight);
    }
    return decay;
}
