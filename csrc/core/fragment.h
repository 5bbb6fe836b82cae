// Where the accumulators of mma.m16n8k16 (and of each 8 columns of wgmma) lie: lane l holds d[0], d[1] of row l / 4 and
// d[2], d[3] of the row 8 below it, columns 2 (l % 4) and the next. Four lanes, a quad, hold a row.
#pragma once
#include "common.h"

namespace flash {

struct Fragment {
  int row, col;  // of d[0]

  FLASH_HD static Fragment of(int lane) { return {lane / 4, lane % 4 * 2}; }
  FLASH_HD int row_of(int i) const { return row + (i / 2) * 8; }
  FLASH_HD int col_of(int i) const { return col + i % 2; }
};

}  // namespace flash
