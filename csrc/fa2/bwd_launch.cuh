// The launches of a backward pass for one element type. Each type has a file of its own, so that they compile side by
// side.
#pragma once
#include "bwd_kernel.cuh"
#include "launch.cuh"

namespace flash::fa2 {

template <class Element>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream, int smem_available) {
  return with_bwd_config(p.head_dim, smem_available, [&](auto config) {
    using Config = decltype(config);
    const cudaError_t error = launch_tiles<fa2_bwd_kernel<Element, Config::kHeadDim, Config::kSmemKb>>(
        Config::kThreads, Config::kSmemBytes, p.batch * p.heads_kv, ceil_div(p.seqlen_k, Config::kBlockN), stream, p);
    if (error != cudaSuccess || p.dq.ptr == nullptr) return error;
    return launch_tiles<fa2_bwd_convert_dq_kernel<Element, Config::kHeadDim, Config::kSmemKb>>(
        Config::kThreads, Config::kBytesQ, p.batch * p.heads, ceil_div(p.seqlen_q, Config::kBlockM), stream, p);
  });
}

}  // namespace flash::fa2
