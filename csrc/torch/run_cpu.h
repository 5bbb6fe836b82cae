// Runs the phases of a CPU plan on torch's threads. The loop is here and not in csrc/cpu because at::parallel_for is
// what honours torch.set_num_threads.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "../cpu/cpu.h"

namespace flash::binding {

struct RunReport {
  cpu::Traffic traffic;
  int threads = 1;  // the most that any phase used
};

inline std::unique_ptr<void, decltype(&std::free)> aligned_scratch(size_t bytes) {
  void* memory = nullptr;
  if (bytes > 0 && posix_memalign(&memory, 64, bytes) != 0) throw std::bad_alloc();
  return {memory, &std::free};
}

template <class Params>
RunReport run_phases(const cpu::Plan<Params>& plan, const Params& params) {
  RunReport report;
  for (int32_t i = 0; i < plan.phase_count; ++i) {
    const cpu::Phase<Params>& phase = plan.phases[i];
    const int workers = static_cast<int>(std::min<int64_t>(phase.tasks, at::get_num_threads()));
    // Workers take the next task when they are free: tasks differ in length under a causal mask.
    std::atomic<int64_t> next{0}, loaded{0}, stored{0};
    auto work = [&](int64_t, int64_t) {
      const auto scratch = aligned_scratch(phase.scratch_bytes);
      cpu::Traffic traffic;
      for (int64_t task = next++; task < phase.tasks; task = next++)
        phase.run(params, plan.tile, task, scratch.get(), traffic);
      loaded += traffic.loaded;
      stored += traffic.stored;
    };
    if (workers > 1)
      at::parallel_for(0, workers, 1, work);
    else if (workers == 1)
      work(0, 1);
    report.traffic.loaded += loaded;
    report.traffic.stored += stored;
    report.threads = std::max(report.threads, workers);
  }
  return report;
}

}  // namespace flash::binding
