// The backward pass: delta, the main kernel, the conversion of dQ; and what each will take.
#include "config.h"
#include "launch.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash {

namespace fa2 {
template <class Element>
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream, int smem_available);  // bwd_bf16.cu, bwd_fp16.cu
}

KernelPlan plan_fa2_bwd(const Problem& p, int smem_available) {
  return fa2::with_bwd_config(p.head_dim, smem_available, [&](auto config) {
    return fa2::plan_of(config, p.batch * p.heads_kv * ceil_div(p.seqlen_k, config.kBlockN));
  });
}

int launch_fa2_bwd(const BwdParams& params, int smem_available, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const KernelPlan plan = plan_fa2_bwd(params, smem_available);
  BwdParams p = params;
  p.dq_tile_size = int64_t{plan.block_m} * plan.head_dim;
  if (const int error = launch_bwd_preprocess(p, stream); error != cudaSuccess) return error;
  return p.dtype == DType::kFloat16 ? fa2::launch_bwd<__half>(p, cuda_stream, smem_available)
                                    : fa2::launch_bwd<__nv_bfloat16>(p, cuda_stream, smem_available);
}

}  // namespace flash
