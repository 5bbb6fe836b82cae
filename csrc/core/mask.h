// The block-sparse pattern (FlashAttention, section 3.3): whole blocks of the score matrix are visible or not.
// The band of block_info.h is the other half of the mask.
#pragma once
#include "block_info.h"

namespace flash {

struct BlockMask {
  const uint8_t* flags;  // [ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)] of one (batch, head), or null
  int64_t row_stride;
  int64_t block_q, block_k;

  FLASH_HD static BlockMask of(const Problem& p, int64_t batch, int64_t head) {
    if (p.block_mask == nullptr) return {nullptr, 0, 1, 1};
    return {p.block_mask + batch * p.block_mask_stride[0] + head * p.block_mask_stride[1], p.block_mask_stride[2],
            p.block_mask_q, p.block_mask_k};
  }

  FLASH_HD bool in_use() const { return flags != nullptr; }
  FLASH_HD bool visible(int64_t row, int64_t col) const {
    return flags[row / block_q * row_stride + col / block_k] != 0;
  }

  // Does the tile overlap an active block? Without a pattern every tile does.
  FLASH_HD bool any(Range rows, Range cols) const {
    if (!in_use()) return true;
    const Range q = blocks_of(rows, block_q), k = blocks_of(cols, block_k);
    for (int64_t i = q.begin; i < q.end; ++i)
      for (int64_t j = k.begin; j < k.end; ++j)
        if (flags[i * row_stride + j] != 0) return true;
    return false;
  }
};

}  // namespace flash
