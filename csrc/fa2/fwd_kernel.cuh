// FlashAttention-2 forward (Dao 2023, Algorithm 1) for sm_80 and newer: a CTA owns one query tile, its warps split its
// rows, key tiles stream past. P never leaves the registers; O stays in them until it is divided by row_sum, at the end.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>

#include "../core/block_info.h"
#include "../core/softmax.h"
#include "../core/tile_scheduler.h"
#include "../ptx/math.cuh"
#include "config.h"
#include "warp_gemm.cuh"

namespace flash::fa2 {

// The maximum that is subtracted may stay this far (as a power of 2) below the true one, so that O is rescaled in few
// tiles only. P is then up to 2^8, which fp16 holds as exactly as 1.
constexpr float kRescaleFrom = 8.0f;

// Up to here the maximum, once it is scaled and rounded, is off by less than 1, as an exponent of 2: all of a row's P are
// off by the same factor then, which O does not see. Beyond it is subtracted before it is scaled, so that P stays in range.
constexpr float kExactShift = 1 << 24;

template <class Element, class Config>
struct FwdTile {
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kWarpRows = kBlockM / Config::kWarps;
  static constexpr int kM = kWarpRows / 16, kN = kBlockN / 8, kD = kHeadDim / 8;  // fragments of a warp

  const FwdParams& p;
  char* smem;  // [2] shared memory plan: in config.h
  const uint32_t first_batch_head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Fragment fragment = Fragment::of(lane);

  int32_t row_count;               // queries of the tile
  int32_t block_begin, block_end;  // key blocks that one of them sees
  TileBand band;                   // of the tile
  const Element *k, *v;            // [seqlen_k, head_dim], rows apart by their strides

  float acc_o[kM][kD][4];
  float row_max[kM][2], row_sum[kM][2];  // row_sum: what this lane has added, its part of the row
  bool huge = false;                     // a row_max has been beyond kExactShift

  // [1] which tile is mine
  struct Place {
    int32_t batch, head;
    SeqInfo seq;
    Range rows;  // of the sequence

    __device__ int32_t row_count() const { return static_cast<int32_t>(rows.end - rows.begin); }
  };
  // Worked out anew where it is needed: beside S and O there are no registers to keep it in.
  __device__ Place place() const {
    const uint32_t task = ptx::opaque(blockIdx.x);
    const TileScheduler scheduler{p.heads, ceil_div(p.seqlen_q, kBlockM), p.causal != Causal::kOff};
    const Work work = scheduler.work_of(first_batch_head, task);
    const SeqInfo seq = SeqInfo::of(p, work.batch);
    return {static_cast<int32_t>(work.batch), static_cast<int32_t>(work.head), seq,
            elements_of(work.block, kBlockM, seq.seqlen_q)};
  }

  __device__ FwdTile(const FwdParams& params, char* shared, uint32_t first)
      : p(params), smem(shared), first_batch_head(first) {
    const Place at = place();
    const Band whole = Band::of(p, at.seq);
    const Range blocks = blocks_of(whole.keys_of(at.rows.begin, at.rows.end), kBlockN);
    row_count = at.row_count();
    block_begin = static_cast<int32_t>(blocks.begin);
    block_end = static_cast<int32_t>(blocks.end);
    band = TileBand::of(whole).from_row(static_cast<int32_t>(at.rows.begin));
    const int64_t head_kv = at.head / (static_cast<int32_t>(p.heads) / static_cast<int32_t>(p.heads_kv));
    const auto keys = [&](const TensorView& t) {
      return static_cast<const Element*>(t.ptr) + at.batch * t.batch_stride + at.seq.k_begin * t.row_stride +
             head_kv * t.head_stride;
    };
    k = keys(p.k);
    v = keys(p.v);
  }

  __device__ Element* queries(const Place& at, const TensorView& t) const {  // [row_count, head_dim] of q or out
    return static_cast<Element*>(t.ptr) + at.batch * t.batch_stride +
           (at.seq.q_begin + at.rows.begin) * t.row_stride + at.head * t.head_stride;
  }

  // Scores stay raw products, and the exponent takes the scale.
  __device__ float natural() const { return p.softmax_scale == 0 ? 1.0f : static_cast<float>(p.softmax_scale); }

  __device__ int row_of(int m, int i) const { return warp * kWarpRows + m * 16 + fragment.row_of(i); }

  // ---- K and V tiles, in kStages places each. With 2 the next block's load under this one's work, and one barrier a block
  // is enough; with 1, where shared memory is short, V loads under Q K^T and the next K under the softmax and P V.

  __device__ char* k_tile(int n_block) const { return smem + Config::kBytesQ + n_block % Config::kStages * Config::kBytesKV; }
  __device__ char* v_tile(int n_block) const { return k_tile(n_block) + Config::kStages * Config::kBytesKV; }

  __device__ void load_keys(char* to, const Element* from, int64_t row_stride, int n_block) const {
    const int col = n_block * kBlockN;
    load_tile_async<kBlockN, kHeadDim, Config::kThreads, (kM == 1)>(ptx::shared_address(to), from + col * row_stride,
                                                                    row_stride, band.seqlen_k - col,
                                                                    static_cast<int>(p.head_dim));
  }
  __device__ void load_k(int n_block) const {
    if (n_block < block_end) load_keys(k_tile(n_block), k, p.k.row_stride, n_block);
  }
  __device__ void load_v(int n_block) const {
    if (n_block < block_end) load_keys(v_tile(n_block), v, p.v.row_stride, n_block);
  }

  // Waits for this thread's copies, then for everyone's, who are then also done with what they read before. With `clean`,
  // infinities and NaN of V become zero; returns whether there were any.
  __device__ bool wait_for_tiles(int n_block, bool clean) const {
    ptx::cp_async_wait_group<0>();
    if (clean)
      return __syncthreads_or(
          clean_tile<kBlockN, kHeadDim, Config::kThreads, Element>(v_tile(n_block), [](int) {}));
    __syncthreads();
    return false;
  }
  __device__ bool wait_for_k(int n_block, bool partial) const {
    const bool found = wait_for_tiles(n_block, Config::kStages == 2 && partial);
    if constexpr (Config::kStages == 2) {
      load_k(n_block + 1);
      load_v(n_block + 1);
    } else {
      load_v(n_block);
    }
    ptx::cp_async_commit_group();
    return found;
  }
  __device__ bool wait_for_v(int n_block, bool partial) const {
    if constexpr (Config::kStages == 2) return false;  // it came with K
    const bool found = wait_for_tiles(n_block, partial);
    load_k(n_block + 1);
    ptx::cp_async_commit_group();
    return found;
  }

  // All key blocks.
  __device__ void run() {
    const float scale_log2 = natural() * static_cast<float>(kLog2e);
    bool poisoned = false;  // V holds infinities or NaN that some rows must not meet
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int d = 0; d < kD; ++d) acc_o[m][d][0] = acc_o[m][d][1] = acc_o[m][d][2] = acc_o[m][d][3] = 0;
      row_max[m][0] = row_max[m][1] = neg_infinity<float>();
      row_sum[m][0] = row_sum[m][1] = 0;
    }
    if (block_begin >= block_end) return;

    // [3] load Q, with the first key block
    load_tile_async<kBlockM, kHeadDim, Config::kThreads>(ptx::shared_address(smem), queries(place(), p.q), p.q.row_stride,
                                                         row_count, static_cast<int>(p.head_dim));
    load_k(block_begin);
    if constexpr (Config::kStages == 2) load_v(block_begin);
    ptx::cp_async_commit_group();

#pragma unroll 1
    for (int n_block = block_begin; n_block < block_end; ++n_block) {  // [4] for each key block
      const int col = n_block * kBlockN;
      const bool partial = !band.covers(kBlockM, col, kBlockN);
      float acc_s[kM][kN][4] = {};
      const int thread = ptx::opaque(threadIdx.x), lane = thread % 32;

      // [4a] S = Q K^T
      poisoned |= wait_for_k(n_block, partial);
      const FragmentReader<kBlockM, Order::kRows16> q_at(ptx::shared_address(smem) + warp * (kWarpRows * 128), lane);
      const FragmentReader<kBlockN, Order::kCols16> k_at(ptx::shared_address(k_tile(n_block)), lane);
#pragma unroll
      for (int depth = 0; depth < kHeadDim; depth += 16) {
        uint32_t a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], q_at.at(m * 16, depth));
        mma_step<Element>(acc_s, a, [&](uint32_t(&b)[4], int n) { ptx::ldmatrix_x4(b, k_at.at(n, depth)); });
      }

      // [4b] score_mod and mask
      if (p.softmax_scale == 0) for_each(acc_s, [](float& s, int, int, int) { s = 0; });  // 0 * -inf would be NaN
      if (partial) {
        const int first = col + Fragment::of(lane).col;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const TileBand::Keys keys = band.keys_of(thread / 32 * kWarpRows + m * 16 + Fragment::of(lane).row_of(2 * h));
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
              for (int i = 2 * h; i < 2 * h + 2; ++i)
                if (!keys.contain(first + n * 8 + i % 2)) acc_s[m][n][i] = neg_infinity<float>();
          }
        }
      }

      // [4c] online softmax
      softmax(acc_s, scale_log2);

      // Rounded at once, to free registers: the accumulators of two neighbouring tiles of S are a fragment of P.
      uint32_t prob[kM][kN / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          prob[m][n / 2][n % 2 * 2] = ptx::cvt_rn_x2<Element>(acc_s[m][n][0], acc_s[m][n][1]);
          prob[m][n / 2][n % 2 * 2 + 1] = ptx::cvt_rn_x2<Element>(acc_s[m][n][2], acc_s[m][n][3]);
        }
      }

      // [4d] O += P V
      poisoned |= wait_for_v(n_block, partial);
      const FragmentReader<kBlockN, Order::kRows16> v_at(ptx::shared_address(v_tile(n_block)), lane);
#pragma unroll
      for (int depth = 0; depth < kBlockN; depth += 16) {
        uint32_t a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = prob[m][depth / 16][i];
        mma_step<Element>(acc_o, a, [&](uint32_t(&b)[4], int n) { ptx::ldmatrix_x4_trans(b, v_at.at(depth, n)); });
      }
    }
    if (poisoned) add_not_finite();
  }

  template <int kCols, class F>
  __device__ static void for_each(float (&acc)[kM][kCols][4], const F& f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kCols; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(acc[m][n][i], m, n, i);
  }

  // S becomes P = 2^((S - row_max) scale_log2). O and row_sum are rescaled only when some row's maximum has grown so far
  // that P could leave the range of Element.
  __device__ void softmax(float (&acc_s)[kM][kN][4], float scale_log2) {
    float grown[kM][2];
    bool rescale = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float high = acc_s[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < kN; ++n) high = fmaxf(high, fmaxf(acc_s[m][n][2 * h], acc_s[m][n][2 * h + 1]));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));  // the four lanes of a quad share a row
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        const bool far = (high - row_max[m][h]) * scale_log2 > kRescaleFrom;
        grown[m][h] = far ? high : row_max[m][h];
        rescale |= far;
      }
    }
    if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = rescale_of(row_max[m][h], grown[m][h], scale_log2);
          row_max[m][h] = grown[m][h];
          huge |= fabsf(finite_max(grown[m][h]) * scale_log2) > kExactShift;
          row_sum[m][h] *= factor;
#pragma unroll
          for (int d = 0; d < kD; ++d) {
            acc_o[m][d][2 * h] *= factor;
            acc_o[m][d][2 * h + 1] *= factor;
          }
        }
      }
    }
    float shift_scale = scale_log2;
    if (huge) {
      for_each(acc_s, [&](float& s, int m, int, int i) { s -= finite_max(row_max[m][i / 2]); });
      shift_scale = 0;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = finite_max(row_max[m][h]) * shift_scale;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            acc_s[m][n][i] = ptx::ex2_approx_ftz(fmaf(acc_s[m][n][i], scale_log2, -shift));
            row_sum[m][h] += acc_s[m][n][i];
          }
        }
      }
    }
  }

  // Rule 6: what next_item took out of V reaches the rows that see it, one by one. Rare, so written to be short.
  __device__ void add_not_finite() {
#pragma unroll 1
    for (int col = block_begin * kBlockN; col < min_of(block_end * kBlockN, band.seqlen_k); ++col) {
      if (band.covers(kBlockM, col / kBlockN * kBlockN, kBlockN)) continue;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = d * 8 + fragment.col + e;
          const float x = column < p.head_dim ? static_cast<float>(v[col * p.v.row_stride + column]) : 0.0f;
          if (fabsf(x) <= FLT_MAX) continue;
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            if (band.sees(row_of(m, 0), col)) acc_o[m][d][e] += x;
            if (band.sees(row_of(m, 2), col)) acc_o[m][d][2 + e] += x;
          }
        }
      }
    }
  }

  __device__ void finish() {
    const Place at = place();
    const int32_t row_count = at.row_count();
    float* lse = static_cast<float*>(p.lse.ptr) + at.batch * p.lse.batch_stride + at.head * p.lse.head_stride +
                 at.seq.q_begin + at.rows.begin;  // [row_count]
    // [5] normalise
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = row_sum[m][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float inverse = inverse_of(sum);
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          acc_o[m][d][2 * h] *= inverse;
          acc_o[m][d][2 * h + 1] *= inverse;
        }
        // [7] write LSE
        const int row = row_of(m, 2 * h);
        if (lane % 4 == 0 && row < row_count) lse[row] = lse_of(row_max[m][h], sum, natural());
      }
    }
    // [6] write O: through Q's place, of which a warp reads and writes its own rows only, so that stores are 16 bytes
    __syncwarp();
    store_fragments<Element, kBlockM, kM, kD>(smem, warp * kWarpRows, 0, lane,
                                              [&](int m, int d, int i) { return acc_o[m][d][i]; });
    __syncwarp();
    store_rows<kBlockM, kHeadDim, kWarpRows, 32>(smem, warp * kWarpRows, lane, queries(at, p.out), p.out.row_stride, row_count,
                                                 p.head_dim);
  }
};

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(FwdConfig<kHeadDim>::kThreads, FwdConfig<kHeadDim>::kMinCtas)
fa2_fwd_kernel(const __grid_constant__ FwdParams p, uint32_t first_batch_head) {
  extern __shared__ __align__(1024) char smem[];
  using Tile = FwdTile<Element, FwdConfig<kHeadDim>>;
  Tile tile(p, smem, first_batch_head);
  if (tile.row_count <= 0) return;  // a packed sequence shorter than the longest
  tile.run();
  tile.finish();
}

}  // namespace flash::fa2
