// FlashAttention-2 forward (Dao 2023, Algorithm 1) on the CPU: a task owns one query tile, keys stream past it.
// O stays in fast memory until it is done, and is divided by row_sum once, at the end.
#include "config.h"
#include "isa.h"
#include "tile.h"

namespace flash::cpu::FLASH_ISA {
namespace {

// [2] shared memory plan: what a task keeps in fast memory.
template <class A>
struct Buffers {
  A *q, *kv, *k_transposed, *acc_s, *acc_o, *row_max, *row_sum, *bias_row, *dropout_strip;
  uint8_t* visible;
  int64_t d_stride, s_stride;

  Buffers(Arena& arena, const FwdParams& p, Tile tile) : d_stride(pad<A>(p.head_dim)), s_stride(pad<A>(tile.block_n)) {
    q = arena.take<A>(tile.block_m * d_stride);
    kv = arena.take<A>(tile.block_n * d_stride);
    k_transposed = arena.take<A>(p.head_dim * s_stride);
    acc_s = arena.take<A>(tile.block_m * s_stride);
    acc_o = arena.take<A>(tile.block_m * d_stride);
    row_max = arena.take<A>(tile.block_m);
    row_sum = arena.take<A>(tile.block_m);
    bias_row = arena.take<A>(s_stride);
    dropout_strip = arena.take<A>(p.dropout_seed == nullptr ? 0 : 16 * (s_stride + 16));
    visible = arena.take<uint8_t>(tile.block_m * s_stride);
  }
};

template <class T>
void fa2_fwd_task(const FwdParams& p, Tile tile, int64_t task, void* scratch, Traffic& traffic) {
  using A = Accum<T>;
  // [1] which tile is mine
  const TileScheduler scheduler{p.heads, ceil_div(p.seqlen_q, tile.block_m), p.causal != Causal::kOff};
  const Work work = scheduler.work_of(task);
  const int64_t head_kv = work.head / (p.heads / p.heads_kv);
  const Head<A> h = Head<A>::of(p, work.batch, work.head);
  const Range rows = elements_of(work.block, tile.block_m, h.seq.seqlen_q);
  if (rows.empty()) return;  // a packed sequence shorter than the longest
  const int64_t row_count = rows.end - rows.begin;
  const T* q = rows_of<const T>(p.q, work.batch, h.seq.q_begin + rows.begin, work.head);
  const T* k = rows_of<const T>(p.k, work.batch, h.seq.k_begin, head_kv);
  const T* v = rows_of<const T>(p.v, work.batch, h.seq.k_begin, head_kv);

  Arena arena{static_cast<char*>(scratch)};
  const Buffers<A> b(arena, p, tile);
  const A scale_log2 = h.mod.scale_log2();
  for (int64_t i = 0; i < row_count; ++i) b.row_max[i] = neg_infinity<A>(), b.row_sum[i] = 0;
  for (int64_t x = 0; x < row_count * b.d_stride; ++x) b.acc_o[x] = 0;

  bool q_loaded = false;
  const Range blocks = blocks_of(h.band.keys_of(rows.begin, rows.end), tile.block_n);
  for (int64_t n_block = blocks.begin; n_block < blocks.end; ++n_block) {  // [4] for each key block
    const Range cols = elements_of(n_block, tile.block_n, h.seq.seqlen_k);
    if (!h.blocks.any(rows, cols)) continue;
    const int64_t col_count = cols.end - cols.begin, padded_cols = pad<A>(col_count);

    // [3] load Q: once, and only if a key block is visited at all
    if (!q_loaded) load_tile(q, p.q.row_stride, row_count, p.head_dim, b.q, b.d_stride, traffic);
    q_loaded = true;

    // [4a] S = Q K^T
    load_tile(k + cols.begin * p.k.row_stride, p.k.row_stride, col_count, p.head_dim, b.kv, b.d_stride, traffic);
    transpose_tile(b.kv, b.d_stride, col_count, p.head_dim, b.k_transposed, b.s_stride);
    gemm<A>(row_count, padded_cols, p.head_dim, {b.q, b.d_stride, 1}, b.k_transposed, b.s_stride, b.acc_s, b.s_stride,
            false);

    // [4b] score_mod and mask
    const bool partial = score_mod_and_mask<A>(h, rows, cols, b.acc_s, b.s_stride, padded_cols, b.bias_row, nullptr,
                                               traffic);
    const bool v_finite =
        load_tile(v + cols.begin * p.v.row_stride, p.v.row_stride, col_count, p.head_dim, b.kv, b.d_stride, traffic);
    const bool strict = partial && !v_finite;
    if (strict) note_visible(b.acc_s, b.s_stride, row_count, col_count, b.visible);

    // [4c] online softmax: what was summed under the old maximum is rescaled only where the maximum grew
    for (int64_t i = 0; i < row_count; ++i) {
      A* s = b.acc_s + i * b.s_stride;
      const A new_max = max_of(b.row_max[i], max_of_row(s, padded_cols));
      const A rescale = rescale_of(b.row_max[i], new_max, scale_log2);
      exp_row(s, padded_cols, finite_max(new_max), scale_log2);
      b.row_sum[i] = b.row_sum[i] * rescale + sum_of_row(s, padded_cols);
      b.row_max[i] = new_max;
      if (rescale != A(1)) scale_row(b.acc_o + i * b.d_stride, b.d_stride, rescale);
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
      gemm<A>(row_count, b.d_stride, col_count, {b.acc_s, b.s_stride, 1}, b.kv, b.d_stride, b.acc_o, b.d_stride, true);
  }

  // [5] normalise, and let the sink join the sum
  A* lse = stats_of<A>(p.lse, work.batch, h.seq.q_begin + rows.begin, work.head);
  for (int64_t i = 0; i < row_count; ++i) {
    const A row_lse = lse_of(b.row_max[i], b.row_sum[i], h.mod.natural());
    A factor = inverse_of(b.row_sum[i]);
    b.row_max[i] = row_lse;
    if (p.sinks != nullptr && row_lse != neg_infinity<A>()) {
      b.row_max[i] = join_sink(row_lse, static_cast<const A*>(p.sinks)[work.head]);
      factor *= exp2_of((row_lse - b.row_max[i]) * static_cast<A>(kLog2e));
    }
    scale_row(b.acc_o + i * b.d_stride, b.d_stride, factor);
  }

  // [6] write O
  T* out = rows_of<T>(p.out, work.batch, h.seq.q_begin + rows.begin, work.head);
  store_tile(b.acc_o, b.d_stride, row_count, p.head_dim, out, p.out.row_stride, traffic);

  // [7] write LSE
  for (int64_t i = 0; i < row_count; ++i) lse[i] = b.row_max[i];
  traffic.stored += row_count * static_cast<int64_t>(sizeof(A));
}

template <class T>
Plan<FwdParams> plan(const FwdParams& p, int64_t fast_memory) {
  using A = Accum<T>;
  Plan<FwdParams> plan{};
  plan.tile = fwd_tile(Version::kFa2, p, sizeof(A), fast_memory);
  plan.fast_memory_bytes = fwd_fast_bytes(plan.tile, p.head_dim, sizeof(A));
  plan.grid = p.batch * p.heads * ceil_div(p.seqlen_q, plan.tile.block_m);
  Arena measure{nullptr};
  Buffers<A>(measure, p, plan.tile);
  plan.phase_count = 1;
  plan.phases[0] = {plan.grid, static_cast<size_t>(measure.used), fa2_fwd_task<T>};
  return plan;
}

}  // namespace

Plan<FwdParams> fa2_fwd(const FwdParams& p, int64_t fast_memory) {
  return for_dtype(p.dtype, [&](auto element) { return plan<decltype(element)>(p, fast_memory); });
}

}  // namespace flash::cpu::FLASH_ISA
