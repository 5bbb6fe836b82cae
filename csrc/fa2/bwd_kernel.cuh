// FlashAttention-2 backward (Dao 2023, Algorithm 2) for sm_80 and newer: a CTA owns one key tile, whose dK and dV stay
// in registers, and streams the query tiles of every head of its group past it. P and dS are recomputed and pass from
// warp to warp through shared memory; dQ is added up in global memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../core/softmax.h"
#include "../core/tile_scheduler.h"
#include "../ptx/math.cuh"
#include "../ptx/memory.cuh"
#include "config.h"
#include "dq_accum.cuh"
#include "warp_gemm.cuh"

namespace flash::fa2 {

// This warp's piece of a product whose result has kRows x kCols elements, shared by kWarpsM x (kWarps / kWarpsM) warps.
template <int kRows, int kCols, int kWarps, int kWarpsM>
struct Piece {
  static constexpr int kPieceRows = kRows / kWarpsM, kPieceCols = kCols / (kWarps / kWarpsM);
  static constexpr int kM = kPieceRows / 16, kN = kPieceCols / 8;  // fragments
  static_assert(kPieceRows % 16 == 0 && kPieceCols % 16 == 0);
  using Acc = float[kM][kN][4];

  const int row0 = threadIdx.x / 32 % kWarpsM * kPieceRows, col0 = threadIdx.x / 32 / kWarpsM * kPieceCols;

  __device__ __forceinline__ static void zero(Acc& acc) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;
  }

  // acc += A B over kDepth. A is stored [kRows][kDepth], or [kDepth][kRows] when kTransA; B is [kCols][kDepth], or
  // [kDepth][kCols] when kTransB.
  template <class Element, int kDepth, bool kTransA, bool kTransB>
  __device__ __forceinline__ void multiply(Acc& acc, const char* a_tile, const char* b_tile, int lane) const {
    constexpr int kRowsA = kTransA ? kDepth : kRows, kRowsB = kTransB ? kDepth : kCols;
    const FragmentReader<kRowsA, kTransA ? Order::kCols16 : Order::kRows16, kTransA ? kPieceRows : 64> a_at(
        ptx::shared_address(a_tile), lane, kTransA ? 0 : row0, kTransA ? row0 : 0);
    const FragmentReader<kRowsB, kTransB ? Order::kRows16 : Order::kCols16, kTransB ? kPieceCols : 64> b_at(
        ptx::shared_address(b_tile), lane, kTransB ? 0 : col0, kTransB ? col0 : 0);
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kTransA)
          ptx::ldmatrix_x4_trans(a[m], a_at.at(depth, m * 16));
        else
          ptx::ldmatrix_x4(a[m], a_at.at(m * 16, depth));
      }
      mma_step<Element>(acc, a, [&](uint32_t(&b)[4], int n) {
        if constexpr (kTransB)
          ptx::ldmatrix_x4_trans(b, b_at.at(depth, n));
        else
          ptx::ldmatrix_x4(b, b_at.at(n, depth));
      });
    }
  }
};

template <class Element, class Config>
struct BwdTile {
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using PieceS = Piece<kBlockM, kBlockN, Config::kWarps, Config::kWarpsM_S>;
  using PieceDkv = Piece<kBlockN, kHeadDim, Config::kWarps, Config::kWarpsM_dKV>;
  using PieceDq = Piece<kBlockM, Config::kDqCols, Config::kWarps, Config::kWarpsM_dQ>;
  static constexpr int kDqCount = PieceDq::kM * PieceDq::kN * 4;  // sums of a thread

  const BwdParams& p;
  char* smem;  // [2] shared memory plan: in config.h
  const int lane = threadIdx.x % 32;
  const Fragment fragment = Fragment::of(lane);
  const PieceS piece_s;
  const PieceDkv piece_dkv;

  // [1] which tile is mine
  int32_t batch, head_kv, n_block;
  int32_t q_begin, seqlen_q;  // of the sequence; packed rows are counted in 32 bits
  int32_t m_begin, m_end;     // the query blocks that see one of the tile's keys
  TileBand band;              // of the whole sequence

  // The query blocks of all heads of the group, one after the other.
  struct QueryBlock {
    int32_t head, m_block;
  };
  __device__ QueryBlock after(const QueryBlock& block) const {
    if (block.m_block + 1 < m_end) return {block.head, block.m_block + 1};
    return {block.head + 1, m_begin};
  }

  typename PieceDkv::Acc acc_dk, acc_dv;

  __device__ BwdTile(const BwdParams& params, char* shared, uint32_t first_batch_head, uint32_t task)
      : p(params), smem(shared) {
    const Work work = TileScheduler{p.heads_kv, ceil_div(p.seqlen_k, kBlockN), false}.work_of(first_batch_head, task);
    const SeqInfo seq = SeqInfo::of(p, work.batch);
    const Range cols = elements_of(work.block, kBlockN, seq.seqlen_k);
    const Band whole = Band::of(p, seq);
    const Range blocks = blocks_of(whole.queries_of(cols.begin, cols.end), kBlockM);
    batch = static_cast<int32_t>(work.batch);
    head_kv = static_cast<int32_t>(work.head);
    n_block = static_cast<int32_t>(work.block);
    q_begin = static_cast<int32_t>(seq.q_begin);
    seqlen_q = static_cast<int32_t>(seq.seqlen_q);
    m_begin = static_cast<int32_t>(blocks.begin);
    m_end = static_cast<int32_t>(blocks.end);
    band = TileBand::of(whole);
  }

  __device__ int first_col() const { return n_block * kBlockN; }
  __device__ int first_key() const {  // first_col, counted from the beginning of packed tensors
    return (p.cu_seqlens_k == nullptr ? 0 : p.cu_seqlens_k[batch]) + first_col();
  }
  __device__ int col_count() const { return band.seqlen_k - first_col(); }
  __device__ Element* rows(const TensorView& t, int row, int head) const {
    return static_cast<Element*>(t.ptr) + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
  }
  __device__ float* statistics(const RowView& t, int row, int head) const {
    return static_cast<float*>(t.ptr) + batch * t.batch_stride + head * t.head_stride + row;
  }
  __device__ void load_keys(char* to, const TensorView& t) const {
    load_tile_async<kBlockN, kHeadDim, Config::kThreads>(ptx::shared_address(to), rows(t, first_key(), head_kv),
                                                         t.row_stride, col_count(), static_cast<int>(p.head_dim));
  }

  // Q, dO, LSE and delta of a query block, one group of copies.
  __device__ void load_queries(const QueryBlock& block, int stage) const {
    const int head = block.head, m_block = block.m_block;
    const int row = m_block * kBlockM, count = seqlen_q - row, head_dim = static_cast<int>(p.head_dim);
    load_tile_async<kBlockM, kHeadDim, Config::kThreads>(
        ptx::shared_address(smem + Config::kAtQ + stage * Config::kBytesQ), rows(p.q, q_begin + row, head),
        p.q.row_stride, count, head_dim);
    load_tile_async<kBlockM, kHeadDim, Config::kThreads>(
        ptx::shared_address(smem + Config::kAtDout + stage * Config::kBytesQ), rows(p.dout, q_begin + row, head),
        p.dout.row_stride, count, head_dim);
    static_assert(2 * kBlockM <= Config::kThreads);
    if (threadIdx.x < 2 * kBlockM) {
      const int i = threadIdx.x % kBlockM;
      const RowView& from = threadIdx.x < kBlockM ? p.lse : p.delta;
      ptx::cp_async_ca_4(ptx::shared_address(statistics_at(stage) + threadIdx.x),
                         statistics(from, q_begin + row + i, head), i < count ? 4 : 0);
    }
    ptx::cp_async_commit_group();
  }

  // [3] for each key block: a CTA has one
  __device__ void run() {
    const int group = static_cast<int>(p.heads) / static_cast<int>(p.heads_kv), first_head = head_kv * group;
    PieceDkv::zero(acc_dk);
    PieceDkv::zero(acc_dv);
    if (m_begin >= m_end) return;
    QueryBlock block{first_head, m_begin};
    load_keys(smem, p.k);
    load_keys(smem + Config::kAtV, p.v);
    load_queries(block, 0);
    const bool k_finite = clean_keys();

    int stage = 0, left = group * (m_end - m_begin);  // blocks, with this one
    if (Config::kStages == 3 && left > 1) load_queries(after(block), 1);
#pragma unroll 1
    for (; left > 0; --left) {
      const QueryBlock next = after(block);
      query_block(block, next, left, stage, k_finite);
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
      block = next;
    }
    if (!k_finite && p.dq.ptr != nullptr) add_not_finite(first_head, group);
  }

  // Who waits for whom. With 3 stages and two places for P and dS one barrier a block is enough: behind it every warp has
  // written this block's P and dS, sees the next block's Q and dO, and is done with the last block, whose stage is loaded
  // anew. So a warp may be as far as the next dP while another still adds its dQ. With fewer stages a second barrier, at
  // the top, says that all are done with the last block and that all copies of this one have landed.
  __device__ void query_block(const QueryBlock& block, const QueryBlock& next, int left, int stage, bool k_finite) {
    const int head = block.head, m_block = block.m_block;
    char *s_k = smem, *s_v = smem + Config::kAtV;
    char* s_p = smem + Config::kAtP + (left & (Config::kBuffersP - 1)) * Config::kBytesP;
    char* s_ds = s_p + (Config::kAtDs - Config::kAtP);
    char *s_q = smem + Config::kAtQ + stage * Config::kBytesQ, *s_dout = smem + Config::kAtDout + stage * Config::kBytesQ;
    const int first_row = m_block * kBlockM, row_count = seqlen_q - first_row;
    const TileBand tile_band = band.from_row(first_row);
    const bool partial = !tile_band.covers(kBlockM, first_col(), kBlockN) || row_count < kBlockM;
    const float scale_log2 = static_cast<float>(p.softmax_scale * kLog2e);
    if constexpr (Config::kStages < 3) {
      ptx::cp_async_wait_group<0>();  // my copies of this Q and dO have landed
      __syncthreads();  // everyone's have; and every warp is done with the last query block's P, dS, Q and dO
    }

    // [4] recompute P and dS for each query block
    {
      typename PieceS::Acc acc_s, acc_dp;
      PieceS::zero(acc_s);
      piece_s.template multiply<Element, kHeadDim, false, false>(acc_s, s_q, s_k, lane);
      // Here, where the products hide what it costs to work out addresses.
      if (Config::kStages == 2 && left > 1) load_queries(next, stage ^ 1);
      float lse_log2[PieceS::kM][2], delta[PieceS::kM][2];
      read_statistics(stage, lse_log2, delta);
      if (!k_finite) {
        for_each([&](int m, int n, int i) {
          if (bad_keys()[piece_s.col0 + n * 8 + fragment.col_of(i)]) acc_s[m][n][i] = neg_infinity<float>();
        });
      }
      PieceS::zero(acc_dp);
      piece_s.template multiply<Element, kHeadDim, false, false>(acc_dp, s_dout, s_v, lane);
      for_each([&](int m, int n, int i) {
        // P is at most 1. Where scores are so large that rounding LSE moves it by more than log(row_sum), this bounds P.
        const float exponent = ptx::min_nan(fmaf(acc_s[m][n][i], scale_log2, -lse_log2[m][i / 2]), 0.0f);
        acc_s[m][n][i] = ptx::ex2_approx_ftz(exponent);
        acc_dp[m][n][i] = acc_s[m][n][i] * (acc_dp[m][n][i] - delta[m][i / 2]);
      });
      if (partial) {
        zero_masked(acc_s, tile_band, row_count);
        zero_masked(acc_dp, tile_band, row_count);  // dP is not finite where V is not, though it is masked
      }
      store_fragments<Element, kBlockM, PieceS::kM, PieceS::kN>(
          s_p, piece_s.row0, piece_s.col0, lane, [&](int m, int n, int i) { return acc_s[m][n][i]; });
      store_fragments<Element, kBlockM, PieceS::kM, PieceS::kN>(
          s_ds, piece_s.row0, piece_s.col0, lane, [&](int m, int n, int i) { return acc_dp[m][n][i]; });
    }
    if constexpr (Config::kStages == 3) ptx::cp_async_wait_group<0>();  // my copies of the next Q and dO have landed
    __syncthreads();  // P and dS of every warp are there; with 3 stages also the next Q and dO
    if (Config::kStages == 3 && left > 2) load_queries(after(next), stage == 0 ? 2 : stage - 1);

    // [5] dV += P^T dO and dK += dS^T Q
    // Here and not at the top: the addresses of these products are then worked out when those of S are done with.
    const int lane = ptx::opaque(this->lane);
    if (p.dk.ptr != nullptr) {
      piece_dkv.template multiply<Element, kBlockM, true, true>(acc_dv, s_p, s_dout, lane);
      piece_dkv.template multiply<Element, kBlockM, true, true>(acc_dk, s_ds, s_q, lane);
    }

    // [6] dQ += dS K, in slow memory
    if (p.dq.ptr != nullptr) {
      const PieceDq piece_dq;
      wait_for_turn(head, m_block);
#pragma unroll 1
      for (int col = 0; col < kHeadDim; col += Config::kDqCols) {
        typename PieceDq::Acc acc_dq;
        PieceDq::zero(acc_dq);
        piece_dq.template multiply<Element, kBlockN, false, true>(acc_dq, s_ds, s_k + SmemTile<kBlockN>::bytes(col), lane);
        dq_add<Config::kThreads, kDqCount>(dq_sums(head, m_block) + kBlockM * col, &acc_dq[0][0][0]);
      }
      pass_turn(head, m_block);
    }
    if (Config::kStages == 1 && left > 1) {
      __syncthreads();  // every warp is done with Q and dO
      load_queries(next, 0);
    }
  }

  // Every element that this lane holds of its warp's piece of the score tile.
  template <class F>
  __device__ __forceinline__ static void for_each(const F& f) {
#pragma unroll
    for (int m = 0; m < PieceS::kM; ++m)
#pragma unroll
      for (int n = 0; n < PieceS::kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(m, n, i);
  }

  __device__ __forceinline__ void zero_masked(typename PieceS::Acc& acc, const TileBand& tile_band, int row_count) const {
#pragma unroll
    for (int m = 0; m < PieceS::kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = piece_s.row0 + m * 16 + fragment.row_of(2 * h);
        const TileBand::Keys keys = row < row_count ? tile_band.keys_of(row) : TileBand::Keys{INT32_MAX, 0};
#pragma unroll
        for (int n = 0; n < PieceS::kN; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i)
            if (!keys.contain(first_col() + piece_s.col0 + n * 8 + fragment.col_of(i))) acc[m][n][i] = 0;
        }
      }
    }
  }

  // LSE as an exponent of 2, and delta. Rows without a visible key get +inf: their P is 0. (What rows past the end get
  // does not matter: they are masked.)
  __device__ __forceinline__ void read_statistics(int stage, float (&lse_log2)[PieceS::kM][2],
                                                  float (&delta)[PieceS::kM][2]) const {
    const float* rows = statistics_at(stage) + piece_s.row0 + fragment.row;
#pragma unroll
    for (int m = 0; m < PieceS::kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float lse = rows[m * 16 + h * 8];
        lse_log2[m][h] = lse == neg_infinity<float>() ? -neg_infinity<float>() : lse * static_cast<float>(kLog2e);
        delta[m][h] = rows[kBlockM + m * 16 + h * 8];
      }
    }
  }
  __device__ float* statistics_at(int stage) const {  // [2][kBlockM]: LSE, delta
    return reinterpret_cast<float*>(smem + Config::kAtStatistics) + stage * (2 * kBlockM);
  }

  // ---- dQ

  __device__ int64_t dq_tile(int head, int m_block) const {
    return head * p.dq_tiles_of_head + dq_first_tile(p, q_begin, batch, kBlockM) + m_block;
  }
  __device__ float* dq_sums(int head, int m_block) const {
    return static_cast<float*>(p.dq_accum) + dq_tile(head, m_block) * (kBlockM * kHeadDim);
  }

  // deterministic: key blocks add to a tile in their order. The one that is waited for runs already: CTAs take their
  // tasks in that order (see the kernel), so there is no deadlock.
  __device__ int* turns_done(int head, int m_block) const { return p.dq_turns + 1 + dq_tile(head, m_block); }
  __device__ int turn(int m_block) const {
    const int first_seen = max_of(0, m_block * kBlockM + band.low);  // key, by a row of the query block
    return n_block - first_seen / kBlockN;
  }
  __device__ void wait_for_turn(int head, int m_block) const {
    if (p.dq_turns == nullptr) return;
    if (threadIdx.x == 0) ptx::wait_until_equal(turns_done(head, m_block), turn(m_block));
    __syncthreads();  // everyone waits for thread 0, which has seen the key block before this one finish
  }
  __device__ void pass_turn(int head, int m_block) const {
    if (p.dq_turns == nullptr) return;
    __threadfence();  // my additions are done before
    __syncthreads();  // everyone's are, and before
    if (threadIdx.x == 0) ptx::st_release_gpu(turns_done(head, m_block), turn(m_block) + 1);  // the next block may add
  }

  // ---- rule 6 where K holds infinities or NaN: they must not meet the dS = 0 of rows that do not see their key. So their
  // place in K becomes zero and the key is noted. Its P is 0, or NaN where LSE is, which is what the true scores would
  // give; and behind the loop the dQ of rows that see it becomes NaN, as 0 * infinity is. Rare, so written to be short.

  __device__ bool* bad_keys() const { return reinterpret_cast<bool*>(smem + Config::kAtBadKeys); }  // [kBlockN]

  __device__ bool clean_keys() const {
    if (threadIdx.x < kBlockN) bad_keys()[threadIdx.x] = false;
    ptx::cp_async_wait_group<0>();  // my own copies of K have landed
    __syncthreads();  // the notes are all false before one becomes true
    const bool found = clean_tile<kBlockN, kHeadDim, Config::kThreads, Element>(
        smem, [&](int row) { bad_keys()[row] = true; });
    return !__syncthreads_or(found);  // and K is clean before any warp multiplies with it
  }

  __device__ void add_not_finite(int first_head, int group) const {
    const PieceDq piece;
    const Element* k = rows(p.k, first_key(), head_kv);
#pragma unroll 1
    for (int col = 0; col < min_of(kBlockN, col_count()); ++col) {
      if (!bad_keys()[col]) continue;
#pragma unroll 1
      for (int tile = 0; tile < group * (m_end - m_begin); ++tile) {
        const int head = first_head + tile / (m_end - m_begin), m_block = m_begin + tile % (m_end - m_begin);
        float* sums = dq_sums(head, m_block);
#pragma unroll 1
        for (int x = 0; x < kDqCount * (kHeadDim / Config::kDqCols); ++x) {
          const int place = x % kDqCount, first = x / kDqCount * Config::kDqCols;
          const int i = place % 4, n = place / 4 % PieceDq::kN, m = place / 4 / PieceDq::kN;
          const int column = first + piece.col0 + n * 8 + fragment.col_of(i);
          const int row = m_block * kBlockM + piece.row0 + m * 16 + fragment.row_of(i);
          if (column >= p.head_dim || row >= seqlen_q || !band.sees(row, first_col() + col)) continue;
          const float value = static_cast<float>(k[col * p.k.row_stride + column]);
          if (!(fabsf(value) <= FLT_MAX)) atomicAdd(sums + kBlockM * first + dq_place<Config::kThreads>(place), value - value);
        }
      }
    }
  }

  // [7] write dK and dV, summed over the query heads of the group
  __device__ void finish() {
    const float scale = static_cast<float>(p.softmax_scale);
    __syncthreads();  // every warp is done with K and V, whose places dK and dV pass through so that stores are 16 bytes
    store_fragments<Element, kBlockN, PieceDkv::kM, PieceDkv::kN>(
        smem, piece_dkv.row0, piece_dkv.col0, lane, [&](int m, int n, int i) { return acc_dk[m][n][i] * scale; });
    store_fragments<Element, kBlockN, PieceDkv::kM, PieceDkv::kN>(
        smem + Config::kAtV, piece_dkv.row0, piece_dkv.col0, lane,
        [&](int m, int n, int i) { return acc_dv[m][n][i]; });
    __syncthreads();  // the whole tiles are there
    const int head_dim = static_cast<int>(p.head_dim);
    store_rows<kBlockN, kHeadDim, kBlockN, Config::kThreads>(smem, 0, threadIdx.x,
                                                             rows(p.dk, first_key(), head_kv),
                                                             p.dk.row_stride, col_count(), head_dim);
    store_rows<kBlockN, kHeadDim, kBlockN, Config::kThreads>(smem + Config::kAtV, 0, threadIdx.x,
                                                             rows(p.dv, first_key(), head_kv),
                                                             p.dv.row_stride, col_count(), head_dim);
  }
};

template <class Element, int kHeadDim, int kSmemKb>
__global__ void __launch_bounds__(BwdConfig<kHeadDim, kSmemKb>::kThreads, BwdConfig<kHeadDim, kSmemKb>::kMinCtas)
fa2_bwd_kernel(const __grid_constant__ BwdParams p, uint32_t first_batch_head) {
#ifdef __CUDA_ARCH__
  // What a GPU never launches need not be compiled for it.
  if constexpr (!is_compiled(__CUDA_ARCH__, kSmemKb)) return __trap();
#endif
  extern __shared__ __align__(1024) char smem[];
  uint32_t task = blockIdx.x;
  if (p.dq_turns != nullptr) {  // deterministic: tasks go to CTAs in the order in which these start to run
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(p.dq_turns, 1);
    __syncthreads();  // the ticket is there
    task = static_cast<uint32_t>(ticket);
    first_batch_head = 0;  // tickets count through all launches
  }
  BwdTile<Element, BwdConfig<kHeadDim, kSmemKb>> tile(p, smem, first_batch_head, task);
  if (tile.col_count() <= 0) return;  // a packed sequence shorter than the longest
  tile.run();
  if (p.dk.ptr != nullptr) tile.finish();
}

// dQ = scale times the sums, rounded. A CTA converts one query tile of one head.
template <class Element, int kHeadDim, int kSmemKb>
__global__ void __launch_bounds__(BwdConfig<kHeadDim, kSmemKb>::kThreads)
fa2_bwd_convert_dq_kernel(const __grid_constant__ BwdParams p, uint32_t first_batch_head) {
  using Config = BwdConfig<kHeadDim, kSmemKb>;
  using PieceDq = typename BwdTile<Element, Config>::PieceDq;
  constexpr int kBlockM = Config::kBlockM;
  extern __shared__ __align__(1024) char smem[];
  const TileScheduler scheduler{p.heads, ceil_div(p.seqlen_q, kBlockM), false};
  const Work work = scheduler.work_of(first_batch_head, blockIdx.x);
  const SeqInfo seq = SeqInfo::of(p, work.batch);
  const int64_t row = work.block * kBlockM;
  if (row >= seq.seqlen_q) return;
  const int64_t tile = work.head * p.dq_tiles_of_head + dq_first_tile(p, seq.q_begin, work.batch, kBlockM) + work.block;
  const float* sums = static_cast<const float*>(p.dq_accum) + tile * (kBlockM * kHeadDim);
  const PieceDq piece;
  const float scale = static_cast<float>(p.softmax_scale);
#pragma unroll
  for (int col = 0; col < kHeadDim; col += Config::kDqCols) {
    typename PieceDq::Acc acc_dq;
    dq_read<Config::kThreads, PieceDq::kM * PieceDq::kN * 4>(sums + kBlockM * col, &acc_dq[0][0][0]);
    store_fragments<Element, kBlockM, PieceDq::kM, PieceDq::kN>(
        smem, piece.row0, col + piece.col0, threadIdx.x % 32,
        [&](int m, int n, int i) { return acc_dq[m][n][i] * scale; });
  }
  __syncthreads();  // the whole tile is there
  Element* dq = static_cast<Element*>(p.dq.ptr) + work.batch * p.dq.batch_stride +
                (seq.q_begin + row) * p.dq.row_stride + work.head * p.dq.head_stride;
  store_rows<kBlockM, kHeadDim, kBlockM, Config::kThreads>(smem, 0, threadIdx.x, dq, p.dq.row_stride,
                                                           static_cast<int>(seq.seqlen_q - row),
                                                           static_cast<int>(p.head_dim));
}

}  // namespace flash::fa2
