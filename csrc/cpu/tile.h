// Tiles of one head: moving them between slow and fast memory, and the steps on a score tile that every schedule shares.
#pragma once
#include "../core/block_info.h"
#include "../core/mask.h"
#include "../core/philox.h"
#include "../core/score_mod.h"
#include "../core/softmax.h"
#include "../core/tile_scheduler.h"
#include "cpu.h"
#include "gemm.h"

namespace flash::cpu::FLASH_ISA {

// Hands out pieces of the caller's scratch memory, each aligned to a cache line. With a null base it only measures.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class X>
  X* take(int64_t count) {
    X* p = reinterpret_cast<X*>(base + used);
    used += round_up(count * static_cast<int64_t>(sizeof(X)), 64);
    return p;
  }
};

template <class A>
FLASH_HD int64_t pad(int64_t n) { return round_up(n, 64 / static_cast<int64_t>(sizeof(A))); }

// First row of a head's sequence in a (batch, seqlen, heads, head_dim) tensor.
template <class T>
FLASH_HD T* rows_of(const TensorView& t, int64_t batch, int64_t first_row, int64_t head) {
  return static_cast<T*>(t.ptr) + batch * t.batch_stride + first_row * t.row_stride + head * t.head_stride;
}
template <class A>
FLASH_HD A* stats_of(const RowView& r, int64_t batch, int64_t first_row, int64_t head) {
  return r.ptr == nullptr ? nullptr
                          : static_cast<A*>(r.ptr) + batch * r.batch_stride + head * r.head_stride + first_row;
}

// What the score tiles of one (batch, head) have in common.
template <class A>
struct Head {
  SeqInfo seq;
  Band band;
  BlockMask blocks;
  ScoreMod<A> mod;
  Dropout dropout;
  bool drops;
  uint32_t batch_head;
  const char* bias;  // null: none
  DType bias_dtype;
  int64_t bias_row_stride, bias_col_stride;

  static Head of(const Problem& p, int64_t batch, int64_t head) {
    Head h;
    h.seq = SeqInfo::of(p, batch);
    h.band = Band::of(p, h.seq);
    h.blocks = BlockMask::of(p, batch, head);
    h.mod = ScoreMod<A>::of(p, h.band, batch, head);
    h.drops = p.dropout_seed != nullptr && p.dropout_p > 0;
    h.dropout = h.drops ? Dropout::of(p.dropout_seed, p.dropout_p) : Dropout{0, 0, 0};
    h.batch_head = static_cast<uint32_t>(batch * p.heads + head);
    h.bias_dtype = p.bias_dtype;
    h.bias_row_stride = p.bias_stride[2];
    h.bias_col_stride = p.bias_stride[3];
    h.bias = static_cast<const char*>(p.bias);
    if (h.bias != nullptr)
      h.bias += (batch * p.bias_stride[0] + head * p.bias_stride[1]) * size_of(p.bias_dtype);
    return h;
  }

  static int64_t size_of(DType t) {
    return t == DType::kBool ? 1 : t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2;
  }

  // Is there a visible element in the tile, as far as the shape of the mask tells? (Values of a bias do not count.)
  bool visits(Range rows, Range cols) const {
    const Range keys = band.keys_of(rows.begin, rows.end);
    return keys.begin < cols.end && cols.begin < keys.end && blocks.any(rows, cols);
  }

  // Bytes of the bias that a tile reads: broadcast rows and columns are read once.
  int64_t bias_bytes(Range rows, Range cols) const {
    if (bias == nullptr) return 0;
    return (bias_row_stride == 0 ? 1 : rows.end - rows.begin) * (bias_col_stride == 0 ? 1 : cols.end - cols.begin) *
           size_of(bias_dtype);
  }
};

// Calls f with a value of the element type.
template <class F>
auto for_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kBFloat16: return f(bf16{});
    case DType::kFloat16: return f(fp16{});
    case DType::kFloat64: return f(double{});
    default: return f(float{});
  }
}

// ---- between slow and fast memory

// tile[i][0..head_dim) = rows of a tensor, padded with zeros to `stride` columns. True when every element is finite.
template <class T>
bool load_tile(const T* rows, int64_t row_stride, int64_t count, int64_t head_dim, Accum<T>* tile, int64_t stride,
               Traffic& traffic) {
  constexpr int64_t kAhead = 8;  // rows: the strides between them are too long for the hardware to foresee
  Vec<Accum<T>> zeros = {};
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(rows + (i + kAhead) * row_stride) + byte);
    load_row(rows + i * row_stride, tile + i * stride, head_dim, zeros);
    for (int64_t d = head_dim; d < stride; ++d) tile[i * stride + d] = 0;
  }
  traffic.loaded += count * head_dim * static_cast<int64_t>(sizeof(T));
  return sum_of(zeros) == 0;
}

template <class T>
void store_tile(const Accum<T>* tile, int64_t stride, int64_t count, int64_t head_dim, T* rows, int64_t row_stride,
                Traffic& traffic) {
  for (int64_t i = 0; i < count; ++i) store_row(tile + i * stride, rows + i * row_stride, head_dim);
  traffic.stored += count * head_dim * static_cast<int64_t>(sizeof(T));
}

// transposed[d][j] = tile[j][d], for `count` rows; columns up to `stride` become 0. In blocks of 8 x 16, so that the
// reads of a block stay in few cache lines and its writes are whole ones.
template <class A>
void transpose_tile(const A* tile, int64_t tile_stride, int64_t count, int64_t head_dim, A* transposed,
                    int64_t stride) {
  for (int64_t j = 0; j < count; j += 16) {
    const int64_t width = min_of<int64_t>(16, count - j);
    for (int64_t d = 0; d < head_dim; ++d) {
      A* out = transposed + d * stride + j;
      const A* in = tile + j * tile_stride + d;
      if (width == 16)
        for (int64_t x = 0; x < 16; ++x) out[x] = in[x * tile_stride];
      else
        for (int64_t x = 0; x < width; ++x) out[x] = in[x * tile_stride];
    }
  }
  for (int64_t d = 0; d < head_dim; ++d)
    for (int64_t j = count; j < stride; ++j) transposed[d * stride + j] = 0;
}

// ---- [4b] score_mod and mask

// A finite double that float cannot hold becomes the largest float, not an infinity: that would mask.
template <class A, class X>
FLASH_HD A narrowed(X x) {
  if constexpr (sizeof(X) > sizeof(A)) {
    constexpr X kLargest = std::numeric_limits<A>::max();
    if (x - x == X(0)) x = max_of(min_of(x, kLargest), -kLargest);
  }
  return static_cast<A>(x);
}

// One row of the bias in the accumulation type.
template <class A>
void load_bias(const Head<A>& h, int64_t row, Range cols, A* out) {
  const int64_t first = row * h.bias_row_stride + cols.begin * h.bias_col_stride, step = h.bias_col_stride;
  const int64_t count = cols.end - cols.begin;
  const auto read = [&](auto* typed) {
    for (int64_t j = 0; j < count; ++j) out[j] = narrowed<A>(to_accum(typed[first + j * step]));
  };
  switch (h.bias_dtype) {
    case DType::kFloat32: return read(reinterpret_cast<const float*>(h.bias));
    case DType::kFloat64: return read(reinterpret_cast<const double*>(h.bias));
    case DType::kBFloat16: return read(reinterpret_cast<const bf16*>(h.bias));
    case DType::kFloat16: return read(reinterpret_cast<const fp16*>(h.bias));
    case DType::kBool:
      for (int64_t j = 0; j < count; ++j) out[j] = h.bias[first + j * step] != 0 ? A(0) : neg_infinity<A>();
  }
}

// Turns products acc_s[i][j] = q_i . k_j into scores; what is masked, and the padding up to `padded_cols`, becomes
// -inf.
// `derivative` (may be null) receives d(score) / d(product). True when an element inside the tile may be masked.
template <class A>
bool score_mod_and_mask(const Head<A>& h, Range rows, Range cols, A* acc_s, int64_t stride, int64_t padded_cols,
                        A* bias_row, A* derivative, Traffic& traffic) {
  const int64_t count = cols.end - cols.begin;
  const bool whole = h.band.covers(rows, cols);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    A* s = acc_s + (row - rows.begin) * stride;
    if (h.mod.in_use) {
      for (int64_t j = 0; j < count; ++j) s[j] = h.mod.capped(s[j]);
      if (derivative != nullptr) {
        A* d = derivative + (row - rows.begin) * stride;
        for (int64_t j = 0; j < count; ++j) d[j] = h.mod.derivative(s[j]);
      }
      if (h.mod.alibi_slope != A(0))
        for (int64_t j = 0; j < count; ++j) s[j] += h.mod.alibi(row, cols.begin + j);
      if (h.bias != nullptr) {
        load_bias(h, row, cols, bias_row);
        // A bias of -inf masks, whatever the score: NaN from a masked key must not survive (rule 6).
        for (int64_t j = 0; j < count; ++j) s[j] = bias_row[j] == neg_infinity<A>() ? bias_row[j] : s[j] + bias_row[j];
      }
    }
    if (!whole) {
      const Range seen = h.band.keys_of(row, row + 1);
      const int64_t begin = min_of(max_of<int64_t>(seen.begin - cols.begin, 0), count);
      const int64_t end = max_of(min_of(seen.end - cols.begin, count), begin);
      for (int64_t j = 0; j < begin; ++j) s[j] = neg_infinity<A>();
      for (int64_t j = end; j < count; ++j) s[j] = neg_infinity<A>();
    }
    if (h.blocks.in_use())
      for (int64_t j = 0; j < count;) {
        const int64_t col = cols.begin + j, next = min_of((col / h.blocks.block_k + 1) * h.blocks.block_k, cols.end);
        if (!h.blocks.visible(row, col))
          for (int64_t x = j; x < next - cols.begin; ++x) s[x] = neg_infinity<A>();
        j = next - cols.begin;
      }
    for (int64_t j = count; j < padded_cols; ++j) s[j] = neg_infinity<A>();
  }
  traffic.loaded += h.bias_bytes(rows, cols);
  return !whole || h.bias != nullptr || h.blocks.in_use();
}

// ---- [4c] online softmax

// NaN never wins the comparison; it comes back through the sum.
template <class A>
FLASH_HD A max_of_row(const A* s, int64_t count) {
  Vec<A> m = splat(neg_infinity<A>());
  for (int64_t j = 0; j < count; j += kLanes<A>) {
    const Vec<A> v = load(s + j);
    m = v > m ? v : m;
  }
  A result = m[0];
  for (int lane = 1; lane < kLanes<A>; ++lane) result = max_of(result, m[lane]);
  return result;
}

// s[j] = 2^((s[j] - subtract) * scale_log2), for a whole number of vectors.
template <class A>
FLASH_HD void exp_row(A* s, int64_t count, A subtract, A scale_log2) {
  for (int64_t j = 0; j < count; ++j) s[j] = exp2_of((s[j] - subtract) * scale_log2);
}

template <class A>
FLASH_HD A sum_of_row(const A* s, int64_t count) {
  Vec<A> sum = {};
  for (int64_t j = 0; j < count; j += kLanes<A>) sum += load(s + j);
  return sum_of(sum);
}

template <class A>
FLASH_HD void scale_row(A* row, int64_t count, A factor) {
  for (int64_t j = 0; j < count; ++j) row[j] *= factor;
}

// Dropout (rule 8): calls apply(i, factors) for every row i of the tile, where factors[j] is 0 for a dropped and the scale
// for a kept element. `strip` holds 16 rows of factors. One Philox call serves its eight elements, and the 32 lanes of a
// 16 x 16 block are computed together.
template <class A, class Apply>
void for_each_dropout_row(const Head<A>& h, Range rows, Range cols, A* strip, int64_t stride, Apply apply) {
  const A kept = h.dropout.template scale<A>();
  const int64_t first16 = cols.begin / 16, shift = cols.begin - first16 * 16;
  for (int64_t r16 = rows.begin / 16; r16 * 16 < rows.end; ++r16) {
    for (int64_t c16 = first16; c16 * 16 < cols.end; ++c16) {
      uint32_t words[4][32];
      for (uint32_t lane = 0; lane < 32; ++lane) {
        const Philox4 draws =
            h.dropout.draws(static_cast<uint32_t>(r16), static_cast<uint32_t>(c16), lane, h.batch_head);
        for (int w = 0; w < 4; ++w) words[w][lane] = draws.word[w];
      }
      A* block = strip + (c16 - first16) * 16;
      for (uint32_t row = 0; row < 16; ++row)
        for (uint32_t pair = 0; pair < 8; ++pair) {  // columns 2 * pair and 2 * pair + 1 share a word
          const uint32_t word = words[(row >> 3) * 2 + (pair >> 2)][Dropout::lane_of(row, pair * 2)];
          block[row * stride + pair * 2] = (word & 0xffffu) >= h.dropout.threshold ? kept : A(0);
          block[row * stride + pair * 2 + 1] = (word >> 16) >= h.dropout.threshold ? kept : A(0);
        }
    }
    const int64_t end = min_of(rows.end, r16 * 16 + 16);
    for (int64_t row = max_of(rows.begin, r16 * 16); row < end; ++row)
      apply(row - rows.begin, static_cast<const A*>(strip + (row % 16) * stride + shift));
  }
}

// ---- rule 6, strictly: products in which a masked element meets an inf or NaN

// Which elements of a score tile are visible, taken before the exponential hides it.
template <class A>
void note_visible(const A* acc_s, int64_t stride, int64_t rows, int64_t cols, uint8_t* visible) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) visible[i * stride + j] = acc_s[i * stride + j] != neg_infinity<A>();
}

// c[i][:] += sum over visible j of a[i][j] * b[j][:]. The plain product would make NaN of 0 * inf. Rare, so not fast.
template <class A>
void visible_product(int64_t rows, int64_t cols, int64_t depth, const A* a, int64_t a_stride, const uint8_t* visible,
                     const A* b, int64_t b_stride, A* c, int64_t c_stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < depth; ++k) {
      if (!visible[i * a_stride + k]) continue;
      for (int64_t j = 0; j < cols; ++j) c[i * c_stride + j] += a[i * a_stride + k] * b[k * b_stride + j];
    }
}

}  // namespace flash::cpu::FLASH_ISA
