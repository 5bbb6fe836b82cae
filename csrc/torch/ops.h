// The ops of the library as their C++ callers see them: the arguments that fwd and bwd share, and typed calls.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace flash::binding {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using Out2 = std::tuple<Tensor, Tensor>;
using Out5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The arguments after the tensors of a pass, in the order of the schema: once as parameters, once as names. An op's
// C++ signature must list its arguments one by one, and seven functions share this list.
#define FLASH_OPTION_PARAMS                                                                                            \
  std::optional<double> softmax_scale, int64_t causal, c10::SymInt window_left, c10::SymInt window_right,              \
      double softcap, int64_t version, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, double dropout_p,           \
      const OptTensor &dropout_seed, const OptTensor &cu_seqlens_q, const OptTensor &cu_seqlens_k,                     \
      const OptTensor &bias, const OptTensor &alibi_slopes, const OptTensor &sinks, const OptTensor &block_mask,       \
      int64_t block_mask_q, int64_t block_mask_k, bool deterministic
#define FLASH_OPTION_ARGS                                                                                              \
  softmax_scale, causal, window_left, window_right, softcap, version, max_seqlen_q, max_seqlen_k, dropout_p,           \
      dropout_seed, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sinks, block_mask, block_mask_q, block_mask_k,     \
      deterministic

// The same list as a value. The types are those of the schema, so that symbolic lengths pass through unharmed.
struct Options {
  std::optional<double> softmax_scale;  // none: 1 / sqrt(head_dim)
  int64_t causal;                       // flash::Causal
  c10::SymInt window_left, window_right;  // -1: unbounded
  double softcap;                         // 0: off
  int64_t version;                        // 1, 2, 3
  c10::SymInt max_seqlen_q, max_seqlen_k;  // read for packed input only
  double dropout_p;
  OptTensor dropout_seed, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, sinks, block_mask;
  int64_t block_mask_q, block_mask_k;  // 0 without a block mask
  bool deterministic;                  // the CPU schedules always are

  bool packed() const { return cu_seqlens_q.has_value() || cu_seqlens_k.has_value(); }
  const char* caller() const { return packed() ? "flash_cuda.attention_varlen" : "flash_cuda.attention"; }
};

// What fa2_smem_available says of a CUDA device, -1 for the current one; 0: this build has no code that runs there.
int64_t cuda_smem_available(int64_t device);

// Calls through the dispatcher, without boxing.
Out2 call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o);
Out5 call_bwd(const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, const Options& o, std::array<bool, 5> output_mask);

// The forward kernel for CPU tensors itself, below the dispatcher.
Out2 fwd_cpu(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_OPTION_PARAMS);

}  // namespace flash::binding
