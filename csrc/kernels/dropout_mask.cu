// The dropout mask (rule 8) as a tensor: what the attention kernels draw for themselves, written out to be looked at.
#include <cuda_runtime.h>

#include "../core/philox.h"

namespace flash {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 1 << 20;  // further tasks come round in the loop, so that no size overflows a grid axis

// One task is row r of the upper half of a 16 x 16 block and row r + 8 below it: the four draws that serve one of the
// two serve both, and each row is 16 bytes in one piece.
__global__ void __launch_bounds__(kThreads)
dropout_mask_kernel(uint8_t* keep,        // [batch_heads, seqlen_q, seqlen_k]
                    const int64_t* seed,  // [2]
                    double dropout_p, int64_t batch_heads, int64_t seqlen_q, int64_t seqlen_k, bool rows_aligned) {
  const Dropout dropout = Dropout::of(seed, dropout_p);
  const int64_t cols16 = ceil_div(seqlen_k, 16), rows8 = ceil_div(seqlen_q, 16) * 8;
  const int64_t tasks = batch_heads * rows8 * cols16;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t task = int64_t{blockIdx.x} * kThreads + threadIdx.x; task < tasks; task += step) {
    const int64_t col16 = task % cols16, row8 = task / cols16 % rows8, batch_head = task / cols16 / rows8;
    const uint32_t row_in_block = static_cast<uint32_t>(row8 % 8);

    uint32_t bytes[2][4] = {};  // rows row_in_block and row_in_block + 8; four columns a word
#pragma unroll
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const Philox4 draws = dropout.draws(static_cast<uint32_t>(row8 / 8), static_cast<uint32_t>(col16),
                                          row_in_block * 4 + lane, static_cast<uint32_t>(batch_head));
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t col = i / 2 * 8 + lane * 2 + i % 2;
          const uint32_t kept = Dropout::draw_of(draws, half * 8, col) >= dropout.threshold;
          bytes[half][col / 4] |= kept << (8 * (col % 4));
        }
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row8 / 8 * 16 + row_in_block + half * 8;
      if (row >= seqlen_q) continue;
      uint8_t* out = keep + (batch_head * seqlen_q + row) * seqlen_k + col16 * 16;
      if (rows_aligned) {
        *reinterpret_cast<uint4*>(out) = make_uint4(bytes[half][0], bytes[half][1], bytes[half][2], bytes[half][3]);
        continue;
      }
#pragma unroll
      for (int col = 0; col < 16; ++col) {
        if (col16 * 16 + col < seqlen_k) out[col] = static_cast<uint8_t>(bytes[half][col / 4] >> (8 * (col % 4)));
      }
    }
  }
}

}  // namespace

int launch_dropout_mask(uint8_t* keep, const int64_t* seed, double dropout_p, int64_t batch, int64_t heads,
                        int64_t seqlen_q, int64_t seqlen_k, void* stream) {
  const int64_t tasks = batch * heads * ceil_div(seqlen_q, 16) * 8 * ceil_div(seqlen_k, 16);
  if (tasks == 0) return cudaSuccess;
  const bool rows_aligned = seqlen_k % 16 == 0 && reinterpret_cast<uintptr_t>(keep) % 16 == 0;
  const unsigned grid = static_cast<unsigned>(min_of(ceil_div(tasks, kThreads), kMaxGrid));
  dropout_mask_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      keep, seed, dropout_p, batch * heads, seqlen_q, seqlen_k, rows_aligned);
  return cudaGetLastError();
}

}  // namespace flash
