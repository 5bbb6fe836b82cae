// cp.async (sm_80): copies from global to shared memory that bypass the registers and run while the thread goes on.
#pragma once
#include <cstdint>

namespace flash::ptx {

// The 32-bit address by which instructions name a byte of shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes past L1 to shared memory. `bytes` of them (0 or 16) are read; what is not read becomes zero.
__device__ __forceinline__ void cp_async_cg_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// 4 bytes through L1, for what is not aligned to more.
__device__ __forceinline__ void cp_async_ca_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's groups, the latest ones, are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flash::ptx
