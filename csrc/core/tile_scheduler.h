// Which tile a task, a CTA or a turn of a persistent CTA works on.
#pragma once
#include "common.h"

namespace flash {

struct Work {
  int64_t batch, head, block;
};

// Tasks are ordered head by head, so that the tiles of a head, which share its keys and values, run close together.
// Inside a head the longest come first: under a causal mask later query tiles see more keys, earlier key tiles are seen
// by more queries. What is left for the end is short, so that no worker waits long for another.
struct TileScheduler {
  int64_t heads, blocks;
  bool longest_last;  // the last block has the most work: count down

  FLASH_HD Work work_of(int64_t task) const {
    const int64_t block = task % blocks, batch_head = task / blocks;
    return {batch_head / heads, batch_head % heads, longest_last ? blocks - 1 - block : block};
  }
  // The same for task `task` of the heads from `first_batch_head` on, in 32 bits: a GPU divides 64 by a subroutine.
  FLASH_HD Work work_of(uint32_t first_batch_head, uint32_t task) const {
    const uint32_t n = static_cast<uint32_t>(blocks), head_count = static_cast<uint32_t>(heads);
    const uint32_t block = task % n, batch_head = first_batch_head + task / n;
    return {batch_head / head_count, batch_head % head_count, longest_last ? n - 1 - block : block};
  }
};

}  // namespace flash
