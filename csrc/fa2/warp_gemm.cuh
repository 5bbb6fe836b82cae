// What both passes of fa2 do with tiles in shared memory: load them by cp.async, read fragments by ldmatrix, multiply.
#pragma once
#include <cfloat>

#include "../core/fragment.h"
#include "../core/smem_tile.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/registers.cuh"

namespace flash::fa2 {

// Starts copies of `count` rows of a tensor into a tile. Rows from `count` on and columns from head_dim on become zero:
// what lies behind the end of a sequence may be NaN, and 0 * NaN is NaN. kKeep: where registers are left, the addresses
// may stay in them between calls, and every copy has its own (forward above head_dim 128: 5 % of its time).
template <int kRows, int kCols, int kThreads, bool kKeep = false, class Element>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const Element* rows, int64_t row_stride, int count,
                                                int head_dim) {
  using Tile = SmemTile<kRows>;
  constexpr int kRowsAtOnce = kThreads / 8, kPanels = Tile::bytes(kCols) / Tile::kPanelBytes;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  const int thread = kKeep ? threadIdx.x : ptx::opaque(threadIdx.x);
  const int chunk = thread % 8;  // eight threads read 128 bytes of a row
  int row = thread / 8;
  uint32_t to = tile + Tile::offset(row, chunk);
  const Element* from = rows + row * row_stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const bool there = row < count && chunk * 8 + panel * 64 < head_dim;
      ptx::cp_async_cg_16(to + panel * Tile::kPanelBytes, kKeep && !there ? rows : from + panel * 64, there ? 16 : 0);
    }
    row += kRowsAtOnce;
    to += kRowsAtOnce * Tile::kRowBytes;
    from += kRowsAtOnce * row_stride;
  }
}

// Makes the infinities and NaN zero in what this thread has loaded of a tile, calls found(row) for rows that held some,
// and says whether there were any. Needs no barrier: a thread sees its own copies once it has waited for them.
template <int kRows, int kCols, int kThreads, class Element, class Found>
__device__ __forceinline__ bool clean_tile(char* tile, const Found& found) {
  using Tile = SmemTile<kRows>;
  // An exponent of all ones, plus its lowest bit, carries into the sign bit that the mask has cleared.
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  constexpr uint32_t kExponents = kHalf ? 0x7c007c00u : 0x7f807f80u, kLowest = kHalf ? 0x04000400u : 0x00800080u;
  bool any = false;
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < kRows; row += kThreads / 8) {
#pragma unroll
    for (int chunk = threadIdx.x % 8; chunk < kCols / 8; chunk += 8) {
      uint4* at = reinterpret_cast<uint4*>(tile + Tile::offset(row, chunk));
      const uint4 w = *at;
      const auto carry = [](uint32_t x) { return (x & kExponents) + kLowest; };
      if (((carry(w.x) | carry(w.y) | carry(w.z) | carry(w.w)) & 0x80008000u) == 0) continue;
      any = true;
      found(row);
      Element* elements = reinterpret_cast<Element*>(at);
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        if (!(fabsf(static_cast<float>(elements[i])) <= FLT_MAX)) elements[i] = Element(0.0f);
    }
  }
  return any;
}

// The addresses at which a lane reads fragments of one tile. `column_chunk` says how ldmatrix's four matrices lie:
// kRows16: 16 rows x 8 columns, then the next 8 columns (A stored [m][k]; B stored [k][n], transposed by ldmatrix);
// kCols16: 8 rows x 16 columns, then the next 8 rows     (B stored [n][k]; A stored [k][m], transposed by ldmatrix).
enum class Order { kRows16, kCols16 };

// Addresses count from (row0, col0) of the tile. Where pieces are kPieceCols = 2^n columns wide and begin at multiples of
// that, only (row0, col0) is worked out at run time: the rest are constants, and the swizzle one XOR.
template <int kRows, Order kOrder, int kPieceCols = 64>
struct FragmentReader {
  static constexpr bool kPowerOf2 = (kPieceCols & (kPieceCols - 1)) == 0;
  using Tile = SmemTile<kRows>;
  uint32_t lane_row, lane_chunk;  // address of the lane's row; its chunk in the swizzle, times 16
  int col0;

  __device__ __forceinline__ FragmentReader(uint32_t tile, int lane, int row0 = 0, int first_col = 0) : col0(first_col) {
    const int row = kOrder == Order::kRows16 ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = kOrder == Order::kRows16 ? lane / 16 : lane / 8 % 2;
    lane_row = tile + (row0 + row) * Tile::kRowBytes;
    lane_chunk = (chunk ^ (row & 7)) << 4;
    if constexpr (kPowerOf2) {
      lane_row += col0 / 64 * Tile::kPanelBytes;
      lane_chunk ^= col0 % 64 * 2;
    }
  }

  // Address for the 16 x 16 elements from (row, col) on; both are multiples of 16.
  __device__ __forceinline__ uint32_t at(int row, int col) const {
    if constexpr (!kPowerOf2) col += col0;
    return lane_row + row * Tile::kRowBytes + col / 64 * Tile::kPanelBytes + (lane_chunk ^ (col % 64 * 2));
  }
};

// acc[m][n] += A B for 16 kM x 8 kN results of this warp and one step of 16 in depth. b(n0) loads two columns of tiles.
template <class Element, int kM, int kN, class LoadB>
__device__ __forceinline__ void mma_step(float (&acc)[kM][kN][4], const uint32_t (&a)[kM][4], const LoadB& load_b) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t b[4];
    load_b(b, n * 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// Writes a warp's results, rounded, at (row0, col0) of a tile; `value(m, n, i)` is element i of fragment (m, n).
template <class Element, int kRows, int kM, int kN, class Value>
__device__ __forceinline__ void store_fragments(char* tile, int row0, int col0, int lane, const Value& value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const FragmentReader<kRows, Order::kRows16, kN * 8> to(ptx::shared_address(tile), lane, row0, col0);
#else
  const Fragment f = Fragment::of(lane);
  const FragmentReader<kRows, Order::kRows16, kN * 8> to(f.col * 2, f.row, row0, col0);
#endif
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        d[i] = ptx::cvt_rn_x2<Element>(value(m, n + i / 2, i % 2 * 2), value(m, n + i / 2, i % 2 * 2 + 1));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      ptx::stmatrix_x4(to.at(m * 16, n * 8), d);
#else
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint32_t*>(tile + to.at(m * 16 + i % 2 * 8, (n + i / 2) * 8)) = d[i];
#endif
    }
  }
}

// Copies rows row0 to row0 + kCount - 1 of a tile, as far as they exist, to a tensor; by kThreads threads, 16 bytes each.
template <int kRows, int kCols, int kCount, int kThreads, class Element>
__device__ __forceinline__ void store_rows(const char* tile, int row0, int thread, Element* rows, int64_t row_stride,
                                           int count, int head_dim) {
  constexpr int kChunks = kCols / 8;
#pragma unroll 4
  for (int x = thread; x < kCount * kChunks; x += kThreads) {
    const int row = row0 + x / kChunks, chunk = x % kChunks;
    if (row < count && chunk * 8 < head_dim)
      *reinterpret_cast<uint4*>(rows + row * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + SmemTile<kRows>::offset(row, chunk));
  }
}

}  // namespace flash::fa2
