// The backward pass: delta, the main kernel, the conversion of dQ; and what each will take.
#include "config.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../core/common.h"

namespace flash {

namespace fa2 {
template <class Element>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream, int smem_available);  // bwd_bf16.cu, bwd_fp16.cu
}

namespace {

template <class Config>
KernelPlan plan_of(const Problem& p) {
  return {Config::kHeadDim, Config::kBlockM,    Config::kBlockN,
          Config::kThreads, Config::kSmemBytes, p.batch * p.heads_kv * ceil_div(p.seqlen_k, Config::kBlockN)};
}

template <int kHeadDim>
KernelPlan plan_of(const Problem& p, int smem_available) {
  const KernelPlan plan = plan_of<fa2::BwdConfig<kHeadDim, false>>(p);
  return plan.smem_bytes <= smem_available ? plan : plan_of<fa2::BwdConfig<kHeadDim, true>>(p);
}

}  // namespace

KernelPlan plan_fa2_bwd(const Problem& p, int smem_available) {
  switch (fa2::compiled_head_dim(p.head_dim)) {
    case 64: return plan_of<64>(p, smem_available);
    case 96: {
      const KernelPlan plan = plan_of<fa2::BwdConfig<96, false>>(p);
      return plan.smem_bytes <= smem_available ? plan : plan_of<128>(p, smem_available);
    }
    case 128: return plan_of<128>(p, smem_available);
    case 192: return plan_of<192>(p, smem_available);
    default: return plan_of<256>(p, smem_available);
  }
}

int launch_fa2_bwd(const BwdParams& p, int smem_available, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const int error = launch_bwd_preprocess(p, stream); error != cudaSuccess) return error;
  return p.dtype == DType::kFloat16 ? fa2::launch_bwd<__half>(p, cuda_stream, smem_available)
                                    : fa2::launch_bwd<__nv_bfloat16>(p, cuda_stream, smem_available);
}

}  // namespace flash
