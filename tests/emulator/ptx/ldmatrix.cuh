// csrc/ptx/ldmatrix.cuh, emulated.
#pragma once
#include <cuda_runtime.h>

namespace flash::ptx {

struct MatrixRows {
  uint32_t* d;  // [4]
  uint32_t address;
};

// Where row `row` of matrix `i` lies; counts rows of one matrix that share a bank with another.
inline char* matrix_row(MatrixRows** all, int i, int row) {
  if (row == 0) {
    uint32_t banks = 0;
    for (int r = 0; r < 8; ++r) banks |= 1u << (all[i * 8 + r]->address / 16 % 8);
    emulator::machine.bank_conflicts += 8 - __builtin_popcount(banks);
  }
  return emulator::shared_at(all[i * 8 + row]->address, 16);
}

inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  MatrixRows mine{d, address};
  emulator::together(mine, [](MatrixRows** all) {
    for (int i = 0; i < 4; ++i)
      for (int row = 0; row < 8; ++row) {
        const char* at = matrix_row(all, i, row);
        for (int pair = 0; pair < 4; ++pair) std::memcpy(&all[row * 4 + pair]->d[i], at + pair * 4, 4);
      }
  });
}

inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  MatrixRows mine{d, address};
  emulator::together(mine, [](MatrixRows** all) {
    for (int i = 0; i < 4; ++i)
      for (int row = 0; row < 8; ++row) {
        const char* at = matrix_row(all, i, row);
        for (int col = 0; col < 8; ++col)
          std::memcpy(reinterpret_cast<char*>(&all[col * 4 + row / 2]->d[i]) + row % 2 * 2, at + col * 2, 2);
      }
  });
}

inline void stmatrix_x4(uint32_t address, const uint32_t (&d)[4]) {
  MatrixRows mine{const_cast<uint32_t*>(d), address};
  emulator::together(mine, [](MatrixRows** all) {
    for (int i = 0; i < 4; ++i)
      for (int row = 0; row < 8; ++row) {
        char* at = matrix_row(all, i, row);
        for (int pair = 0; pair < 4; ++pair) std::memcpy(at + pair * 4, &all[row * 4 + pair]->d[i], 4);
      }
  });
}

}  // namespace flash::ptx
