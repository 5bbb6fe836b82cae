// Instructions on global memory that several CTAs use at once.
#pragma once

namespace flash::ptx {

// What was written before the store that this load sees is visible after it.
__device__ __forceinline__ int ld_acquire_gpu(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_gpu(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(address), "r"(value) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Adds four floats that lie side by side; the address is aligned to 16 bytes.
__device__ __forceinline__ void red_add_v4(float* address, const float* sums) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "f"(sums[0]), "f"(sums[1]),
               "f"(sums[2]), "f"(sums[3])
               : "memory");
}
#endif

// Waits for another CTA. A build with FLASH_BOUNDED_WAITS ends the kernel with an error instead of waiting for ever.
__device__ __forceinline__ void wait_until_equal(const int* address, int value) {
#ifdef FLASH_BOUNDED_WAITS
  for (int polls = 0; ld_acquire_gpu(address) != value; ++polls) {
    if (polls > 10'000'000) __trap();
    __nanosleep(64);
  }
#else
  while (ld_acquire_gpu(address) != value) __nanosleep(64);
#endif
}

}  // namespace flash::ptx
