// Tiles of fa2 on CUDA: how large, by how many warps, and what they take of a CTA's shared memory.
#pragma once
#include "../core/smem_tile.h"

namespace flash::fa2 {

// A head dim runs in the next larger compiled one; the columns between are loaded as zeros.
constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

constexpr int compiled_head_dim(int64_t head_dim) {
  for (int d : kHeadDims)
    if (head_dim <= d) return d;
  return 0;
}

// Forward: a CTA owns kBlockM queries, its warps split the rows. K and V tiles pass through a ring of kRing buffers in
// the order K0, V0, K1, V1, ...; with 2 buffers V loads under Q K^T, and the next K under the softmax and P V.
template <int kHeadDim_>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = kHeadDim == 64 ? 96 : kHeadDim <= 128 ? 48 : 64;
  // 32 rows a warp up to 128: each fragment of K and V then serves two mma. Above, O would not fit in registers.
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : 8;
  static constexpr int kRing = 2;
  static constexpr int kMinCtas = kHeadDim <= 128 ? 2 : 1;  // CTAs that must fit on an SM: bounds the registers
  static constexpr int kThreads = kWarps * 32;

  // Shared memory: Q (later O), then the ring
  static constexpr int kBytesQ = SmemTile<kBlockM>::bytes(kHeadDim);
  static constexpr int kBytesRing = SmemTile<kBlockN>::bytes(kHeadDim);
  static constexpr int kSmemBytes = kBytesQ + kRing * kBytesRing;
};

// Backward: a CTA owns kBlockN keys and streams kBlockM queries past them. Its warps share each of the five products,
// kWarpsM of them along the first dimension and the others along the second, so that pieces are nearly square: reading
// shared memory is what all five wait for. kSmall is for GPUs with less of it: 99 KB (sm_86, sm_89), 163 KB (sm_80).
template <int kHeadDim_, bool kSmall>
struct BwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = (kHeadDim == 64 ? 128 : 64) / (kSmall && kHeadDim < 256 ? 2 : 1);
  static constexpr int kBlockN = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kStages = kSmall ? 1 : 2;  // with 2, Q and dO of the next query tile load under this one's work

  // S, dP: queries x keys. dK, dV: keys x head_dim. dQ: queries x head_dim.
  static constexpr int kWarpsM_S = kBlockM == 128 || kHeadDim == 96 ? 4 : 2;
  static constexpr int kWarpsM_dKV = kBlockN == 128 ? 4 : 2;
  static constexpr int kWarpsM_dQ = kBlockM == 128 || kHeadDim == 96 ? 4 : 2;

  static constexpr int kDqCols = kHeadDim == 256 ? 64 : kHeadDim;  // at once: beside dK and dV no more has room

  // Shared memory: K, V, kStages of Q and of dO, P, dS, a note for each key
  static constexpr int kBytesKV = SmemTile<kBlockN>::bytes(kHeadDim);
  static constexpr int kBytesQ = SmemTile<kBlockM>::bytes(kHeadDim);
  static constexpr int kBytesP = SmemTile<kBlockM>::bytes(kBlockN);
  static constexpr int kAtV = kBytesKV, kAtQ = 2 * kBytesKV, kAtDout = kAtQ + kStages * kBytesQ;
  static constexpr int kAtP = kAtDout + kStages * kBytesQ, kAtDs = kAtP + kBytesP;
  static constexpr int kAtBadKeys = kAtDs + kBytesP, kSmemBytes = kAtBadKeys + kBlockN;
};

}  // namespace flash::fa2
