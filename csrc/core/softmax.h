// Online softmax (Milakov and Gimelshein 2018; FlashAttention, section 3.1): row_max and row_sum are carried from key
// block to key block, and what was summed under an older maximum is rescaled.
//
// Scores are kept in natural units or, when no score_mod is in use, as raw products q.k; `scale_log2` turns either into
// the exponent of 2. Differences are taken before they are scaled, so that huge scores of either sign stay exact.
#pragma once
#include <cmath>

#include "common.h"

namespace flash {

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

template <class T>
FLASH_HD constexpr T neg_infinity() { return -static_cast<T>(INFINITY); }

// 2^x. Below 2^-126 the float result is 0; NaN stays NaN.
FLASH_HD double exp2_of(double x) { return exp2(x); }
FLASH_HD float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  return exp2f(x);
#else
  // x = n + f with n whole and f in [-1/2, 1/2]: adding 1.5 * 2^23 rounds x to n in the low bits of the mantissa.
  // 2^f is a polynomial of degree 6 (relative error 2e-9), 2^n goes into the exponent. Written without branches or
  // tables, so that a loop over it becomes vector code.
  constexpr float kRound = 12582912.0f;
  float t = x < -126.0f ? -126.0f : x;
  t = t > 127.0f ? 127.0f : t;
  const float rounded = t + kRound;
  const float f = t - (rounded - kRound);
  float p = 1.5353362e-4f;
  p = p * f + 1.3398875e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  int32_t bits, exponent;
  __builtin_memcpy(&exponent, &rounded, 4);
  exponent = (exponent - 0x4B400000 + 127) << 23;
  float power;
  bits = exponent;
  __builtin_memcpy(&power, &bits, 4);
  const float result = p * power;
  return x < -126.0f ? 0.0f : result;
#endif
}

// The maximum to subtract: 0 for a row that has seen no key yet, so that -inf - (-inf) never arises.
template <class T>
FLASH_HD T finite_max(T row_max) { return row_max == neg_infinity<T>() ? T(0) : row_max; }

// What sums under `old_max` are multiplied by once the maximum is `new_max`. 0 when nothing had been summed.
template <class T>
FLASH_HD T rescale_of(T old_max, T new_max, T scale_log2) {
  return old_max == new_max ? T(1) : exp2_of((old_max - finite_max(new_max)) * scale_log2);
}

// 1 / row_sum, and 0 for a row that saw no key: its output is 0 (rule 5).
template <class T>
FLASH_HD T inverse_of(T row_sum) { return row_sum == T(0) ? T(0) : T(1) / row_sum; }

// ln of the sum of exponentials of the scores. `scale` turns row_max into natural units.
template <class T>
FLASH_HD T lse_of(T row_max, T row_sum, T scale) {
  return row_sum == T(0) ? neg_infinity<T>() : row_max * scale + static_cast<T>(log(row_sum));
}

// A sink is a key without a value: its exponential joins the sum of a row that sees a key.
// Returns the LSE with it; exp(lse - result) is what the output has to be multiplied by.
template <class T>
FLASH_HD T join_sink(T lse, T sink) {
  if (lse == neg_infinity<T>() || sink == neg_infinity<T>()) return lse;
  if (sink != sink) return sink;  // NaN, which the comparisons below would lose
  const T high = max_of(lse, sink), low = min_of(lse, sink);
  return high + static_cast<T>(log1p(exp(low - high)));
}

}  // namespace flash
