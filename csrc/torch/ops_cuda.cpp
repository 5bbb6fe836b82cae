// The ops for CUDA tensors. Attention itself has no CUDA kernel yet and says so; the two steps below do.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "check.h"

#ifdef FLASH_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "stages.h"
#endif

namespace flash::binding {

namespace {

// Python's dispatch lists every reason before it comes here; this is for who calls the op itself.
[[noreturn]] void no_attention_kernel(const Options& o, const Tensor& q) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, o.caller(), ": no kernel for q on ", q.device(),
                              ": this release has no attention kernel for CUDA tensors; move q, k and v to the CPU");
  __builtin_unreachable();
}

Out2 fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const Options o{FLASH_OPTION_ARGS};
  check_fwd(q, k, v, o);
  no_attention_kernel(o, q);
}

Out5 bwd_cuda(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, FLASH_OPTION_PARAMS, std::array<bool, 5> output_mask) {
  const Options o{FLASH_OPTION_ARGS};
  check_bwd(check_fwd(q, k, v, o), dout, dlse, q, out, lse, o, output_mask);
  no_attention_kernel(o, q);
}

#ifdef FLASH_WITH_CUDA
void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

Tensor dropout_mask_cuda(const Tensor& seed, double dropout_p, c10::SymInt batch, c10::SymInt heads,
                         c10::SymInt seqlen_q, c10::SymInt seqlen_k) {
  const c10::cuda::CUDAGuard guard(seed.device());
  const DropoutMask call(seed, dropout_p, batch, heads, seqlen_q, seqlen_k);
  if (call.keep.numel() > 0)
    check_launch(launch_dropout_mask(call.keep_ptr(), call.seed_ptr(), dropout_p, call.batch, call.heads,
                                     call.seqlen_q, call.seqlen_k, c10::cuda::getCurrentCUDAStream().stream()));
  return call.keep;
}

Tensor bwd_preprocess_cuda(const Tensor& dout, const Tensor& out, const OptTensor& dlse) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Preprocess call(dout, out, dlse);
  if (call.delta.numel() > 0)
    check_launch(launch_bwd_preprocess(call.params, c10::cuda::getCurrentCUDAStream().stream()));
  return call.delta;
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(flash_cuda, CUDA, m) {
  m.impl("fwd", &fwd_cuda);
  m.impl("bwd", &bwd_cuda);
#ifdef FLASH_WITH_CUDA
  m.impl("dropout_mask", &dropout_mask_cuda);
  m.impl("bwd_preprocess", &bwd_preprocess_cuda);
#endif
}

}  // namespace flash::binding
