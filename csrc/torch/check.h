// Every check of shapes, dtypes, devices and values. They live here, not in Python, because they would cost host time
// there, and because every way into the ops must meet them.
#pragma once
#include <string>

#include "ops.h"

namespace flash::binding {

// The sizes of a checked call, and its symbolic arguments as numbers.
struct Sizes {
  bool packed;
  int64_t batch, heads, heads_kv, head_dim;
  int64_t seqlen_q, seqlen_k;  // packed: the longest of each
  int64_t total_q, total_k;    // rows over the whole batch
  int64_t window_left, window_right;
  double softmax_scale;

  bool no_scores() const { return batch == 0 || heads == 0 || seqlen_q == 0 || seqlen_k == 0 || head_dim == 0; }
};

// Throws with one line that names the argument, what was expected, what came, and the way out.
Sizes check_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o);
// What backward receives beside the arguments of forward.
void check_bwd(const Sizes& sizes, const Tensor& dout, const OptTensor& dlse, const Tensor& q, const Tensor& out,
               const Tensor& lse, const Options& o, const std::array<bool, 5>& output_mask);
void check_dropout(const char* caller, double dropout_p, const OptTensor& seed, c10::Device device,
                   const char* name = "dropout_seed");

bool is_supported_float(const Tensor& t);
// The dtype of row statistics and sums for inputs of `dtype`.
at::ScalarType accumulation_type(at::ScalarType dtype);

// (2, 8, 64) and torch.float32, as Python prints them.
std::string shape_of(const Tensor& t);
std::string dtype_of(const Tensor& t);

}  // namespace flash::binding
