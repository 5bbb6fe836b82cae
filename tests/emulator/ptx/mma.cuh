// csrc/ptx/mma.cuh, emulated: products and their sum in double, rounded once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace flash::ptx {

template <class Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Factors {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } mine{d, a, {b0, b1}};
  emulator::together(mine, [](Factors** all) {
    const auto element = [](uint32_t pair, int i) {
      Element x;
      x.bits = static_cast<uint16_t>(pair >> (16 * i));
      return static_cast<float>(x);
    };
    float at[16][16], bt[8][16];  // A by rows, B by columns
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) at[g + j % 2 * 8][t + j / 2 * 8 + i] = element(all[lane]->a[j], i);
        for (int j = 0; j < 2; ++j) bt[g][t + j * 8 + i] = element(all[lane]->b[j], i);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const float *row = at[lane / 4 + i / 2 * 8], *col = bt[lane % 4 * 2 + i % 2];
        double sum = all[lane]->d[i];
        for (int x = 0; x < 16; ++x) sum += double{row[x]} * col[x];
        all[lane]->d[i] = static_cast<float>(sum);
      }
    }
  });
}

template <class Element>
uint32_t cvt_rn_x2(float low, float high) {
  return Element(low).bits | uint32_t{Element(high).bits} << 16;
}

}  // namespace flash::ptx
