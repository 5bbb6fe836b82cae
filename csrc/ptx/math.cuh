// Single instructions of the softmax.
#pragma once

namespace flash::ptx {

// 2^x to 2 units in the last place; 2^-inf is 0, NaN stays NaN, results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The smaller one, and NaN when one of them is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace flash::ptx
