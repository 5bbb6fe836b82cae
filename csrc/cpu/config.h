// Tiles of the CPU schedules: how large, and what their buffers take of fast memory (a core's L2 cache).
#pragma once
#include "../core/common.h"
#include "cpu.h"

namespace flash::cpu {

// Rows come in multiples of 48: whole register tiles (6 rows) and whole 16 x 16 dropout blocks. Keys in multiples of 64:
// whole column panels of every instruction set. Small budgets and short sequences may go down to 16.
constexpr int32_t kRowQuantum = 48, kKeyQuantum = 64, kSmallest = 16;

// Key rows of an fa2 tile and query rows of an fa1 tile. The other side takes what memory is left, because it is the one
// that decides the traffic: fa2 reads K and V once for each query tile, fa1 reads Q and O once for each key tile.
// Measured on Zen 5 (2 cores, AVX-512), B1 H8 S2048 D64: see benchmarks/notes.md.
constexpr int32_t kFa2BlockN = 256, kFa1BlockM = 96;
constexpr int32_t kBwdBlockM = 96;

// Widest vector of any instruction set, in elements: rows of buffers are padded to it.
inline int64_t padded(int64_t n, int64_t acc_size) { return round_up(n, 64 / acc_size); }

// Q and O tiles, one of K and V at a time as rows and K once more transposed, S, and the rows' statistics.
inline int64_t fwd_fast_bytes(Tile t, int64_t head_dim, int64_t acc) {
  const int64_t d = padded(head_dim, acc), n = padded(t.block_n, acc);
  return acc * (2 * t.block_m * d + n * d + head_dim * n + t.block_m * n + 2 * t.block_m);
}

// K, V as rows and transposed, dK, dV; Q, dO (and O or dQ) tiles; P, dS and the derivative of the score.
inline int64_t bwd_fast_bytes(Tile t, int64_t head_dim, int64_t acc) {
  const int64_t d = padded(head_dim, acc), n = padded(t.block_n, acc);
  return acc * (3 * n * d + 2 * head_dim * n + 3 * t.block_m * d + 3 * t.block_m * n + 2 * t.block_m);
}

// How far a side may grow, and in which steps. With a block-sparse pattern a tile is about one of its blocks, so that
// skipping is exact and time falls with the share of active blocks.
struct Side {
  int64_t limit;
  int32_t quantum;
  static Side of(int64_t seqlen, int64_t mask_block, int32_t quantum) {
    if (mask_block <= 0) return {seqlen, quantum};
    return {min_of(seqlen, max_of<int64_t>(round_up(mask_block, kSmallest), kKeyQuantum)), kSmallest};
  }
};

// The most rows of a side for which `bytes`, which grow evenly, stay within the budget, in whole quanta; below one
// quantum it is halved down to kSmallest.
template <class Bytes>
int32_t largest(Side side, int64_t budget, Bytes bytes) {
  const int64_t fixed = bytes(0), fitting = (budget - fixed) / (bytes(side.quantum) - fixed) * side.quantum;
  int64_t n = min_of(fitting, round_up(max_of<int64_t>(side.limit, 1), side.quantum));
  if (n <= 0)
    for (n = side.quantum; n > kSmallest && bytes(static_cast<int32_t>(n)) > budget;) n = max_of<int64_t>(n / 2, kSmallest);
  return static_cast<int32_t>(n);
}

// The other side: its usual size, halved while even its smallest partner would not fit.
template <class Bytes>
int32_t usual(Side side, int32_t size, int64_t budget, Bytes bytes_with_smallest_partner) {
  int64_t n = min_of<int64_t>(size, round_up(max_of<int64_t>(side.limit, 1), side.quantum));
  while (n > kSmallest && bytes_with_smallest_partner(static_cast<int32_t>(n)) > budget)
    n = max_of<int64_t>(round_up(n / 2, kSmallest), kSmallest);
  return static_cast<int32_t>(n);
}

inline Tile fwd_tile(Version version, const Problem& p, int64_t acc, int64_t budget) {
  const auto bytes = [&](int32_t m, int32_t n) { return fwd_fast_bytes({m, n}, p.head_dim, acc); };
  const Side q = Side::of(p.seqlen_q, p.block_mask_q, kRowQuantum), k = Side::of(p.seqlen_k, p.block_mask_k, kKeyQuantum);
  if (version == Version::kFa2) {
    const int32_t n = usual(k, kFa2BlockN, budget, [&](int32_t x) { return bytes(kSmallest, x); });
    return {largest(q, budget, [&](int32_t x) { return bytes(x, n); }), n};
  }
  const int32_t m = usual(q, kFa1BlockM, budget, [&](int32_t x) { return bytes(x, kSmallest); });
  return {m, largest(k, budget, [&](int32_t x) { return bytes(m, x); })};
}

// Both generations keep a key tile and stream query tiles past it in the backward pass.
inline Tile bwd_tile(const Problem& p, int64_t acc, int64_t budget) {
  const auto bytes = [&](int32_t m, int32_t n) { return bwd_fast_bytes({m, n}, p.head_dim, acc); };
  const Side q = Side::of(p.seqlen_q, p.block_mask_q, kRowQuantum), k = Side::of(p.seqlen_k, p.block_mask_k, kKeyQuantum);
  const int32_t m = usual(q, kBwdBlockM, budget, [&](int32_t x) { return bytes(x, kSmallest); });
  return {m, largest(k, budget, [&](int32_t x) { return bytes(m, x); })};
}

}  // namespace flash::cpu
