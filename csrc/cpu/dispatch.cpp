// Picks the instruction set at run time. Compiled once, without any -m flag.
#include <cstring>
#include <string>

#include "../core/philox.h"
#include "isa.h"

namespace flash::cpu {

#define FLASH_DECLARE_ISA(name)                                                      \
  namespace name {                                                                   \
  Plan<FwdParams> fa1_fwd(const FwdParams&, int64_t);                                \
  Plan<FwdParams> fa2_fwd(const FwdParams&, int64_t);                                \
  Plan<BwdParams> bwd(Version, const BwdParams&, int64_t, int);                      \
  void preprocess(const BwdParams&, int64_t);                                        \
  constexpr Isa kIsa = {#name, fa1_fwd, fa2_fwd, bwd, preprocess};                   \
  }

FLASH_DECLARE_ISA(generic)
#ifdef FLASH_HAS_AVX2
FLASH_DECLARE_ISA(avx2)
#endif
#ifdef FLASH_HAS_AVX512
FLASH_DECLARE_ISA(avx512)
#endif

namespace {

// Fastest first. __builtin_cpu_supports asks the operating system too: an AVX register file that is not saved does not
// count.
const Isa* const* supported() {
  static const Isa* list[4] = {};
  static const bool filled = [] {
    int count = 0;
#ifdef FLASH_HAS_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      list[count++] = &avx512::kIsa;
#endif
#ifdef FLASH_HAS_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      list[count++] = &avx2::kIsa;
#endif
    list[count] = &generic::kIsa;
    return true;
  }();
  (void)filled;
  return list;
}

const Isa*& current() {
  static const Isa* isa = supported()[0];
  return isa;
}

}  // namespace

Plan<FwdParams> plan_fwd(Version version, const FwdParams& params, int64_t fast_memory) {
  return version == Version::kFa1 ? current()->fa1_fwd(params, fast_memory) : current()->fa2_fwd(params, fast_memory);
}

Plan<BwdParams> plan_bwd(Version version, const BwdParams& params, int64_t fast_memory, int threads) {
  return current()->bwd(version, params, fast_memory, threads);
}

void bwd_preprocess(const BwdParams& params, int64_t bh) { current()->preprocess(params, bh); }

void dropout_mask(uint8_t* keep, const int64_t* seed, double dropout_p, int64_t bh, int64_t seqlen_q,
                  int64_t seqlen_k) {
  const Dropout dropout = Dropout::of(seed, dropout_p);
  keep += bh * seqlen_q * seqlen_k;
  for (int64_t i = 0; i < seqlen_q; ++i)
    for (int64_t j = 0; j < seqlen_k; ++j)
      keep[i * seqlen_k + j] = dropout.keep(i, j, static_cast<uint32_t>(bh)) ? 1 : 0;
}

const char* isa() { return current()->name; }

const char* isa_supported() {
  static const std::string names = [] {
    std::string all;
    for (const Isa* const* i = supported(); *i != nullptr; ++i) all += (all.empty() ? "" : ",") + std::string((*i)->name);
    return all;
  }();
  return names.c_str();
}

bool set_isa(const char* name) {
  for (const Isa* const* i = supported(); *i != nullptr; ++i)
    if (std::strcmp((*i)->name, name) == 0) {
      current() = *i;
      return true;
    }
  return false;
}

}  // namespace flash::cpu
