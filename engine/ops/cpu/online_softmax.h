// The softmax of a row whose scores come tile after tile.
#pragma once

#include "simd.h"

struct Softmax {  // over the tokens so far
    Floats sums;  // lane t: of the weights of tokens t, t + LANES, ...
    float peak;
};

struct Rule { float scaling, softcap; };  // softcap 0: none
struct Span { int first, last; };         // first <= i < last

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b if a is NaN

inline float largest(Floats x, float at_least) {
    const float* lanes = (const float*)&x;
    float most[4] = {at_least, at_least, at_least, at_least};
    for (int i = 0; i < LANES; i++) most[i % 4] = lanes[i] > most[i % 4] ? lanes[i] : most[i % 4];
    for (int i = 1; i < 4; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    return most[0];
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
        scores[v] *= rule.scaling;
        if (rule.softcap) scores[v] = rule.softcap * tanh_lanes(scores[v] / rule.softcap);
        if (MASKED) scores[v] = lanes_of(seen, v) ? scores[v] : broadcast(-INF);
        most = larger(scores[v], most);
    }
    const float before = softmax.peak, peak = largest(most, before);
    float decay = 1 + (peak - peak);  // a peak of infinity, from a sink or a score, makes everything NaN
    if (before == -INF) decay = 0;
    else if (peak > before) decay = exp_negative(broadcast(before - peak))[0];
    softmax.sums *= decay;
    softmax.peak = peak;
    for (int v = vectors.first; v < vectors.last; v++) {
        Floats weight = exp_negative(scores[v] - peak);
        if (MASKED) weight = lanes_of(seen, v) ? weight : Floats{};
        softmax.sums += weight;
        store(weights + v * LANES, weight);
    }
    return decay;
}
