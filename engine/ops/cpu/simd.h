// Vectors of LANES numbers in GCC's and clang's vector extension, and the product that all kernels are made of.
//
// bf16 numbers are multiplied in pairs along the summed dimension: with AVX512-BF16 by its dot product, elsewhere as two
// fp32 products. `Product<T>` hides which; sums are fp32 in either case and run in the order of the pairs.
#pragma once

#include "instructions.h"

#include <cstdint>
#include <cstring>
#include <limits>

// The machine's own sizes, unless the build asks for those of another one (tests).
#if !defined(BF16_DOT) && defined(__AVX512BF16__)
#define BF16_DOT  // rows are kept in bf16 and multiplied in pairs
#endif
#if !defined(LANES)
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Bf16 { uint16_t bits; };

constexpr float INF = std::numeric_limits<float>::infinity();

// ---- One number

inline float to_float(float x) { return x; }

inline float to_float(Bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline void from_float(float& to, float x) { to = x; }

inline void from_float(Bf16& to, float x) {  // rounds to nearest even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

// ---- Load and store

template <typename V>
inline V load_as(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }

inline Floats load(const Bf16* from) {
    return (Floats)(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

template <typename T>
inline Floats load_first(const T* from, int64_t count) {  // zeros behind `count`
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

inline Halves rounded(Floats value) {  // to bf16, nearest even; NaN stays NaN
    Words bits = (Words)value;
    Words up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector(value == value ? up : bits >> 16 | 0x40, Halves);
}

inline void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

inline void store(Bf16* to, Floats value) {
    Halves halves = rounded(value);
    memcpy(to, &halves, sizeof halves);
}

// As `store`, by the processor's instruction if it has one, which takes numbers below the least normal one for 0.
inline void store_nearest(float* to, Floats value) { store(to, value); }

inline void store_nearest(Bf16* to, Floats value) {
#if defined(__AVX512BF16__) && LANES == 16
    const Halves halves = rounded16(value);
    memcpy(to, &halves, sizeof halves);
#else
    store(to, value);
#endif
}

inline void store_first(float* to, Floats value, int64_t count) { memcpy(to, &value, count * sizeof(float)); }

inline void store_first(Bf16* to, Floats value, int64_t count) {
    Halves halves = rounded(value);
    memcpy(to, &halves, count * sizeof(Bf16));
}

template <typename To, typename From>
inline void convert(To* to, const From* from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; i++) from_float(to[i], to_float(from[i]));
}

inline Floats broadcast(float x) { return x - Floats{}; }  // adding would turn -0 into 0

// sum + left * right, rounded once wherever the processor can: compilers left to themselves do so in some loops only.
inline Floats add_product(Floats sum, float left, Floats right) {
#if defined(__AVX512F__) && LANES == 16
    return fused_add_product(sum, broadcast(left), right);
#elif defined(__FMA__)
    Floats8 sums[LANES / 8], rights[LANES / 8];
    memcpy(sums, &sum, sizeof sum);
    memcpy(rights, &right, sizeof right);
#pragma GCC unroll 2
    for (int i = 0; i < LANES / 8; i++) sums[i] = fused_add_product(sums[i], left - Floats8{}, rights[i]);
    return load_as<Floats>(sums);
#else
    return sum + left * right;
#endif
}

// ---- The product

// STEP numbers along the summed dimension at once. Left is one row's numbers, Right those of LANES columns; columns
// lie side by side, the STEP numbers of a column next to each other.
template <typename T>
struct Product;

template <>
struct Product<float> {
    static constexpr int STEP = 1;
    typedef float Activation;  // in which rows are kept in memory
    typedef Floats Right;
    static Right right(const float* from) { return load(from); }
    static Floats add(Floats sum, const float* left, Right right) { return add_product(sum, left[0], right); }
};

#if defined(BF16_DOT)

template <>
struct Product<Bf16> {
    static constexpr int STEP = 2;
    typedef Bf16 Activation;
    typedef Words Right;
    static Right right(const Bf16* from) { return load_as<Words>(from); }
    static Floats add(Floats sum, const Bf16* left, Right right) {
#if defined(__AVX512BF16__)
        int32_t pair;
        memcpy(&pair, left, sizeof pair);
        return add_dot_product(sum, Ints{} + pair, (Ints)right);
#else
        return sum + to_float(left[0]) * (Floats)(right << 16) + to_float(left[1]) * (Floats)(right & 0xffff0000u);
#endif
    }
};

#else

template <>
struct Product<Bf16> {
    static constexpr int STEP = 2;
    typedef float Activation;
    struct Right { Floats even, odd; };
    static Right right(const Bf16* from) {
        Words pairs = load_as<Words>(from);
        return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
    }
    static Floats add(Floats sum, const float* left, Right right) {
        return add_product(add_product(sum, left[0], right.even), left[1], right.odd);
    }
};

#endif

// ---- Functions

// e^x for x <= 0 to about 1 ulp: 2^n e^r with |r| <= ln(2)/2, Cephes' polynomial. Below -87: as -87. NaN stays NaN.
inline Floats exp_negative(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Floats shifted = x * 1.44269504f + round;
    Floats n = shifted - round;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)(((Ints)shifted << 23) + 0x3f800000);
}

// To about 1e-7. NaN stays NaN. Near 0 by Cephes' polynomial, since 1 - e^-2x has lost its digits there.
inline Floats tanh_lanes(Floats x) {
    Floats size = x < 0.0f ? -x : x, e = exp_negative(size * -2.0f), square = x * x;
    Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    Floats large = (1.0f - e) / (1.0f + e);
    large = x < 0.0f ? -large : large;
    return size < 0.625f ? p * square * x + x : large;
}
