// The two steps of attention that are ops of their own, as far as CPU and CUDA share them: checks and memory.
#pragma once
#include "params.h"

namespace flash::binding {

// keep[b, h, i, j]: whether dropout keeps an element (rule 8).
struct DropoutMask {
  int64_t batch, heads, seqlen_q, seqlen_k;
  Tensor seed;  // (2,) int64, contiguous
  Tensor keep;  // (batch, heads, seqlen_q, seqlen_k) bool

  DropoutMask(const Tensor& seed, double dropout_p, const c10::SymInt& batch, const c10::SymInt& heads,
              const c10::SymInt& seqlen_q, const c10::SymInt& seqlen_k);
  uint8_t* keep_ptr() const { return static_cast<uint8_t*>(keep.mutable_data_ptr()); }
  const int64_t* seed_ptr() const { return seed.const_data_ptr<int64_t>(); }
};

// delta = rowsum(dout * out) - dlse. Packed tensors are one batch of total_q rows: the step knows no sequences.
struct Preprocess {
  BwdParams params{};
  Tensor dout, out, dlse;  // with contiguous rows
  Tensor delta;            // (batch, heads, seqlen_q) or (heads, total_q), accumulation type

  Preprocess(const Tensor& dout, const Tensor& out, const OptTensor& dlse);
};

}  // namespace flash::binding
