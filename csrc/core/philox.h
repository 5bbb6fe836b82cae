// Dropout as a pure function of the element (rule 8): Philox 4x32 with 7 rounds (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3"; 7 is the fewest that pass BigCrush).
// One call serves the eight elements that one lane holds of a 16 x 16 block in the accumulator layout of mma and wgmma.
#pragma once
#include "common.h"

namespace flash {

struct Philox4 {
  uint32_t word[4];
};

FLASH_HD Philox4 philox_4x32_7(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

struct Dropout {
  uint32_t key0, key1;  // the low halves of the two seed words
  uint32_t threshold;   // an element is kept when its 16-bit draw is at least this; 65536 drops everything

  FLASH_HD static uint32_t threshold_of(double p) { return static_cast<uint32_t>(65536.0 * p + 0.5); }
  FLASH_HD static Dropout of(const int64_t* seed, double p) {
    return {static_cast<uint32_t>(seed[0]), static_cast<uint32_t>(seed[1]), threshold_of(p)};
  }

  // What kept probabilities are multiplied by.
  template <class T>
  FLASH_HD T scale() const { return threshold < 65536u ? T(65536) / T(65536u - threshold) : T(0); }

  // The draws of `lane` in the 16 x 16 block (row16, col16) of score matrix batch * heads + head.
  FLASH_HD Philox4 draws(uint32_t row16, uint32_t col16, uint32_t lane, uint32_t batch_head) const {
    return philox_4x32_7(key0, key1, row16, col16, lane, batch_head);
  }

  // Inside a block: which lane holds (row, col), and which of its eight draws is the element's.
  FLASH_HD static uint32_t lane_of(uint32_t row, uint32_t col) { return (row % 8) * 4 + (col % 8) / 2; }
  FLASH_HD static uint32_t draw_of(const Philox4& draws, uint32_t row, uint32_t col) {
    const uint32_t e = (row >> 3 & 1) * 4 + (col >> 3 & 1) * 2 + (col & 1);
    return draws.word[e >> 1] >> (16 * (e & 1)) & 0xffffu;
  }

  FLASH_HD bool keep(int64_t row, int64_t col, uint32_t batch_head) const {
    const uint32_t r = static_cast<uint32_t>(row % 16), c = static_cast<uint32_t>(col % 16);
    const Philox4 d = draws(static_cast<uint32_t>(row / 16), static_cast<uint32_t>(col / 16), lane_of(r, c), batch_head);
    return draw_of(d, r, c) >= threshold;
  }
};

}  // namespace flash
