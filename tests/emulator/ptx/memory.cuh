// csrc/ptx/memory.cuh, emulated. CTAs run one after the other, in the order of their numbers.
#pragma once
#include <cuda_runtime.h>

namespace flash::ptx {

inline int ld_acquire_gpu(const int* address) { return *address; }
inline void st_release_gpu(int* address, int value) { *address = value; }
inline void red_add_v4(float* address, const float* sums) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulator::fail("red.v4 to an address that is not aligned");
  for (int i = 0; i < 4; ++i) address[i] += sums[i];
}
inline void wait_until_equal(const int* address, int value) {
  if (*address != value) emulator::fail("a CTA waits for one that runs later");
}

}  // namespace flash::ptx
