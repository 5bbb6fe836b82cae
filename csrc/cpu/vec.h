// Vectors of the instruction set that this file is compiled for, through the compiler's vector extension: the same
// source gives AVX-512, AVX2, and 16-byte code for everything else.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../core/common.h"

#ifndef FLASH_ISA
#error "compile with -DFLASH_ISA=avx512, avx2 or generic"
#endif

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace flash::cpu::FLASH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kPanelVectors = 4;  // columns of a register tile; 6 x 4 accumulators fill 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kPanelVectors = 2;  // 6 x 2 fill 12 of 16
#else
constexpr int kVectorBytes = 16;
constexpr int kPanelVectors = 2;
#endif
constexpr int kPanelRows = 6;

template <class A>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <class A>
using Vec = typename VecOf<A>::type;
template <class A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

template <class A>
FLASH_HD Vec<A> load(const A* p) { return *reinterpret_cast<const Vec<A>*>(p); }
template <class A>
FLASH_HD void store(A* p, Vec<A> v) { *reinterpret_cast<Vec<A>*>(p) = v; }
template <class A>
FLASH_HD Vec<A> splat(A x) { return x - Vec<A>{}; }
template <class V>
FLASH_HD auto sum_of(V v) {  // of all lanes
  using A = std::remove_reference_t<decltype(v[0])>;
  constexpr int kCount = sizeof(V) / sizeof(A);
  A lanes[kCount];
  __builtin_memcpy(lanes, &v, sizeof(V));
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Storage types. Arithmetic is done in the accumulation type: float, or double for double.
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <class T>
struct AccumOf { using type = float; };
template <>
struct AccumOf<double> { using type = double; };
template <class T>
using Accum = typename AccumOf<T>::type;

FLASH_HD float to_accum(float x) { return x; }
FLASH_HD double to_accum(double x) { return x; }
FLASH_HD float to_accum(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
FLASH_HD float to_accum(fp16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  // Shift exponent and mantissa into place and multiply by 2^112: that rebiases, and normalises subnormals as well.
  const uint32_t magnitude = uint32_t{x.bits} & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  __builtin_memcpy(&bits, &f, 4);
  bits = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : bits;  // inf and NaN
  bits |= (uint32_t{x.bits} & 0x8000u) << 16;
  __builtin_memcpy(&f, &bits, 4);
  return f;
#endif
}

// Round to nearest even.
FLASH_HD void from_accum(float x, float& out) { out = x; }
FLASH_HD void from_accum(double x, double& out) { out = x; }
FLASH_HD void from_accum(float x, bf16& out) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1);
  out.bits = static_cast<uint16_t>((x != x ? bits | 0x400000u : rounded) >> 16);
}
FLASH_HD void from_accum(float x, fp16& out) {
#ifdef __F16C__
  out.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (bits >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to inf
  } else if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 lets the float adder round to units of 2^-24.
    float f;
    __builtin_memcpy(&f, &bits, 4);
    f += 0.5f;
    __builtin_memcpy(&half, &f, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits + 0xfffu + (bits >> 13 & 1) - 0x38000000u) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
#endif
}

// One vector of elements in the accumulation type.
template <class T>
FLASH_HD Vec<Accum<T>> load_as_accum(const T* src) {
  using A = Accum<T>;
  if constexpr (std::is_same_v<T, A>) return load(src);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, fp16>)
    return (Vec<A>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
#elif defined(__F16C__)
  if constexpr (std::is_same_v<T, fp16>)
    return (Vec<A>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
#endif
  A lanes[kLanes<A>];
  for (int lane = 0; lane < kLanes<A>; ++lane) lanes[lane] = to_accum(src[lane]);
  return load(lanes);
}

// dst[0..n) = src[0..n) in the accumulation type. `zeros` stays 0 unless an element is inf or NaN: those times 0 are NaN.
template <class T>
FLASH_HD void load_row(const T* src, Accum<T>* dst, int64_t n, Vec<Accum<T>>& zeros) {
  using A = Accum<T>;
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    const Vec<A> v = load_as_accum(src + i);
    store(dst + i, v);
    zeros += v * A(0);
  }
  for (; i < n; ++i) {
    dst[i] = to_accum(src[i]);
    zeros[0] += dst[i] * A(0);
  }
}

template <class T>
FLASH_HD void store_row(const Accum<T>* src, T* dst, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, fp16>) {
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) from_accum(src[i], dst[i]);
}

}  // namespace flash::cpu::FLASH_ISA
