// What happens to q.k before the softmax, in this order: scale, softcap, ALiBi, bias; the mask comes after (rule 7).
// A new transform is a field here, its value and its derivative side by side, and no kernel changes.
#pragma once
#include "block_info.h"
#include "softmax.h"

namespace flash {

FLASH_HD double tanh_of(double x) { return tanh(x); }
FLASH_HD float tanh_of(float x) {
#ifdef __CUDA_ARCH__
  return tanhf(x);
#else
  // Odd polynomial near 0 (Cephes), where 1 - 2 / (e^2x + 1) would cancel; without branches, for vector code.
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * x + x;
  float a = x < 0.0f ? -x : x;
  a = a > 10.0f ? 10.0f : a;
  const float big = 1.0f - 2.0f / (exp2_of(a * static_cast<float>(2 * kLog2e)) + 1.0f);
  const float signed_big = x < 0.0f ? -big : big;
  return z < 0.390625f ? small : signed_big;
#endif
}

template <class T>
struct ScoreMod {
  T scale;
  T softcap;      // 0: off
  T alibi_slope;  // 0: off
  int64_t diagonal;
  bool in_use;  // false: scores stay raw products and `scale` is applied inside the exponent

  // bias_or_slope: does this (batch, head) add anything? A scale of 0 must be applied before the mask's -inf.
  FLASH_HD static ScoreMod of(const Problem& p, const Band& band, int64_t batch, int64_t head) {
    ScoreMod m;
    m.scale = static_cast<T>(p.softmax_scale);
    m.softcap = static_cast<T>(p.softcap);
    m.alibi_slope = p.alibi_slopes == nullptr
                        ? T(0)
                        : static_cast<const T*>(p.alibi_slopes)[batch * p.alibi_batch_stride + head];
    m.diagonal = band.diagonal;
    m.in_use = p.softcap != 0 || p.alibi_slopes != nullptr || p.bias != nullptr || m.scale == T(0);
    return m;
  }

  // Natural units of a score as it is kept: 1 once the transforms have been applied.
  FLASH_HD T natural() const { return in_use ? T(1) : scale; }
  FLASH_HD T scale_log2() const { return natural() * static_cast<T>(kLog2e); }

  FLASH_HD T capped(T product) const {
    const T s = product * scale;
    return softcap == T(0) ? s : softcap * tanh_of(s / softcap);
  }
  // d(score) / d(product), from the capped score: (1 - tanh^2) * scale. ALiBi and bias are added and drop out.
  FLASH_HD T derivative(T capped_score) const {
    if (softcap == T(0)) return scale;
    const T t = capped_score / softcap;
    return (T(1) - t * t) * scale;
  }

  // ALiBi (Press et al. 2022): a penalty for the distance to the aligned diagonal.
  FLASH_HD T alibi(int64_t row, int64_t col) const {
    const int64_t distance = row + diagonal - col;
    return -alibi_slope * static_cast<T>(distance < 0 ? -distance : distance);
  }
};

}  // namespace flash
