// ldmatrix (sm_75), stmatrix (sm_90): a warp loads or stores four 8 x 8 matrices of 16-bit elements from shared memory into mma fragments.
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes each.
#pragma once
#include <cstdint>

namespace flash::ptx {

// Lane l gets row l / 4, columns 2 (l % 4) and the next, of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: lane l gets rows 2 (l % 4) and the next, column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The way back of the first one.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
}
#endif

}  // namespace flash::ptx
