// Gradients: the autograd kernels of fwd and bwd. In C++ because torch.library.register_autograd costs 20 to 100 us a
// call at this number of arguments.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "ops.h"

namespace flash::binding {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool wants_grad(const Tensor& t) { return t.requires_grad(); }
bool wants_grad(const OptTensor& t) { return t && t->requires_grad(); }
bool has_tangent(const Tensor& t) { return t._fw_grad(0).defined(); }
bool has_tangent(const OptTensor& t) { return t && has_tangent(*t); }

template <class... Tensors>
bool any_needs_grad(const Options& o, const Tensors&... tensors) {
  // Without this check the early exit would drop the tangent in silence.
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...), o.caller(),
                              ": forward-mode gradients (jvp) are not implemented; use flash_cuda.reference.attention");
  return at::GradMode::is_enabled() && (wants_grad(tensors) || ...);
}

// torch.func.grad and its kin cannot pass a C++ autograd function; torch's own words for it name a method that no user
// of this library has written.
void refuse_functorch(const Options& o) {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (!functorch) return;
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, o.caller(), ": torch.func.grad, vjp and jacrev are not implemented; use ",
                                "torch.autograd.grad, or flash_cuda.reference.attention under torch.func");
  }
}

Tensor or_undefined(const OptTensor& t) { return t ? *t : Tensor(); }
OptTensor or_none(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }

// ---- Options kept between forward and backward. Tensors go through save_for_backward, which sees in-place changes.

constexpr size_t kSavedTensors = 12;  // q, k, v, out, lse, and the seven of Options

variable_list saved_tensors(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                            const Options& o) {
  return {q, k, v, out, lse, or_undefined(o.dropout_seed), or_undefined(o.cu_seqlens_q), or_undefined(o.cu_seqlens_k),
          or_undefined(o.bias), or_undefined(o.alibi_slopes), or_undefined(o.sinks), or_undefined(o.block_mask)};
}

// Two entries and not twelve: each costs host time. SymInt, because lengths and windows may be symbolic.
void save_scalars(AutogradContext* ctx, const Options& o) {
  ctx->saved_data["floats"] =
      std::vector<double>{o.softcap, o.dropout_p, o.softmax_scale.value_or(std::numeric_limits<double>::quiet_NaN())};
  ctx->saved_data["ints"] = std::vector<c10::SymInt>{
      o.causal,      o.version,      o.block_mask_q, o.block_mask_k, static_cast<int64_t>(o.deterministic),
      o.window_left, o.window_right, o.max_seqlen_q, o.max_seqlen_k};
}

Options load_options(AutogradContext* ctx, const variable_list& saved) {
  const auto floats = ctx->saved_data["floats"].toDoubleVector();
  const auto ints = ctx->saved_data["ints"].toSymIntVector();
  auto number = [&](size_t i) { return ints[i].expect_int(); };
  Options o{};
  o.softcap = floats[0];
  o.dropout_p = floats[1];
  if (!std::isnan(floats[2])) o.softmax_scale = floats[2];  // NaN is no legal scale: forward has refused it
  o.causal = number(0);
  o.version = number(1);
  o.block_mask_q = number(2);
  o.block_mask_k = number(3);
  o.deterministic = number(4) != 0;
  o.window_left = ints[5];
  o.window_right = ints[6];
  o.max_seqlen_q = ints[7];
  o.max_seqlen_k = ints[8];
  o.dropout_seed = or_none(saved[5]);
  o.cu_seqlens_q = or_none(saved[6]);
  o.cu_seqlens_k = or_none(saved[7]);
  o.bias = or_none(saved[8]);
  o.alibi_slopes = or_none(saved[9]);
  o.sinks = or_none(saved[10]);
  o.block_mask = or_none(saved[11]);
  return o;
}

// ---- forward, and the gradient of it

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  // bias and sinks stand beside the options that hold them, so that autograd sees all five differentiable inputs.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptTensor& /*bias*/, const OptTensor& /*sinks*/, const Options& o) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_fwd(q, k, v, o);
    ctx->save_for_backward(saved_tensors(q, k, v, out, lse, o));
    save_scalars(ctx, o);
    // A loss of out alone leaves dlse undefined, which the kernels read as zero; lse is never marked as
    // non-differentiable, since merges and losses use it.
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    TORCH_CHECK(saved.size() == kSavedTensors, "flash_cuda: backward found ", saved.size(), " saved tensors");
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(6);
    const Options o = load_options(ctx, saved);
    const size_t sinks_edge = o.bias ? 4 : 3;  // edges are counted over the tensors that were given
    const std::array<bool, 5> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                        o.bias && ctx->needs_input_grad(3),
                                        o.sinks && ctx->needs_input_grad(sinks_edge)};
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
    auto [dq, dk, dv, dbias, dsinks] =
        call_bwd(dout, or_none(grads[1]), saved[0], saved[1], saved[2], saved[3], saved[4], o, wanted);
    variable_list result = {dq, dk, dv, dbias, dsinks, Tensor()};
    for (size_t i = 0; i < wanted.size(); ++i)
      if (!wanted[i]) result[i] = Tensor();
    return result;
  }
};

Out2 fwd_autograd(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS) {
  const Options o{FLASH_OPTION_ARGS};
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && wants_grad(alibi_slopes)), o.caller(),
                    ": alibi_slopes must not require a gradient, got requires_grad=True; pass alibi_slopes.detach()");
  if (!any_needs_grad(o, q, k, v, bias, sinks, alibi_slopes)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_fwd(q, k, v, o);
  }
  refuse_functorch(o);
  const variable_list result = AttentionFunction::apply(q, k, v, bias, sinks, o);
  return {result[0], result[1]};
}

// ---- the gradient of the gradient: an error, also where it is mixed with another loss

struct NoDoubleBackward : torch::autograd::Function<NoDoubleBackward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& dout, const OptTensor& dlse, const Tensor& q,
                               const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                               const OptTensor& /*bias*/, const OptTensor& /*sinks*/, const Options& o,
                               std::array<bool, 5> output_mask) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    auto [dq, dk, dv, dbias, dsinks] = call_bwd(dout, dlse, q, k, v, out, lse, o, output_mask);
    return {dq, dk, dv, dbias, dsinks};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "flash_cuda: double backward (the gradient of a gradient) is not implemented; ",
                                "use flash_cuda.reference.attention for it");
  }
};

Out5 bwd_autograd(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor& out, const Tensor& lse, FLASH_OPTION_PARAMS, std::array<bool, 5> output_mask) {
  const Options o{FLASH_OPTION_ARGS};
  if (!any_needs_grad(o, dout, dlse, q, k, v, out, lse, bias, sinks, alibi_slopes)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_bwd(dout, dlse, q, k, v, out, lse, o, output_mask);
  }
  refuse_functorch(o);
  const variable_list r =
      NoDoubleBackward::apply(dout, dlse, q, k, v, out, lse, bias, sinks, o, output_mask);
  return {r[0], r[1], r[2], r[3], r[4]};
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_cuda, Autograd, m) {
  m.impl("fwd", &fwd_autograd);
  m.impl("bwd", &bwd_autograd);
  m.impl("bwd_preprocess", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace flash::binding
