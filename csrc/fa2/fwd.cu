// Launches of the forward kernel, and what each will take.
#include "fwd_kernel.cuh"
#include "launch.cuh"

namespace flash {
namespace {

template <class Element>
cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  return fa2::with_fwd_config(p.head_dim, [&](auto config) {
    using Config = decltype(config);
    return fa2::launch_tiles<fa2::fa2_fwd_kernel<Element, Config::kHeadDim>>(
        Config::kThreads, Config::kSmemBytes, p.batch * p.heads, ceil_div(p.seqlen_q, Config::kBlockM), stream, p);
  });
}

}  // namespace

int fa2_smem_available(int* bytes) {
  int device = 0;
  cudaFuncAttributes code{};  // of what was loaded: for this GPU, for an older one, or PTX for an older one
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, fa2::fa2_fwd_kernel<__half, 64>);
  if (error != cudaSuccess) return error;
  for (const int kb : fa2::kSmemKbs) {
    if (!fa2::is_compiled(code.ptxVersion * 10, kb) || kb * 1024 > *bytes) continue;
    *bytes = kb * 1024;
    break;
  }
  return cudaSuccess;
}

KernelPlan plan_fa2_fwd(const Problem& p) {
  return fa2::with_fwd_config(p.head_dim, [&](auto config) {
    return fa2::plan_of(config, p.batch * p.heads * ceil_div(p.seqlen_q, config.kBlockM));
  });
}

int launch_fa2_fwd(const FwdParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kFloat16 ? launch<__half>(p, cuda_stream) : launch<__nv_bfloat16>(p, cuda_stream);
}

}  // namespace flash
