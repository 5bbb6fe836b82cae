// mma.m16n8k16 (sm_80): D += A B on a warp's tensor core, 16-bit factors, fp32 sums.
// Lane l, with g = l / 4 and t = 2 (l % 4), holds
//   A (16 x 16): a0 = (g, t), a1 = (g + 8, t), a2 = (g, t + 8), a3 = (g + 8, t + 8), each with the column after it;
//   B (16 x 8):  b0 = (t, g), b1 = (t + 8, g), each with the row after it;
//   D (16 x 8):  d0, d1 = (g, t), (g, t + 1); d2, d3 = (g + 8, t), (g + 8, t + 1).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash::ptx {

template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two floats, rounded to nearest, in one register: `low` goes to the lower half.
template <class Element>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high) {
  uint32_t d;
  if constexpr (std::is_same_v<Element, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace flash::ptx
