// Under torch.autocast q, k and v are cast to its dtype, whichever the user chose. What joins the scores (bias, slopes,
// sinks) keeps its precision.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace flash::binding {

namespace {

template <c10::DeviceType kDevice>
Out2 fwd_autocast(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  return call_fwd(at::autocast::cached_cast(dtype, q, kDevice), at::autocast::cached_cast(dtype, k, kDevice),
                  at::autocast::cached_cast(dtype, v, kDevice), Options{FLASH_OPTION_ARGS});
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_cuda, AutocastCPU, m) { m.impl("fwd", &fwd_autocast<c10::DeviceType::CPU>); }
TORCH_LIBRARY_IMPL(flash_cuda, AutocastCUDA, m) { m.impl("fwd", &fwd_autocast<c10::DeviceType::CUDA>); }

}  // namespace flash::binding
