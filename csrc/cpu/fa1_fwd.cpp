// FlashAttention forward (Dao et al. 2022, Algorithm 1) on the CPU: a task owns one (batch, head); key blocks are the
// outer loop, and O, row_max and row_sum are read from and written back to slow memory for every key block.
#include "config.h"
#include "isa.h"
#include "tile.h"

namespace flash::cpu::FLASH_ISA {
namespace {

// O lives in `out` itself, unless that would round it at every visit: 16-bit types revisit a workspace.
template <class T>
constexpr bool kInPlace = std::is_same_v<T, Accum<T>>;

// [2] shared memory plan: the tiles, and behind them what stands for slow memory while the head is worked on.
template <class T, class A = Accum<T>>
struct Buffers {
  A *q, *kv, *k_transposed, *v, *acc_s, *acc_o, *bias_row, *dropout_strip;
  A *o_slow, *max_slow, *sum_slow;
  uint8_t* visible;
  int64_t d_stride, s_stride;

  Buffers(Arena& arena, const FwdParams& p, Tile tile) : d_stride(pad<A>(p.head_dim)), s_stride(pad<A>(tile.block_n)) {
    q = arena.take<A>(tile.block_m * d_stride);
    kv = arena.take<A>(tile.block_n * d_stride);
    k_transposed = arena.take<A>(p.head_dim * s_stride);
    acc_s = arena.take<A>(tile.block_m * s_stride);
    acc_o = arena.take<A>(tile.block_m * d_stride);
    bias_row = arena.take<A>(s_stride);
    dropout_strip = arena.take<A>(p.dropout_seed == nullptr ? 0 : 16 * (s_stride + 16));
    visible = arena.take<uint8_t>(tile.block_m * s_stride);
    o_slow = arena.take<A>(kInPlace<T> ? 0 : p.seqlen_q * p.head_dim);
    max_slow = arena.take<A>(p.seqlen_q);
    sum_slow = arena.take<A>(p.seqlen_q);
  }
};

template <class T>
void fa1_fwd_task(const FwdParams& p, Tile tile, int64_t task, void* scratch, Traffic& traffic) {
  using A = Accum<T>;
  // [1] which tile is mine: all query tiles of one head
  const Work work = TileScheduler{p.heads, 1, false}.work_of(task);
  const int64_t head_kv = work.head / (p.heads / p.heads_kv);
  const Head<A> h = Head<A>::of(p, work.batch, work.head);
  const int64_t seqlen_q = h.seq.seqlen_q;
  const T* q = rows_of<const T>(p.q, work.batch, h.seq.q_begin, work.head);
  const T* k = rows_of<const T>(p.k, work.batch, h.seq.k_begin, head_kv);
  const T* v = rows_of<const T>(p.v, work.batch, h.seq.k_begin, head_kv);
  T* out = rows_of<T>(p.out, work.batch, h.seq.q_begin, work.head);

  Arena arena{static_cast<char*>(scratch)};
  const Buffers<T> b(arena, p, tile);
  A* o_slow = b.o_slow;
  int64_t o_stride = p.head_dim;
  if constexpr (kInPlace<T>) o_slow = out, o_stride = p.out.row_stride;
  const A scale_log2 = h.mod.scale_log2();
  constexpr int64_t kStat = sizeof(A);

  for (int64_t i = 0; i < seqlen_q; ++i) {
    b.max_slow[i] = neg_infinity<A>(), b.sum_slow[i] = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) o_slow[i * o_stride + d] = 0;
  }
  traffic.stored += seqlen_q * (p.head_dim + 2) * kStat;

  for (int64_t n_block = 0; n_block < ceil_div(h.seq.seqlen_k, tile.block_n); ++n_block) {  // [4] for each key block
    const Range cols = elements_of(n_block, tile.block_n, h.seq.seqlen_k);
    const int64_t col_count = cols.end - cols.begin, padded_cols = pad<A>(col_count);
    bool loaded = false, v_finite = true;
    const Range blocks = blocks_of(h.band.queries_of(cols.begin, cols.end), tile.block_m);
    for (int64_t m_block = blocks.begin; m_block < blocks.end; ++m_block) {
      const Range rows = elements_of(m_block, tile.block_m, seqlen_q);
      if (!h.blocks.any(rows, cols)) continue;
      const int64_t row_count = rows.end - rows.begin;
      if (!loaded) {  // K and V of the block, once for all query tiles that see it; `kv` holds V afterwards
        load_tile(k + cols.begin * p.k.row_stride, p.k.row_stride, col_count, p.head_dim, b.kv, b.d_stride, traffic);
        transpose_tile(b.kv, b.d_stride, col_count, p.head_dim, b.k_transposed, b.s_stride);
        v_finite = load_tile(v + cols.begin * p.v.row_stride, p.v.row_stride, col_count, p.head_dim, b.kv, b.d_stride,
                             traffic);
        loaded = true;
      }

      // [3] load Q, and with it what earlier key blocks left of O, row_max and row_sum
      load_tile(q + rows.begin * p.q.row_stride, p.q.row_stride, row_count, p.head_dim, b.q, b.d_stride, traffic);
      load_tile(o_slow + rows.begin * o_stride, o_stride, row_count, p.head_dim, b.acc_o, b.d_stride, traffic);
      A *row_max = b.max_slow + rows.begin, *row_sum = b.sum_slow + rows.begin;
      traffic.loaded += 2 * row_count * kStat;

      // [4a] S = Q K^T
      gemm<A>(row_count, padded_cols, p.head_dim, {b.q, b.d_stride, 1}, b.k_transposed, b.s_stride, b.acc_s,
              b.s_stride, false);

      // [4b] score_mod and mask
      const bool partial = score_mod_and_mask<A>(h, rows, cols, b.acc_s, b.s_stride, padded_cols, b.bias_row, nullptr,
                                                 traffic);
      const bool strict = partial && !v_finite;
      if (strict) note_visible(b.acc_s, b.s_stride, row_count, col_count, b.visible);

      // [4c] online softmax: O came back normalised, so its old row_sum is multiplied in again
      for (int64_t i = 0; i < row_count; ++i) {
        A* s = b.acc_s + i * b.s_stride;
        const A new_max = max_of(row_max[i], max_of_row(s, padded_cols));
        const A old_sum = row_sum[i] * rescale_of(row_max[i], new_max, scale_log2);
        exp_row(s, padded_cols, finite_max(new_max), scale_log2);
        row_sum[i] = old_sum + sum_of_row(s, padded_cols);
        row_max[i] = new_max;
        scale_row(b.acc_o + i * b.d_stride, b.d_stride, old_sum);
      }
      if (h.drops)
        for_each_dropout_row(h, rows, cols, b.dropout_strip, b.s_stride + 16, [&](int64_t i, const A* factors) {
          for (int64_t j = 0; j < col_count; ++j) b.acc_s[i * b.s_stride + j] *= factors[j];
        });

      // [4d] O += P V
      if (strict)
        visible_product(row_count, b.d_stride, col_count, b.acc_s, b.s_stride, b.visible, b.kv, b.d_stride, b.acc_o,
                        b.d_stride);
      else
        gemm<A>(row_count, b.d_stride, col_count, {b.acc_s, b.s_stride, 1}, b.kv, b.d_stride, b.acc_o, b.d_stride,
                true);

      // [5] normalise: after every key block (the paper's line 12)
      for (int64_t i = 0; i < row_count; ++i)
        scale_row(b.acc_o + i * b.d_stride, b.d_stride, inverse_of(row_sum[i]));

      // [6] write O, row_max and row_sum back
      store_tile(b.acc_o, b.d_stride, row_count, p.head_dim, o_slow + rows.begin * o_stride, o_stride, traffic);
      traffic.stored += 2 * row_count * kStat;
    }
  }

  // [7] write LSE; sinks join here, and a 16-bit output is rounded, once
  A* lse = stats_of<A>(p.lse, work.batch, h.seq.q_begin, work.head);
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const A row_lse = lse_of(b.max_slow[i], b.sum_slow[i], h.mod.natural());
    lse[i] = p.sinks == nullptr ? row_lse : join_sink(row_lse, static_cast<const A*>(p.sinks)[work.head]);
    if (p.sinks != nullptr && row_lse != neg_infinity<A>())
      scale_row(o_slow + i * o_stride, p.head_dim, exp2_of((row_lse - lse[i]) * static_cast<A>(kLog2e)));
    if constexpr (!kInPlace<T>) store_row(o_slow + i * o_stride, out + i * p.out.row_stride, p.head_dim);
  }
  traffic.loaded += 2 * seqlen_q * kStat;
  traffic.stored += seqlen_q * kStat;
  if (!kInPlace<T> || p.sinks != nullptr) {
    traffic.loaded += seqlen_q * p.head_dim * kStat;
    traffic.stored += seqlen_q * p.head_dim * static_cast<int64_t>(sizeof(T));
  }
}

template <class T>
Plan<FwdParams> plan(const FwdParams& p, int64_t fast_memory) {
  Plan<FwdParams> plan{};
  plan.tile = fwd_tile(Version::kFa1, p, sizeof(Accum<T>), fast_memory);
  plan.fast_memory_bytes = fwd_fast_bytes(plan.tile, p.head_dim, sizeof(Accum<T>));
  plan.grid = p.batch * p.heads;
  Arena measure{nullptr};
  Buffers<T>(measure, p, plan.tile);
  plan.phase_count = 1;
  plan.phases[0] = {plan.grid, static_cast<size_t>(measure.used), fa1_fwd_task<T>};
  return plan;
}

}  // namespace

Plan<FwdParams> fa1_fwd(const FwdParams& p, int64_t fast_memory) {
  return for_dtype(p.dtype, [&](auto element) { return plan<decltype(element)>(p, fast_memory); });
}

}  // namespace flash::cpu::FLASH_ISA
