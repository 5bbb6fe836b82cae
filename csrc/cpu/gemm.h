// The matrix products of a tile, in fast memory: C[m][n] (+)= sum over k of A(m, k) * B[k][n].
// B and C are row-major and padded to whole vectors; A may have any strides, since its elements are broadcast one by
// one: a transposed A costs nothing. A register tile is kPanelRows x kPanelVectors vectors.
#pragma once
#include "vec.h"

namespace flash::cpu::FLASH_ISA {

template <class A>
struct MatrixA {
  const A* ptr;
  int64_t row_stride, k_stride;
};

template <class A, int kRows, int kVectors>
FLASH_HD void register_tile(int64_t depth, const A* a, int64_t a_row, int64_t a_k, const A* b, int64_t b_stride, A* c,
                            int64_t c_stride, bool accumulate) {
  // The sum starts at 0 and C joins it last: long sums are then added up tile by tile, which rounds less.
  Vec<A> acc[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<A> row_b[kVectors];
    for (int j = 0; j < kVectors; ++j) row_b[j] = load(b + k * b_stride + j * kLanes<A>);
    for (int i = 0; i < kRows; ++i) {
      const Vec<A> element_a = splat(a[i * a_row + k * a_k]);
      for (int j = 0; j < kVectors; ++j) acc[i][j] += element_a * row_b[j];
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) {
      A* out = c + i * c_stride + j * kLanes<A>;
      store(out, accumulate ? load(out) + acc[i][j] : acc[i][j]);
    }
}

// All rows of a column panel. Not inlined: every product of every schedule shares this code.
template <class A, int kVectors>
__attribute__((noinline)) static void column_panel(int64_t rows, int64_t depth, MatrixA<A> a, const A* b,
                                                   int64_t b_stride, A* c, int64_t c_stride, bool accumulate) {
  int64_t m = 0;
  for (; m + kPanelRows <= rows; m += kPanelRows)
    register_tile<A, kPanelRows, kVectors>(depth, a.ptr + m * a.row_stride, a.row_stride, a.k_stride, b, b_stride,
                                           c + m * c_stride, c_stride, accumulate);
  for (; m + 2 <= rows; m += 2)
    register_tile<A, 2, kVectors>(depth, a.ptr + m * a.row_stride, a.row_stride, a.k_stride, b, b_stride,
                                  c + m * c_stride, c_stride, accumulate);
  if (m < rows)
    register_tile<A, 1, kVectors>(depth, a.ptr + m * a.row_stride, a.row_stride, a.k_stride, b, b_stride,
                                  c + m * c_stride, c_stride, accumulate);
}

// `cols` is a multiple of kLanes<A>. The depth goes in steps that leave a column panel of B in the L1 cache.
template <class A>
FLASH_HD void gemm(int64_t rows, int64_t cols, int64_t depth, MatrixA<A> a, const A* b, int64_t b_stride, A* c,
                   int64_t c_stride, bool accumulate) {
  constexpr int64_t kDepth = 64;
  int64_t n = 0;
  const auto panels = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; n + kVectors * kLanes<A> <= cols; n += kVectors * kLanes<A>)
      for (int64_t k = 0; k < depth; k += kDepth)
        column_panel<A, kVectors>(rows, min_of(kDepth, depth - k), {a.ptr + k * a.k_stride, a.row_stride, a.k_stride},
                                  b + k * b_stride + n, b_stride, c + n, c_stride, accumulate || k > 0);
  };
  panels(std::integral_constant<int, kPanelVectors>{});
  if constexpr (kPanelVectors == 4) panels(std::integral_constant<int, 2>{});
  panels(std::integral_constant<int, 1>{});
}

}  // namespace flash::cpu::FLASH_ISA
