// What tests/emulated.py calls.
#include <cuda_runtime.h>

#include "flash.h"

using namespace flash;

extern "C" {
void sizes(int64_t* bytes) {
  bytes[0] = sizeof(FwdParams);
  bytes[1] = sizeof(BwdParams);
  bytes[2] = sizeof(KernelPlan);
}
void plan(bool backward, const BwdParams* p, int smem_available, KernelPlan* plan) {
  *plan = backward ? plan_fa2_bwd(*p, smem_available) : plan_fa2_fwd(*p);
}
int smem_available(int* bytes) { return fa2_smem_available(bytes); }
int forward(const FwdParams* p) { return launch_fa2_fwd(*p, nullptr); }
int backward(const BwdParams* p, int smem_available) { return launch_fa2_bwd(*p, smem_available, nullptr); }
int dropout_mask(uint8_t* keep, const int64_t* seed, double p, int64_t batch, int64_t heads, int64_t seqlen_q,
                 int64_t seqlen_k) {
  return launch_dropout_mask(keep, seed, p, batch, heads, seqlen_q, seqlen_k, nullptr);
}
void schedule(unsigned seed, bool late_copies, int shared_limit) {
  emulator::machine.order.seed(seed);
  emulator::machine.late_copies = late_copies;
  emulator::machine.shared_limit = shared_limit;
  emulator::machine.error.clear();
  emulator::machine.bank_conflicts = 0;
}
const char* error() { return emulator::machine.error.c_str(); }
int64_t bank_conflicts() { return emulator::machine.bank_conflicts; }
}
