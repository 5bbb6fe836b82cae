// What the latest call ran, for flash_cuda.last_call().
#pragma once
#include <optional>

#include "../cpu/cpu.h"
#include "ops.h"

namespace flash::binding {

// Which argument was copied because its last dimension was not contiguous.
enum Copied : uint32_t {
  kCopiedQ = 1 << 0,
  kCopiedK = 1 << 1,
  kCopiedV = 1 << 2,
  kCopiedDout = 1 << 3,
  kCopiedOut = 1 << 4,
  kCopiedLse = 1 << 5,
  kCopiedDlse = 1 << 6,
  kCopiedBlockMask = 1 << 7,
};
constexpr const char* kCopiedNames[] = {"q", "k", "v", "dout", "out", "lse", "dlse", "block_mask"};

struct LastCall {
  bool backward;
  int64_t version;
  DType dtype;
  c10::Device device = c10::kCPU;
  const char* isa;   // of the CPU kernel, or "cuda"
  int32_t head_dim;  // that the CUDA kernel is compiled for; 0 on a CPU
  cpu::Tile tile;
  int64_t grid, fast_memory_bytes;
  cpu::Traffic traffic;  // -1: not counted
  int32_t threads;  // of the call; of a CTA on a GPU
  uint32_t copies;  // Copied bits
  OptTensor dropout_seed;
};

void set_last_call(LastCall call);
std::optional<LastCall> last_call();

// The fast memory that tiles are sized for; the setter returns what was set before.
int64_t cpu_fast_memory();
int64_t set_cpu_fast_memory(int64_t bytes);

}  // namespace flash::binding
