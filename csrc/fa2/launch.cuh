// One way to launch kernels whose CTAs take tasks by number.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../core/common.h"
#include "../flash.h"

namespace flash::fa2 {

template <class Config>
KernelPlan plan_of(Config, int64_t ctas) {
  return {Config::kHeadDim, Config::kBlockM, Config::kBlockN, Config::kThreads, Config::kSmemBytes, ctas};
}

// Lets a kernel have its shared memory, once for each device: the call costs a microsecond of host time.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  constexpr int kDevices = 64;
  static std::atomic<bool> done[kDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kDevices && done[device].load(std::memory_order_acquire)) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) done[device].store(true, std::memory_order_release);
  return error;
}

// A CTA for each of `blocks` tiles of `batch_heads` heads; more than a grid axis has room for take further launches.
template <auto kKernel, class Params>
cudaError_t launch_tiles(int threads, int smem_bytes, int64_t batch_heads, int64_t blocks, cudaStream_t stream,
                         const Params& p) {
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  if (batch_heads == 0 || blocks == 0) return cudaSuccess;
  if (const cudaError_t error = allow_shared_memory<kKernel>(smem_bytes); error != cudaSuccess) return error;
  const int64_t at_once = kMaxGrid / blocks;
  for (int64_t first = 0; first < batch_heads; first += at_once) {
    const auto grid = static_cast<unsigned>(min_of(batch_heads - first, at_once) * blocks);
    kKernel<<<grid, threads, smem_bytes, stream>>>(p, static_cast<uint32_t>(first));
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flash::fa2
