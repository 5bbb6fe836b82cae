// What every header of core/ needs. core/ holds the decisions of the algorithm: which tiles are visited, which elements
// are masked or dropped, how rows are renormalised. CUDA kernels and the CPU backend compile this very code.
#pragma once
#include <cstdint>

#include "../flash.h"

// Always inlined, also on the host: cpu/ compiles these headers once per instruction set, and an out-of-line copy
// with AVX-512 code could otherwise be the one that the linker keeps for every machine.
#ifdef __CUDACC__
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline __attribute__((always_inline))
#endif

namespace flash {

template <class T>
FLASH_HD T min_of(T a, T b) { return b < a ? b : a; }
template <class T>
FLASH_HD T max_of(T a, T b) { return a < b ? b : a; }
FLASH_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASH_HD int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace flash
