// How a tile of 16-bit elements lies in shared memory: panels of 64 columns, each row of a panel 128 bytes, and in it
// the eight 16-byte chunks in an order that differs from row to row. So eight rows of one chunk, which is what ldmatrix
// reads and what a warp's accumulators write, touch every bank once, and so do eight chunks of one row.
#pragma once
#include "common.h"

namespace flash {

template <int kRows>
struct SmemTile {
  static constexpr int kPanelCols = 64, kRowBytes = 128, kChunkElements = 8;
  static constexpr int kPanelBytes = kRows * kRowBytes;

  FLASH_HD static constexpr int bytes(int cols) { return (cols + kPanelCols - 1) / kPanelCols * kPanelBytes; }

  // Byte of chunk `chunk` (columns 8 chunk to 8 chunk + 7) of row `row`.
  FLASH_HD static constexpr uint32_t offset(int row, int chunk) {
    return (chunk / 8) * kPanelBytes + row * kRowBytes + (((chunk & 7) ^ (row & 7)) << 4);
  }
};

}  // namespace flash
