// The launches of a backward pass for one element type. Each type has a file of its own, so that they compile side by
// side.
#pragma once
#include "bwd_kernel.cuh"
#include "launch.cuh"

namespace flash::fa2 {

template <class Element, int kHeadDim, bool kSmall>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream) {
  using Config = BwdConfig<kHeadDim, kSmall>;
  const cudaError_t error = launch_tiles<fa2_bwd_kernel<Element, kHeadDim, kSmall>>(
      Config::kThreads, Config::kSmemBytes, p.batch * p.heads_kv, ceil_div(p.seqlen_k, Config::kBlockN), stream, p);
  if (error != cudaSuccess || p.dq.ptr == nullptr) return error;
  return launch_tiles<fa2_bwd_convert_dq_kernel<Element, kHeadDim, kSmall>>(
      Config::kThreads, Config::kBytesQ, p.batch * p.heads, ceil_div(p.seqlen_q, Config::kBlockM), stream, p);
}

template <class Element, int kHeadDim>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream, int smem_available) {
  if (smem_available >= BwdConfig<kHeadDim, false>::kSmemBytes) return launch_bwd<Element, kHeadDim, false>(p, stream);
  return launch_bwd<Element, kHeadDim, true>(p, stream);
}

template <class Element>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream, int smem_available) {
  switch (compiled_head_dim(p.head_dim)) {
    case 64: return launch_bwd<Element, 64>(p, stream, smem_available);
    case 96:
      if (smem_available >= BwdConfig<96, false>::kSmemBytes) return launch_bwd<Element, 96, false>(p, stream);
      [[fallthrough]];  // three columns of fragments do not divide among the warps of a smaller tile
    case 128: return launch_bwd<Element, 128>(p, stream, smem_available);
    case 192: return launch_bwd<Element, 192>(p, stream, smem_available);
    case 256: return launch_bwd<Element, 256>(p, stream, smem_available);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash::fa2
