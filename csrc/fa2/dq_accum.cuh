// Where dQ is summed: a float tile for each query tile of each head. Inside a tile the sums lie in the order in which
// the threads of the backward kernel hold them, so that a warp's additions are whole lines; the conversion, which reads
// them by the same threads, is the only one to know that order.
#pragma once
#include "../core/block_info.h"
#include "../ptx/memory.cuh"

namespace flash::fa2 {

// The first tile of a sequence among those of a head (BwdParams::dq_tiles_of_head). Packed sequences begin at whole
// tiles, for which one more tile for each of them is enough.
FLASH_HD int64_t dq_first_tile(const Problem& p, int64_t q_begin, int64_t batch, int64_t block_m) {
  return p.cu_seqlens_q == nullptr ? batch * ceil_div(p.seqlen_q, block_m) : q_begin / block_m + batch;
}

// Place of a thread's sum number i: on sm_90 four lie side by side, which one instruction adds.
template <int kThreads>
__device__ __forceinline__ int dq_place(int i) {
#if __CUDA_ARCH__ >= 900
  return (i / 4 * kThreads + threadIdx.x) * 4 + i % 4;
#else
  return i * kThreads + threadIdx.x;
#endif
}

template <int kThreads, int kCount>
__device__ __forceinline__ void dq_add(float* tile, const float* sums) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#if __CUDA_ARCH__ >= 900
    ptx::red_add_v4(tile + dq_place<kThreads>(i), sums + i);
#else
#pragma unroll
    for (int e = i; e < i + 4; ++e) atomicAdd(tile + dq_place<kThreads>(e), sums[e]);
#endif
  }
}

template <int kThreads, int kCount>
__device__ __forceinline__ void dq_read(const float* tile, float* sums) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = tile[dq_place<kThreads>(i)];
}

}  // namespace flash::fa2
