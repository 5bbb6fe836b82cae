// From tensors to the plain structs of flash.h. The structs point into the tensors kept beside them.
#pragma once
#include "../flash.h"
#include "check.h"

namespace flash::binding {

// The input tensors as the kernels read them; what a Problem points to lives as long as this does.
struct Inputs {
  Tensor q, k, v;  // with contiguous rows
  Tensor cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, block_mask, dropout_seed;
  uint32_t copies = 0;  // Copied bits (record.h)
};

// Fills everything but out, lse and what backward adds.
Inputs bind_inputs(FwdParams& params, const Tensor& q, const Tensor& k, const Tensor& v, const Options& o,
                   const Sizes& s);

DType dtype_code(at::ScalarType type);

// t itself when its last dimension is contiguous, else a copy, which is noted in `copies`.
Tensor unit_stride(const Tensor& t, uint32_t bit, uint32_t& copies);
// An uninitialised tensor like t, in t's order of dimensions if the last one is contiguous there, else contiguous.
Tensor empty_rows(const Tensor& t);

TensorView view_of(const Tensor& t);   // (batch, seqlen, heads, head_dim) or (total, heads, head_dim)
RowView row_view_of(const Tensor& t);  // (batch, heads, seqlen_q) or (heads, total_q)

}  // namespace flash::binding
