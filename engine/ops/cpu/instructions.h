// Instructions that operators on vectors do not say, one function each. simd.h and gemm.h use them.
//
// By GCC's builtins, since GCC takes longer to read <immintrin.h> than to compile a file of kernels, and a first start
// waits for both. What they take differs between versions: those that this was not tried with, and other compilers, get
// the header.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ != 12) && !defined(INTRINSICS)
#define INTRINSICS
#endif
#if defined(INTRINSICS)
#include <immintrin.h>
#endif

typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef int32_t Ints16 __attribute__((vector_size(64)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));

#if defined(__FMA__)
inline Floats8 fused_add_product(Floats8 sum, Floats8 left, Floats8 right) {
#if defined(INTRINSICS)
    return (Floats8)_mm256_fmadd_ps((__m256)left, (__m256)right, (__m256)sum);
#else
    return __builtin_ia32_vfmaddps256(left, right, sum);
#endif
}
#endif

#if defined(__AVX2__)
inline Ints8 widened8(const int8_t* from) {
#if defined(INTRINSICS)
    return (Ints8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef long long Two __attribute__((vector_size(16)));
    typedef char Bytes __attribute__((vector_size(16)));
    long long eight;
    __builtin_memcpy(&eight, from, sizeof eight);
    return __builtin_ia32_pmovsxbd256((Bytes)Two{eight, 0});
#endif
}
#endif

#if defined(__AVX512F__)
inline Floats16 fused_add_product(Floats16 sum, Floats16 left, Floats16 right) {
#if defined(INTRINSICS)
    return (Floats16)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)sum);
#else
    return __builtin_ia32_vfmaddps512_mask(left, right, sum, 0xffff, 4);  // all lanes; as the thread rounds
#endif
}

inline Ints16 widened16(const int8_t* from) {
#if defined(INTRINSICS)
    return (Ints16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    typedef char Bytes __attribute__((vector_size(16)));
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_ia32_pmovsxbd512_mask(bytes, Ints16{}, 0xffff);
#endif
}
#endif

#if defined(__AVX512BF16__)
// Lane by lane the dot product of pairs of bf16 numbers.
inline Floats16 add_dot_product(Floats16 sum, Ints16 left, Ints16 right) {
#if defined(INTRINSICS)
    return (Floats16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#else
    typedef int16_t Pairs __attribute__((vector_size(64)));
    return __builtin_ia32_dpbf16ps_v16sf(sum, (Pairs)left, (Pairs)right);
#endif
}

inline Halves16 rounded16(Floats16 numbers) {  // to bf16, nearest even
#if defined(INTRINSICS)
    return (Halves16)_mm512_cvtneps_pbh((__m512)numbers);
#else
    return (Halves16)__builtin_ia32_cvtneps2bf16_v16sf(numbers);
#endif
}
#endif
