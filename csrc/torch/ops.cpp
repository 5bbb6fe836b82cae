// Schemas, and typed calls of the ops through the dispatcher.
#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// Everything after the tensors of a pass; the C++ side of it is FLASH_OPTION_PARAMS.
#define OPTIONS                                                                                                        \
  "float? softmax_scale, int causal, SymInt window_left, SymInt window_right, float softcap, int version, "           \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, Tensor? dropout_seed, Tensor? cu_seqlens_q, "           \
  "Tensor? cu_seqlens_k, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? block_mask, "                     \
  "int block_mask_q, int block_mask_k, bool deterministic"

namespace flash::binding {

namespace {

using Fwd = Out2(const Tensor&, const Tensor&, const Tensor&, FLASH_OPTION_PARAMS);
using Bwd = Out5(const Tensor&, const OptTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                 const Tensor&, FLASH_OPTION_PARAMS, std::array<bool, 5>);

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

TORCH_LIBRARY(flash_cuda, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, " OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def(
      "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " OPTIONS
      ", bool[5] output_mask) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)");
  m.def(
      "dropout_mask(Tensor seed, float dropout_p, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k)"
      " -> Tensor");
  m.def("bwd_preprocess(Tensor dout, Tensor out, Tensor? dlse) -> Tensor");
}

Out2 call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  static const auto op = find<Fwd>("flash_cuda::fwd");
  return op.call(q, k, v, o.softmax_scale, o.causal, o.window_left, o.window_right, o.softcap, o.version,
                 o.max_seqlen_q, o.max_seqlen_k, o.dropout_p, o.dropout_seed, o.cu_seqlens_q, o.cu_seqlens_k, o.bias,
                 o.alibi_slopes, o.sinks, o.block_mask, o.block_mask_q, o.block_mask_k, o.deterministic);
}

Out5 call_bwd(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, const Options& o, std::array<bool, 5> output_mask) {
  static const auto op = find<Bwd>("flash_cuda::bwd");
  return op.call(dout, dlse, q, k, v, out, lse, o.softmax_scale, o.causal, o.window_left, o.window_right, o.softcap,
                 o.version, o.max_seqlen_q, o.max_seqlen_k, o.dropout_p, o.dropout_seed, o.cu_seqlens_q,
                 o.cu_seqlens_k, o.bias, o.alibi_slopes, o.sinks, o.block_mask, o.block_mask_q, o.block_mask_k,
                 o.deterministic, output_mask);
}

}  // namespace flash::binding
