// csrc/ptx/math.cuh, emulated.
#pragma once
#include <cmath>

namespace flash::ptx {

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float min_nan(float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); }

}  // namespace flash::ptx
