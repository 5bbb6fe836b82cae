// The score tile of the backward pass, recomputed: P from Q, K and LSE, dS from P, dO, V and delta
// (FlashAttention, Algorithm 4; FlashAttention-2, Algorithm 2).
#pragma once
#include "config.h"
#include "tile.h"

namespace flash::cpu::FLASH_ISA {

// delta_i = sum_d dO_id O_id - dLSE_i: what every dP of row i is compared with.
template <class T, class A = Accum<T>>
A delta_of_row(const T* out, const T* dout, int64_t head_dim, A dlse) {
  Vec<A> lanes = {};
  int64_t d = 0;
  for (; d + kLanes<A> <= head_dim; d += kLanes<A>) lanes += load_as_accum(out + d) * load_as_accum(dout + d);
  A sum = sum_of(lanes);
  for (; d < head_dim; ++d) sum += to_accum(out[d]) * to_accum(dout[d]);
  return sum - dlse;
}

template <class T, class A = Accum<T>>
struct BwdBuffers {
  A *k, *k_transposed, *v_transposed, *dk, *dv;    // the key tile
  A *q, *dout, *dq, *lse, *delta;                  // the query tile
  A *acc_p, *acc_ds, *derivative;                  // the score tile
  A *bias_row, *dropout_strip;
  uint8_t* visible;
  int64_t d_stride, s_stride;
  bool k_finite = true;

  BwdBuffers(Arena& arena, const BwdParams& p, Tile tile)
      : d_stride(pad<A>(p.head_dim)), s_stride(pad<A>(tile.block_n)) {
    k = arena.take<A>(tile.block_n * d_stride);
    dk = arena.take<A>(tile.block_n * d_stride);
    dv = arena.take<A>(tile.block_n * d_stride);
    k_transposed = arena.take<A>(p.head_dim * s_stride);
    v_transposed = arena.take<A>(p.head_dim * s_stride);
    q = arena.take<A>(tile.block_m * d_stride);
    dout = arena.take<A>(tile.block_m * d_stride);
    dq = arena.take<A>(tile.block_m * d_stride);
    lse = arena.take<A>(tile.block_m);
    delta = arena.take<A>(tile.block_m);
    acc_p = arena.take<A>(tile.block_m * s_stride);
    acc_ds = arena.take<A>(tile.block_m * s_stride);
    derivative = arena.take<A>(p.softcap == 0 ? 0 : tile.block_m * s_stride);
    bias_row = arena.take<A>(s_stride);
    dropout_strip = arena.take<A>(p.dropout_seed == nullptr ? 0 : 16 * (s_stride + 16));
    visible = arena.take<uint8_t>(tile.block_m * s_stride);
  }

  // K stays as rows (for dQ += dS K) and transposed; V is needed transposed only and passes through dv's place.
  void load_keys(const BwdParams& p, int64_t batch, int64_t head_kv, const SeqInfo& seq, Range cols, Traffic& traffic) {
    const int64_t count = cols.end - cols.begin, first = seq.k_begin + cols.begin;
    k_finite = load_tile(rows_of<const T>(p.k, batch, first, head_kv), p.k.row_stride, count, p.head_dim, k, d_stride,
                         traffic);
    transpose_tile(k, d_stride, count, p.head_dim, k_transposed, s_stride);
    load_tile(rows_of<const T>(p.v, batch, first, head_kv), p.v.row_stride, count, p.head_dim, dv, d_stride, traffic);
    transpose_tile(dv, d_stride, count, p.head_dim, v_transposed, s_stride);
  }

  // fa2 reads delta, which the preprocess left; fa1 reads O and works it out for every tile anew.
  void load_queries(Version version, const BwdParams& p, int64_t batch, int64_t head, const SeqInfo& seq, Range rows,
                    Traffic& traffic) {
    const int64_t count = rows.end - rows.begin, first = seq.q_begin + rows.begin;
    load_tile(rows_of<const T>(p.q, batch, first, head), p.q.row_stride, count, p.head_dim, q, d_stride, traffic);
    const T* dout_rows = rows_of<const T>(p.dout, batch, first, head);
    load_tile(dout_rows, p.dout.row_stride, count, p.head_dim, dout, d_stride, traffic);
    const A* lse_rows = stats_of<const A>(p.lse, batch, first, head);
    for (int64_t i = 0; i < count; ++i) lse[i] = finite_max(lse_rows[i]);
    traffic.loaded += count * static_cast<int64_t>(sizeof(A));
    if (version == Version::kFa2) {
      const A* delta_rows = stats_of<const A>(p.delta, batch, first, head);
      for (int64_t i = 0; i < count; ++i) delta[i] = delta_rows[i];
      traffic.loaded += count * static_cast<int64_t>(sizeof(A));
    } else {
      const T* out_rows = rows_of<const T>(p.out, batch, first, head);
      const A* dlse_rows = stats_of<const A>(p.dlse, batch, first, head);
      for (int64_t i = 0; i < count; ++i)
        delta[i] = delta_of_row(out_rows + i * p.out.row_stride, dout_rows + i * p.dout.row_stride, p.head_dim,
                                dlse_rows == nullptr ? A(0) : dlse_rows[i]);
      traffic.loaded += count * (p.head_dim * static_cast<int64_t>(sizeof(T)) +
                                 (dlse_rows == nullptr ? 0 : static_cast<int64_t>(sizeof(A))));
    }
  }

  // acc_p = P (times the dropout factors), acc_ds = dS with respect to the score, or to the product q.k when
  // `to_product`. True when masked elements meet an inf or NaN of K, so that products with acc_ds must step over them.
  bool score_tile(const BwdParams& p, const Head<A>& h, Range rows, Range cols, bool to_product, Traffic& traffic) {
    const int64_t row_count = rows.end - rows.begin, col_count = cols.end - cols.begin, padded = pad<A>(col_count);
    gemm<A>(row_count, padded, p.head_dim, {q, d_stride, 1}, k_transposed, s_stride, acc_p, s_stride, false);
    const bool capped = to_product && p.softcap != 0;
    const bool partial = score_mod_and_mask<A>(h, rows, cols, acc_p, s_stride, padded, bias_row,
                                               capped ? derivative : nullptr, traffic);
    const bool strict = partial && !k_finite;
    if (strict) note_visible(acc_p, s_stride, row_count, col_count, visible);
    gemm<A>(row_count, padded, p.head_dim, {dout, d_stride, 1}, v_transposed, s_stride, acc_ds, s_stride, false);

    const A natural = h.mod.natural(), scale = to_product && !capped ? h.mod.scale : A(1);
    for (int64_t i = 0; i < row_count; ++i) {
      A* prob = acc_p + i * s_stride;
      for (int64_t j = 0; j < padded; ++j) {
        // P is at most 1. Where scores are so large that rounding LSE moves it by more than log(row_sum), this bounds P.
        const A above = prob[j] * natural - lse[i];
        const A e = exp2_of((above > A(0) ? A(0) : above) * static_cast<A>(kLog2e));
        prob[j] = prob[j] == neg_infinity<A>() ? A(0) : e;  // also where lse is NaN, from a key that the row does see
      }
    }
    // dS = P (dP - delta) times the derivative of the score; masked elements are 0 even if dP is inf or NaN there.
    const auto finish_row = [&](int64_t i, const A* dropout_factors) {
      A *prob = acc_p + i * s_stride, *ds = acc_ds + i * s_stride;
      const A *d_score = derivative + i * s_stride, row_delta = delta[i];
      if (dropout_factors != nullptr)
        for (int64_t j = 0; j < col_count; ++j) ds[j] *= dropout_factors[j];
      for (int64_t j = 0; j < col_count; ++j) {
        const A d = prob[j] * (ds[j] - row_delta) * scale;
        ds[j] = prob[j] == A(0) ? A(0) : d;
      }
      if (capped)  // the derivative has the scale in it
        for (int64_t j = 0; j < col_count; ++j) ds[j] = prob[j] == A(0) ? A(0) : ds[j] * d_score[j];
      if (dropout_factors != nullptr)
        for (int64_t j = 0; j < col_count; ++j) prob[j] *= dropout_factors[j];
    };
    if (h.drops)
      for_each_dropout_row(h, rows, cols, dropout_strip, s_stride + 16, finish_row);
    else
      for (int64_t i = 0; i < row_count; ++i) finish_row(i, nullptr);
    return strict;
  }
};

}  // namespace flash::cpu::FLASH_ISA
