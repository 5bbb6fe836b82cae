// The CPU backend as the bindings see it. The tile kernels are compiled once per instruction set (see cpu/dispatch.cpp);
// the loop over tasks is the caller's, so that threads come from at::parallel_for and these files stay torch-free.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../flash.h"

namespace flash::cpu {

enum class Version : int32_t { kFa1 = 1, kFa2 = 2 };

// Bytes that a schedule moved between slow memory (the tensors) and fast memory (its tile buffers).
struct Traffic {
  int64_t loaded = 0;
  int64_t stored = 0;
};

struct Tile {
  int32_t block_m;     // query rows
  int32_t block_n;     // key rows
  int32_t splits = 1;  // backward: tasks that share the key tiles of a head, each with a dQ accumulator of its own
};

// A step of a pass: `tasks` independent tasks, to be handed out in order (the longest come first).
// Each worker brings `scratch_bytes` of memory aligned to 64 bytes; its content is undefined before every task.
template <class Params>
struct Phase {
  int64_t tasks;
  size_t scratch_bytes;
  void (*run)(const Params& params, Tile tile, int64_t task, void* scratch, Traffic& traffic);
};

template <class Params>
struct Plan {
  Tile tile;
  int64_t fast_memory_bytes;  // what the tile's buffers take of the budget
  int64_t grid;               // tasks of the main phase
  size_t dq_accum_bytes;      // backward: 0 when dq itself can take the sum
  int32_t phase_count;
  Phase<Params> phases[6];    // run one after the other
};

// Fast memory that tiles are sized for when the caller names none: what a core's L2 cache holds beside its own work.
constexpr int64_t kDefaultFastMemory = 512 * 1024;

Plan<FwdParams> plan_fwd(Version version, const FwdParams& params, int64_t fast_memory);
// Planning reads cu_seqlens_q; of other pointers only whether they are null. delta and dq_accum may still be unset.
Plan<BwdParams> plan_bwd(Version version, const BwdParams& params, int64_t fast_memory, int threads);

// keep[b, h, i, j] as in launch_dropout_mask, for rows of one (batch, head) pair `bh`.
void dropout_mask(uint8_t* keep, const int64_t* seed, double dropout_p, int64_t bh, int64_t seqlen_q, int64_t seqlen_k);
// delta of one (batch, head) pair.
void bwd_preprocess(const BwdParams& params, int64_t bh);

const char* isa();                      // "avx512", "avx2" or "generic": what runs
const char* isa_supported();            // every one that this build and this machine have, comma-separated
bool set_isa(const char* name);         // false when it is not to be had; for tests and benchmarks

}  // namespace flash::cpu
