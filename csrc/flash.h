// The contract between the bindings (csrc/torch) and the kernels: plain structs, no torch, no CUDA headers.
// Pointers carry their shapes; strides are in elements and 64-bit, because batch, head or row may multiply them.
#pragma once
#include <cstdint>

namespace flash {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3, kBool = 4 };

// Where the diagonal of the causal mask and of the windows lies when seqlen_q != seqlen_k (rule 3).
enum class Causal : int32_t { kOff = 0, kBottomRight = 1, kTopLeft = 2 };

constexpr int64_t kUnbounded = -1;  // a window side without a limit

// A (batch, seqlen, heads, head_dim) tensor whose head_dim stride is 1.
// Packed (varlen) tensors are (total, heads, head_dim): batch_stride is 0 and cu_seqlens give a sequence's first row.
struct TensorView {
  void* ptr;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// A (batch, heads, seqlen_q) tensor of row statistics, or (heads, total_q) when packed (batch_stride is then 0).
// Its dtype is the accumulation type: float, or double when the inputs are double.
struct RowView {
  void* ptr;
  int64_t batch_stride;
  int64_t head_stride;
};

// What is to be computed, the same for forward and backward. A null pointer means that the feature is not in use.
struct Problem {
  int64_t batch, heads, heads_kv, head_dim;
  int64_t seqlen_q, seqlen_k;   // packed: the longest of each
  const int32_t* cu_seqlens_q;  // [batch + 1]
  const int32_t* cu_seqlens_k;  // [batch + 1]
  DType dtype;                  // of q, k, v, out and their gradients

  double softmax_scale;
  double softcap;  // 0: off
  Causal causal;
  int64_t window_left, window_right;  // kUnbounded or >= 0, around the aligned diagonal, inclusive

  const void* alibi_slopes;  // [batch or 1, heads], accumulation type
  int64_t alibi_batch_stride;

  const void* bias;  // [batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1]; kBool: true means visible
  DType bias_dtype;
  int64_t bias_stride[4];  // 0 along every dimension of size 1

  const void* sinks;  // [heads], accumulation type

  const uint8_t* block_mask;  // [batch or 1, heads or 1, ceil(seqlen_q / block_mask_q), ceil(seqlen_k / block_mask_k)]
  int64_t block_mask_stride[4];  // 0 along batch or heads when that size is 1; the last is 1
  int64_t block_mask_q, block_mask_k;

  double dropout_p;             // in [0, 1)
  const int64_t* dropout_seed;  // [2], on the device of q
};

struct FwdParams : Problem {
  TensorView q, k, v, out;
  RowView lse;
};

struct BwdParams : FwdParams {  // out and lse are inputs here
  TensorView dout, dq, dk, dv;  // dq.ptr null: no gradient for q is wanted; dk.ptr and dv.ptr are null together
  RowView dlse;                 // ptr null: the loss does not use LSE
  RowView delta;                // workspace: rowsum(dout * out) - dlse
  void* dq_accum;               // workspace, accumulation type: [splits, heads, rows of all sequences, head_dim];
                                // CUDA: [heads, dq_tiles_of_head, dq_tile_size], see fa2/dq_accum.cuh
  int64_t dq_tiles_of_head;     // CUDA
  int64_t dq_tile_size;         // CUDA: floats; the launcher knows it
  int32_t* dq_turns;            // CUDA, deterministic: workspace, [1 + heads * dq_tiles_of_head]; null: in any order
  void* dbias;                  // the sizes of bias, contiguous, bias_dtype
  int64_t dbias_size[4];
  void* dsinks;  // [heads], accumulation type
};

// ---- CUDA launchers (csrc/fa*/*.cu). Each returns a cudaError_t as int: 0 is success. The stream is a cudaStream_t.

// keep[b, h, i, j] = 1 where dropout keeps the element (rule 8); keep is [batch, heads, seqlen_q, seqlen_k], contiguous.
int launch_dropout_mask(uint8_t* keep, const int64_t* seed, double dropout_p, int64_t batch, int64_t heads,
                        int64_t seqlen_q, int64_t seqlen_k, void* stream);

// What a launch takes.
struct KernelPlan {
  int32_t head_dim;          // compiled: the head dim of the call, rounded up
  int32_t block_m, block_n;  // queries and keys of a tile
  int32_t threads, smem_bytes;
  int64_t grid;  // CTAs
};

// Shared memory that a CTA may use on the current device with the code that this build has for it. An error where it has
// none.
int fa2_smem_available(int* bytes);

// Attention: bf16 and fp16, head_dim a multiple of 8 up to 256, rows and pointers aligned to 16 bytes, masks and windows
// but none of the pointers to features above. smem_available: from fa2_smem_available; a plan that takes more cannot be
// launched.
KernelPlan plan_fa2_fwd(const Problem& p);
KernelPlan plan_fa2_bwd(const Problem& p, int smem_available);
int launch_fa2_fwd(const FwdParams& p, void* stream);
int launch_fa2_bwd(const BwdParams& p, int smem_available, void* stream);  // with p.delta as workspace

// delta = rowsum(dout * out) - dlse, from p.out, p.dout, p.dlse into p.delta. Zeroes p.dq_accum and p.dq_turns.
int launch_bwd_preprocess(const BwdParams& p, void* stream);

}  // namespace flash
