#include "params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "record.h"

namespace flash::binding {

namespace {

bool has_unit_stride(const Tensor& t) { return t.dim() == 0 || t.size(-1) <= 1 || t.stride(-1) == 1; }

// The kernels take one type for both sides' pointers; inputs are only read.
void* pointer(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

// A window that covers every key is no window. Also keeps the kernels' i + diagonal + window far from overflow.
int64_t window_or_unbounded(int64_t window, const Sizes& s) {
  return window >= s.seqlen_q + s.seqlen_k ? kUnbounded : window;
}

void bind_bias(Problem& p, const Tensor& bias) {
  p.bias = bias.const_data_ptr();
  p.bias_dtype = dtype_code(bias.scalar_type());
  for (int64_t d = 1; d <= 4; ++d)
    p.bias_stride[4 - d] = d <= bias.dim() && bias.size(-d) > 1 ? bias.stride(-d) : 0;
}

void bind_block_mask(Problem& p, Inputs& in, const Options& o) {
  in.block_mask = unit_stride(*o.block_mask, kCopiedBlockMask, in.copies);
  p.block_mask = static_cast<const uint8_t*>(in.block_mask.const_data_ptr());
  for (int64_t d = 0; d < 4; ++d) p.block_mask_stride[d] = in.block_mask.size(d) > 1 ? in.block_mask.stride(d) : 0;
  p.block_mask_stride[3] = 1;
  p.block_mask_q = o.block_mask_q;
  p.block_mask_k = o.block_mask_k;
}

}  // namespace

DType dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kDouble: return DType::kFloat64;
    case at::kBool: return DType::kBool;
    default: TORCH_CHECK_TYPE(false, "flash_cuda: no kernel reads ", type);
  }
}

Tensor unit_stride(const Tensor& t, uint32_t bit, uint32_t& copies) {
  if (has_unit_stride(t)) return t;
  copies |= bit;
  return t.contiguous();
}

Tensor empty_rows(const Tensor& t) {
  if (has_unit_stride(t)) {
    Tensor out = at::empty_like(t);
    if (has_unit_stride(out)) return out;
  }
  return at::empty_like(t, at::MemoryFormat::Contiguous);
}

TensorView view_of(const Tensor& t) {
  // A dimension of size 1 may have any stride. 0 keeps the addresses aligned that a tile forms beyond it.
  const auto stride = [&](int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); };
  if (t.dim() == 3) return {pointer(t), 0, stride(0), stride(1)};
  return {pointer(t), stride(0), stride(1), stride(2)};
}

RowView row_view_of(const Tensor& t) {
  if (t.dim() == 2) return {pointer(t), 0, t.stride(0)};
  return {pointer(t), t.stride(0), t.stride(1)};
}

Inputs bind_inputs(FwdParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o, const Sizes& s) {
  Inputs in;
  in.q = unit_stride(q, kCopiedQ, in.copies);
  in.k = unit_stride(k, kCopiedK, in.copies);
  in.v = unit_stride(v, kCopiedV, in.copies);
  p.q = view_of(in.q);
  p.k = view_of(in.k);
  p.v = view_of(in.v);
  p.batch = s.batch;
  p.heads = s.heads;
  p.heads_kv = s.heads_kv;
  p.head_dim = s.head_dim;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_k = s.seqlen_k;
  p.dtype = dtype_code(q.scalar_type());
  p.softmax_scale = s.softmax_scale;
  p.softcap = o.softcap;
  p.causal = static_cast<Causal>(o.causal);
  p.window_left = window_or_unbounded(s.window_left, s);
  p.window_right = window_or_unbounded(s.window_right, s);
  const auto accumulation = accumulation_type(q.scalar_type());
  if (s.packed) {
    in.cu_seqlens_q = o.cu_seqlens_q->contiguous();
    in.cu_seqlens_k = o.cu_seqlens_k->contiguous();
    p.cu_seqlens_q = in.cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = in.cu_seqlens_k.const_data_ptr<int32_t>();
  }
  if (o.alibi_slopes) {
    in.alibi_slopes = o.alibi_slopes->to(accumulation).contiguous();
    p.alibi_slopes = in.alibi_slopes.const_data_ptr();
    p.alibi_batch_stride = in.alibi_slopes.dim() == 2 ? s.heads : 0;
  }
  if (o.bias) bind_bias(p, *o.bias);
  if (o.sinks) {
    in.sinks = o.sinks->to(accumulation).contiguous();
    p.sinks = in.sinks.const_data_ptr();
  }
  if (o.block_mask) bind_block_mask(p, in, o);
  if (o.dropout_p > 0) {
    p.dropout_p = o.dropout_p;
    in.dropout_seed = o.dropout_seed->contiguous();
    p.dropout_seed = in.dropout_seed.const_data_ptr<int64_t>();
  }
  return in;
}

}  // namespace flash::binding
