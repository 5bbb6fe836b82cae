// What one compiled instruction set offers to dispatch.cpp.
#pragma once
#include "cpu.h"

namespace flash::cpu {

struct Isa {
  const char* name;
  Plan<FwdParams> (*fa1_fwd)(const FwdParams&, int64_t fast_memory);
  Plan<FwdParams> (*fa2_fwd)(const FwdParams&, int64_t fast_memory);
  Plan<BwdParams> (*bwd)(Version, const BwdParams&, int64_t fast_memory, int threads);
  void (*preprocess)(const BwdParams&, int64_t bh);
};

}  // namespace flash::cpu
