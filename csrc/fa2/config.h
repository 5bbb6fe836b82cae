// Tiles of fa2 on CUDA: how large, by how many warps, and what they take of a CTA's shared memory. On sm_90, with TFLOP/s
// of an H200 (bf16, S = 4096, not causal, bursts; in brackets times torch's FLASH_ATTENTION; why these: benchmarks/notes.md)
//
//   pass      head dim   queries x keys   warps x CTAs   stages   shared memory   registers   TFLOP/s
//   forward      64        128 x 96         4 x 2          2         64 KB           255       332 (1.10)
//                96        128 x 48         4 x 2          2         80 KB           238       353 (1.03)
//               128        128 x 48         4 x 2          2         80 KB           255       391 (1.10)
//               192         64 x 64         4 x 2          1         72 KB           220       326 (1.02)
//               256         64 x 64         4 x 2          1         96 KB           244       342 (1.05)
//   backward     64         64 x 64         4 x 3          2         65 KB           167       282 (1.02)
//                96         64 x 128        8 x 1          3        226 KB           236       289 (1.00)
//               128         64 x 128        8 x 1          3        226 KB           255       337 (1.12)
//               192         64 x 64         8 x 1          3        226 KB           236       256 (1.01)
//               256         64 x 64         8 x 1          2        209 KB           248       260 (1.02)
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

// Forward: a CTA owns kBlockM queries, its warps split the rows. K and V tiles pass through kStages places each: with 2
// the next block's load under this one's work; with 1 V loads under Q K^T, and the next K under the softmax and P V.
template <int kHeadDim_>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  // Above 128 a warp has room for O of 16 rows only, and two CTAs of 64 rows hide each other's waits.
  static constexpr int kBlockM = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kBlockN = kHeadDim == 64 ? 96 : kHeadDim <= 128 ? 48 : 64;
  static constexpr int kWarps = 4;  // up to 128 of 32 rows: each fragment of K and V then serves two mma
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kMinCtas = 2;  // CTAs that must fit on an SM: bounds the registers
  static constexpr int kThreads = kWarps * 32;

  // Shared memory: Q (later O), kStages of K, kStages of V
  static constexpr int kBytesQ = SmemTile<kBlockM>::bytes(kHeadDim);
  static constexpr int kBytesKV = SmemTile<kBlockN>::bytes(kHeadDim);
  static constexpr int kSmemBytes = kBytesQ + 2 * kStages * kBytesKV;
};

// Shared memory that a CTA may have, in KB: 227 on sm_90 and sm_100, 163 on sm_80, 99 on sm_86, sm_89 and sm_120. Backward
// has a configuration for each.
constexpr int kSmemKbs[] = {227, 163, 99};
// Is there code with that configuration for an architecture (its __CUDA_ARCH__)? Where it may run: sm_80's also on sm_86,
// and the PTX of any on all that are newer.
FLASH_HD constexpr bool is_compiled(int arch, int smem_kb) {
  return smem_kb == 99 || (arch < 900 ? smem_kb == 163 : arch < 1200 && smem_kb == 227);
}

// Backward: a CTA owns kBlockN keys and streams kBlockM queries past them. Its warps share each of the five products,
// kWarpsM of them along the first dimension and the others along the second, so that pieces are nearly square: reading
// shared memory is what all five wait for. Up to head_dim 64 there is room for three CTAs of 4 warps on an SM, which wait
// at different times; above, for one of 8, whose warps drift apart when there is room for 3 stages and 2 places of P.
template <int kHeadDim_, int kSmemKb_>
struct BwdConfig {
  static constexpr int kHeadDim = kHeadDim_, kSmemKb = kSmemKb_;
  static constexpr bool kSmallest = kSmemKb == 99 && kHeadDim == 256;  // only 32 x 32 fits
  static constexpr int kBlockM = kSmemKb == 99 && kHeadDim > 64 ? 32 : 64;
  static constexpr int kBlockN = kHeadDim == 96 || kHeadDim == 128 ? 128 : kSmallest ? 32 : 64;
  static constexpr int kWarps = kHeadDim == 64 || kSmallest ? 4 : 8, kThreads = kWarps * 32;
  static constexpr int kMinCtas = kHeadDim > 64 ? 1 : kSmemKb == 227 ? 3 : kSmemKb == 163 ? 2 : 1;

  // Q, dO, LSE and delta: with 2 stages the next block's load under this one's work, with 3 those of the next but one.
  static constexpr bool kRoomy = kSmemKb == 227 && kHeadDim > 64 && kHeadDim < 256;
  static constexpr bool kTight = kHeadDim > 64 && (kSmemKb == 99 || (kSmemKb == 163 && kHeadDim == 256));
  static constexpr int kStages = kRoomy ? 3 : kTight ? 1 : 2;
  static constexpr int kBuffersP = kRoomy ? 2 : 1;  // with 2, P and dS are written while the last block's are read

  // S, dP: queries x keys. dK, dV: keys x head_dim. dQ: queries x head_dim.
  static constexpr int kWarpsM_S = kHeadDim == 96 ? 4 : 2;
  static constexpr int kWarpsM_dKV = kBlockN == 128 ? 4 : 2;
  static constexpr int kWarpsM_dQ = kHeadDim == 96 ? 4 : 2;

  // Columns of dQ at once: beside dK and dV there are no registers for more.
  static constexpr int kDqCols = kHeadDim != 256 ? kHeadDim : 64;

  // Shared memory: K, V, kStages of Q and of dO, kBuffersP of P and of dS, kStages of LSE and delta, a note for each key
  static constexpr int kBytesKV = SmemTile<kBlockN>::bytes(kHeadDim);
  static constexpr int kBytesQ = SmemTile<kBlockM>::bytes(kHeadDim);
  static constexpr int kBytesP = SmemTile<kBlockM>::bytes(kBlockN);
  static constexpr int kBytesStatistics = 2 * kBlockM * sizeof(float);
  static constexpr int kAtV = kBytesKV, kAtQ = 2 * kBytesKV, kAtDout = kAtQ + kStages * kBytesQ;
  static constexpr int kAtP = kAtDout + kStages * kBytesQ, kAtDs = kAtP + kBuffersP * kBytesP;
  static constexpr int kAtStatistics = kAtDs + kBuffersP * kBytesP;
  static constexpr int kAtBadKeys = kAtStatistics + kStages * kBytesStatistics, kSmemBytes = kAtBadKeys + kBlockN;
  static_assert(kSmemBytes + 1024 <= kSmemKb * 1024);  // 1024: what the static `ticket` takes, with its alignment
};

// Calls f with the FwdConfig, or the BwdConfig, that serves a head dim.
template <class F>
auto with_fwd_config(int64_t head_dim, const F& f) {
  switch (compiled_head_dim(head_dim)) {
    case 64: return f(FwdConfig<64>{});
    case 96: return f(FwdConfig<96>{});
    case 128: return f(FwdConfig<128>{});
    case 192: return f(FwdConfig<192>{});
    default: return f(FwdConfig<256>{});
  }
}

template <int kSmemKb, class F>
auto with_bwd_config(int64_t head_dim, const F& f) {
  constexpr int k96 = kSmemKb == 99 ? 128 : 96;  // three columns of fragments do not divide among the warps of 32 rows
  switch (compiled_head_dim(head_dim)) {
    case 64: return f(BwdConfig<64, kSmemKb>{});
    case 96: return f(BwdConfig<k96, kSmemKb>{});
    case 128: return f(BwdConfig<128, kSmemKb>{});
    case 192: return f(BwdConfig<192, kSmemKb>{});
    default: return f(BwdConfig<256, kSmemKb>{});
  }
}

template <class F>
auto with_bwd_config(int64_t head_dim, int smem_available, const F& f) {
  if (smem_available >= 227 * 1024) return with_bwd_config<227>(head_dim, f);
  if (smem_available >= 163 * 1024) return with_bwd_config<163>(head_dim, f);
  return with_bwd_config<99>(head_dim, f);
}

}  // namespace flash::fa2
