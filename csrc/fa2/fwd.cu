// Launches of the forward kernel, and what each will take.
#include "fwd_kernel.cuh"
#include "launch.cuh"

namespace flash {
namespace {

template <class Config>
KernelPlan plan_of(const Problem& p) {
  return {Config::kHeadDim, Config::kBlockM,    Config::kBlockN,
          Config::kThreads, Config::kSmemBytes, p.batch * p.heads * ceil_div(p.seqlen_q, Config::kBlockM)};
}

template <class Element, int kHeadDim>
cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  using Config = fa2::FwdConfig<kHeadDim>;
  return fa2::launch_tiles<fa2::fa2_fwd_kernel<Element, kHeadDim>>(
      Config::kThreads, Config::kSmemBytes, p.batch * p.heads, ceil_div(p.seqlen_q, Config::kBlockM), stream, p);
}

template <class Element>
cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  switch (fa2::compiled_head_dim(p.head_dim)) {
    case 64: return launch<Element, 64>(p, stream);
    case 96: return launch<Element, 96>(p, stream);
    case 128: return launch<Element, 128>(p, stream);
    case 192: return launch<Element, 192>(p, stream);
    case 256: return launch<Element, 256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

KernelPlan plan_fa2_fwd(const Problem& p) {
  switch (fa2::compiled_head_dim(p.head_dim)) {
    case 64: return plan_of<fa2::FwdConfig<64>>(p);
    case 96: return plan_of<fa2::FwdConfig<96>>(p);
    case 128: return plan_of<fa2::FwdConfig<128>>(p);
    case 192: return plan_of<fa2::FwdConfig<192>>(p);
    default: return plan_of<fa2::FwdConfig<256>>(p);
  }
}

int launch_fa2_fwd(const FwdParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kFloat16 ? launch<__half>(p, cuda_stream) : launch<__nv_bfloat16>(p, cuda_stream);
}

}  // namespace flash
