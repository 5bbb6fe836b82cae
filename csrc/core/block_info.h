// Where a sequence lies, and which tiles of its score matrix hold a visible element (rules 3 and 4).
#pragma once
#include "common.h"

namespace flash {

// One sequence of the batch: where its rows start in packed tensors (0 in padded ones) and how long it is.
struct SeqInfo {
  int64_t q_begin, k_begin;
  int64_t seqlen_q, seqlen_k;

  FLASH_HD static SeqInfo of(const Problem& p, int64_t batch) {
    if (p.cu_seqlens_q == nullptr) return {0, 0, p.seqlen_q, p.seqlen_k};
    const int64_t q = p.cu_seqlens_q[batch], k = p.cu_seqlens_k[batch];
    return {q, k, p.cu_seqlens_q[batch + 1] - q, p.cu_seqlens_k[batch + 1] - k};
  }
};

// Half-open: [begin, end), empty when end <= begin.
struct Range {
  int64_t begin, end;
  FLASH_HD bool contains(int64_t x) const { return begin <= x && x < end; }
  FLASH_HD bool empty() const { return end <= begin; }
};

// The band of visible elements: query i sees key j when i + diagonal - left <= j <= i + diagonal + right.
// Causal masks are bands with right = 0; a side without a limit is wider than any sequence.
struct Band {
  int64_t diagonal, left, right;
  int64_t seqlen_q, seqlen_k;

  FLASH_HD static Band of(const Problem& p, const SeqInfo& seq) {
    constexpr int64_t kWide = int64_t{1} << 60;
    Band b;
    b.diagonal = p.causal == Causal::kTopLeft ? 0 : seq.seqlen_k - seq.seqlen_q;
    b.left = p.window_left == kUnbounded ? kWide : min_of(p.window_left, kWide);
    b.right = p.window_right == kUnbounded ? kWide : min_of(p.window_right, kWide);
    if (p.causal != Causal::kOff) b.right = 0;
    b.seqlen_q = seq.seqlen_q;
    b.seqlen_k = seq.seqlen_k;
    return b;
  }

  // Keys that at least one row of [row_begin, row_end) sees; the keys of a single row are exactly this range.
  FLASH_HD Range keys_of(int64_t row_begin, int64_t row_end) const {
    if (row_end <= row_begin) return {0, 0};
    return {max_of<int64_t>(0, row_begin + diagonal - left), min_of(seqlen_k, row_end + diagonal + right)};
  }
  // Queries that see at least one key of [col_begin, col_end).
  FLASH_HD Range queries_of(int64_t col_begin, int64_t col_end) const {
    if (col_end <= col_begin) return {0, 0};
    return {max_of<int64_t>(0, col_begin - diagonal - right), min_of(seqlen_q, col_end - diagonal + left)};
  }
  // Does every row of the tile see every key of it? Then no element needs to be compared.
  FLASH_HD bool covers(Range rows, Range cols) const {
    return cols.begin >= rows.end - 1 + diagonal - left && cols.end - 1 <= rows.begin + diagonal + right;
  }
};

// The band in 32 bits, for kernels, whose registers are few: row i sees keys i + low to i + high, as far as there are
// keys. Rows count from the beginning of the sequence, or of a tile.
struct TileBand {
  static constexpr int64_t kLongest = int64_t{1} << 29;  // no sequence is longer: sums of four stay in 32 bits
  int32_t low, high, seqlen_k;

  FLASH_HD static TileBand of(const Band& b) {
    const auto near = [](int64_t x) { return static_cast<int32_t>(max_of(-kLongest, min_of(x, kLongest))); };
    return {near(b.diagonal - b.left), near(b.diagonal + b.right), static_cast<int32_t>(b.seqlen_k)};
  }
  FLASH_HD TileBand from_row(int32_t row) const { return {low + row, high + row, seqlen_k}; }

  // The keys that one row sees, so that an element costs one subtraction and one comparison.
  struct Keys {
    int32_t first;
    uint32_t more;  // behind the first
    FLASH_HD bool contain(int32_t key) const { return static_cast<uint32_t>(key - first) <= more; }
  };
  FLASH_HD Keys keys_of(int32_t row) const {
    const int32_t first = max_of(row + low, 0), last = min_of(row + high, seqlen_k - 1);
    return last < first ? Keys{INT32_MAX, 0} : Keys{first, static_cast<uint32_t>(last - first)};
  }
  FLASH_HD bool sees(int32_t row, int32_t key) const {
    return key >= row + low && key <= row + high && key < seqlen_k;
  }
  // Does every one of `rows` rows see every key from col to col + cols - 1?
  FLASH_HD bool covers(int32_t rows, int32_t col, int32_t cols) const {
    return col >= rows - 1 + low && col + cols - 1 <= high && col + cols <= seqlen_k;
  }
};

// The tiles that a range of elements touches.
FLASH_HD Range blocks_of(Range elements, int64_t block) {
  if (elements.empty()) return {0, 0};
  return {elements.begin / block, ceil_div(elements.end, block)};
}

// The elements of a tile, cut off at the end of the sequence.
FLASH_HD Range elements_of(int64_t index, int64_t block, int64_t length) {
  return {index * block, min_of((index + 1) * block, length)};
}

}  // namespace flash
