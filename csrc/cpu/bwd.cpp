// Backward on the CPU. In both generations a task owns key tiles, which keep dK and dV in fast memory, and streams query
// tiles past them; dQ is revisited in slow memory. They differ in what the query tiles bring along:
//   fa1 (FlashAttention, Algorithm 4): O, from which delta is worked out at every visit; one task per (batch, kv head).
//   fa2 (FlashAttention-2, Algorithm 2): delta, prepared once; the key tiles of a head may be split among tasks.
#include "bwd_tile.h"
#include "isa.h"

namespace flash::cpu::FLASH_ISA {

void bwd_bias_phase(Version version, const BwdParams& p, Tile tile, Phase<BwdParams>& phase);  // bwd_bias.cpp

namespace {

constexpr int64_t kMaxSplits = 4;  // bounds the workspace

int64_t total_rows(const Problem& p) {
  return p.cu_seqlens_q == nullptr ? p.batch * p.seqlen_q : p.cu_seqlens_q[p.batch];
}

// Where the dQ of one (split, batch, head) is summed: in dq itself, or in the accumulator when that would round the sum
// (16-bit types) or several tasks add to it. Sequences of a packed batch share the accumulator's rows.
template <class T>
struct DqSum {
  Accum<T>* rows;
  int64_t stride;

  static DqSum of(const BwdParams& p, int64_t split, int64_t batch, int64_t head, const SeqInfo& seq) {
    if constexpr (std::is_same_v<T, Accum<T>>)
      if (p.dq_accum == nullptr) return {rows_of<T>(p.dq, batch, seq.q_begin, head), p.dq.row_stride};
    const int64_t first = p.cu_seqlens_q == nullptr ? batch * p.seqlen_q : seq.q_begin;
    return {static_cast<Accum<T>*>(p.dq_accum) + ((split * p.heads + head) * total_rows(p) + first) * p.head_dim,
            p.head_dim};
  }
};

// Before the key tiles: delta (fa2), and dQ = 0.
template <class T, Version kVersion>
void prepare_task(const BwdParams& p, Tile tile, int64_t task, void*, Traffic& traffic) {
  using A = Accum<T>;
  constexpr int64_t kStat = sizeof(A);
  const Work work = TileScheduler{p.heads, 1, false}.work_of(task);
  const SeqInfo seq = SeqInfo::of(p, work.batch);
  if constexpr (kVersion == Version::kFa2) {
    const T* out = rows_of<const T>(p.out, work.batch, seq.q_begin, work.head);
    const T* dout = rows_of<const T>(p.dout, work.batch, seq.q_begin, work.head);
    const A* dlse = stats_of<const A>(p.dlse, work.batch, seq.q_begin, work.head);
    A* delta = stats_of<A>(p.delta, work.batch, seq.q_begin, work.head);
    for (int64_t i = 0; i < seq.seqlen_q; ++i)
      delta[i] = delta_of_row(out + i * p.out.row_stride, dout + i * p.dout.row_stride, p.head_dim,
                              dlse == nullptr ? A(0) : dlse[i]);
    traffic.loaded += seq.seqlen_q * (2 * p.head_dim * int64_t{sizeof(T)} + (dlse == nullptr ? 0 : kStat));
    traffic.stored += seq.seqlen_q * kStat;
  }
  if (p.dq.ptr == nullptr) return;
  for (int64_t split = 0; split < tile.splits; ++split) {
    const DqSum<T> dq = DqSum<T>::of(p, split, work.batch, work.head, seq);
    for (int64_t i = 0; i < seq.seqlen_q; ++i)
      for (int64_t d = 0; d < p.head_dim; ++d) dq.rows[i * dq.stride + d] = 0;
    traffic.stored += seq.seqlen_q * p.head_dim * kStat;
  }
}

template <class T, Version kVersion>
void key_tiles_task(const BwdParams& p, Tile tile, int64_t task, void* scratch, Traffic& traffic) {
  using A = Accum<T>;
  // [1] which tile is mine: every tile.splits-th key tile of one (batch, kv head), so that causal work is shared evenly
  const Work work = TileScheduler{p.heads_kv, tile.splits, false}.work_of(task);
  const int64_t batch = work.batch, head_kv = work.head, group = p.heads / p.heads_kv;
  const SeqInfo seq = SeqInfo::of(p, batch);
  const bool wants_dq = p.dq.ptr != nullptr, wants_dkv = p.dk.ptr != nullptr;

  // [2] shared memory plan
  Arena arena{static_cast<char*>(scratch)};
  BwdBuffers<T> b(arena, p, tile);

  // [3] for each key block
  for (int64_t n_block = work.block; n_block < ceil_div(seq.seqlen_k, tile.block_n); n_block += tile.splits) {
    const Range cols = elements_of(n_block, tile.block_n, seq.seqlen_k);
    const int64_t col_count = cols.end - cols.begin;
    bool loaded = false;
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      const Head<A> h = Head<A>::of(p, batch, head);
      const Range blocks = blocks_of(h.band.queries_of(cols.begin, cols.end), tile.block_m);
      for (int64_t m_block = blocks.begin; m_block < blocks.end; ++m_block) {
        const Range rows = elements_of(m_block, tile.block_m, seq.seqlen_q);
        if (!h.blocks.any(rows, cols)) continue;
        const int64_t row_count = rows.end - rows.begin;
        if (!loaded) {
          b.load_keys(p, batch, head_kv, seq, cols, traffic);
          for (int64_t x = 0; x < col_count * b.d_stride; ++x) b.dk[x] = 0, b.dv[x] = 0;
          loaded = true;
        }

        // [4] recompute P and dS for each query block
        b.load_queries(kVersion, p, batch, head, seq, rows, traffic);
        const bool strict = b.score_tile(p, h, rows, cols, true, traffic);

        // [5] dV += P^T dO and dK += dS^T Q
        if (wants_dkv) {
          gemm<A>(col_count, b.d_stride, row_count, {b.acc_p, 1, b.s_stride}, b.dout, b.d_stride, b.dv, b.d_stride,
                  true);
          gemm<A>(col_count, b.d_stride, row_count, {b.acc_ds, 1, b.s_stride}, b.q, b.d_stride, b.dk, b.d_stride, true);
        }

        // [6] dQ += dS K, in slow memory
        if (wants_dq) {
          const DqSum<T> sum = DqSum<T>::of(p, work.block, batch, head, seq);
          A* dq = sum.rows + rows.begin * sum.stride;
          load_tile(dq, sum.stride, row_count, p.head_dim, b.dq, b.d_stride, traffic);
          if (strict)
            visible_product(row_count, b.d_stride, col_count, b.acc_ds, b.s_stride, b.visible, b.k, b.d_stride, b.dq,
                            b.d_stride);
          else
            gemm<A>(row_count, b.d_stride, col_count, {b.acc_ds, b.s_stride, 1}, b.k, b.d_stride, b.dq, b.d_stride,
                    true);
          store_tile(b.dq, b.d_stride, row_count, p.head_dim, dq, sum.stride, traffic);
        }
      }
    }

    // [7] write dK and dV, summed over the query heads of the group
    if (!wants_dkv) continue;
    if (!loaded)
      for (int64_t x = 0; x < col_count * b.d_stride; ++x) b.dk[x] = 0, b.dv[x] = 0;
    const int64_t first = seq.k_begin + cols.begin;
    store_tile(b.dk, b.d_stride, col_count, p.head_dim, rows_of<T>(p.dk, batch, first, head_kv), p.dk.row_stride,
               traffic);
    store_tile(b.dv, b.d_stride, col_count, p.head_dim, rows_of<T>(p.dv, batch, first, head_kv), p.dv.row_stride,
               traffic);
  }
}

// After the key tiles: the accumulators become dQ, added in a fixed order.
template <class T>
void finish_dq_task(const BwdParams& p, Tile tile, int64_t task, void* scratch, Traffic& traffic) {
  using A = Accum<T>;
  const Work work = TileScheduler{p.heads, 1, false}.work_of(task);
  const SeqInfo seq = SeqInfo::of(p, work.batch);
  T* dq = rows_of<T>(p.dq, work.batch, seq.q_begin, work.head);
  A* sum = static_cast<A*>(scratch);
  for (int64_t i = 0; i < seq.seqlen_q; ++i) {
    for (int64_t d = 0; d < p.head_dim; ++d) sum[d] = 0;
    for (int64_t split = 0; split < tile.splits; ++split) {
      const DqSum<T> part = DqSum<T>::of(p, split, work.batch, work.head, seq);
      for (int64_t d = 0; d < p.head_dim; ++d) sum[d] += part.rows[i * part.stride + d];
    }
    store_row(sum, dq + i * p.dq.row_stride, p.head_dim);
  }
  traffic.loaded += tile.splits * seq.seqlen_q * p.head_dim * int64_t{sizeof(A)};
  traffic.stored += seq.seqlen_q * p.head_dim * int64_t{sizeof(T)};
}

// d(sink_h) = - sum over rows of exp(sink - lse) delta: the sink's share of the row, whose value is zero.
template <class T, Version kVersion>
void sinks_task(const BwdParams& p, Tile, int64_t head, void*, Traffic& traffic) {
  using A = Accum<T>;
  const double sink = static_cast<double>(static_cast<const A*>(p.sinks)[head]);
  double sum = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const SeqInfo seq = SeqInfo::of(p, batch);
    const T* out = rows_of<const T>(p.out, batch, seq.q_begin, head);
    const T* dout = rows_of<const T>(p.dout, batch, seq.q_begin, head);
    const A* lse = stats_of<const A>(p.lse, batch, seq.q_begin, head);
    const A* dlse = stats_of<const A>(p.dlse, batch, seq.q_begin, head);
    const A* delta = stats_of<const A>(p.delta, batch, seq.q_begin, head);
    for (int64_t i = 0; i < seq.seqlen_q; ++i) {
      if (lse[i] == neg_infinity<A>()) continue;
      const A row_delta = kVersion == Version::kFa2
                              ? delta[i]
                              : delta_of_row(out + i * p.out.row_stride, dout + i * p.dout.row_stride, p.head_dim,
                                             dlse == nullptr ? A(0) : dlse[i]);
      sum -= std::exp(sink - static_cast<double>(lse[i])) * static_cast<double>(row_delta);
    }
    const int64_t per_row = kVersion == Version::kFa2
                                ? 2 * int64_t{sizeof(A)}
                                : 2 * p.head_dim * int64_t{sizeof(T)} + (dlse == nullptr ? 1 : 2) * int64_t{sizeof(A)};
    traffic.loaded += seq.seqlen_q * per_row;
  }
  static_cast<A*>(p.dsinks)[head] = static_cast<A>(sum);
  traffic.stored += int64_t{sizeof(A)};
}

template <class T, Version kVersion>
Plan<BwdParams> plan_of(const BwdParams& p, int64_t fast_memory, int threads) {
  using A = Accum<T>;
  Plan<BwdParams> plan{};
  const bool wants_dq = p.dq.ptr != nullptr;
  plan.tile = bwd_tile(p, sizeof(A), fast_memory);
  plan.fast_memory_bytes = bwd_fast_bytes(plan.tile, p.head_dim, sizeof(A));
  if (kVersion == Version::kFa2) {
    const int64_t heads = max_of<int64_t>(p.batch * p.heads_kv, 1), blocks = ceil_div(p.seqlen_k, plan.tile.block_n);
    plan.tile.splits = static_cast<int32_t>(
        max_of<int64_t>(1, min_of(min_of(ceil_div(threads, heads), blocks), kMaxSplits)));
  }
  plan.grid = p.batch * p.heads_kv * plan.tile.splits;
  if (wants_dq && (!std::is_same_v<T, A> || plan.tile.splits > 1)) {
    plan.dq_accum_bytes = static_cast<size_t>(plan.tile.splits * p.heads * total_rows(p) * p.head_dim) * sizeof(A);
  }
  Arena measure{nullptr};
  BwdBuffers<T>(measure, p, plan.tile);
  const auto add = [&plan](Phase<BwdParams> phase) { plan.phases[plan.phase_count++] = phase; };
  add({p.batch * p.heads, 0, prepare_task<T, kVersion>});
  if (wants_dq || p.dk.ptr != nullptr)
    add({plan.grid, static_cast<size_t>(measure.used), key_tiles_task<T, kVersion>});
  if (plan.dq_accum_bytes > 0)
    add({p.batch * p.heads, static_cast<size_t>(p.head_dim) * sizeof(A), finish_dq_task<T>});
  if (p.dbias != nullptr) bwd_bias_phase(kVersion, p, plan.tile, plan.phases[plan.phase_count++]);
  if (p.dsinks != nullptr) add({p.heads, 0, sinks_task<T, kVersion>});
  return plan;
}

}  // namespace

Plan<BwdParams> bwd(Version version, const BwdParams& p, int64_t fast_memory, int threads) {
  return for_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    return version == Version::kFa1 ? plan_of<T, Version::kFa1>(p, fast_memory, threads)
                                    : plan_of<T, Version::kFa2>(p, fast_memory, threads);
  });
}

void preprocess(const BwdParams& p, int64_t bh) {
  BwdParams only_delta = p;
  only_delta.dq.ptr = nullptr;
  Traffic unused;
  for_dtype(p.dtype, [&](auto element) {
    prepare_task<decltype(element), Version::kFa2>(only_delta, Tile{}, bh, nullptr, unused);
  });
}

}  // namespace flash::cpu::FLASH_ISA
