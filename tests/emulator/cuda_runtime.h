// CUDA's words on a CPU: what lets the kernels of csrc, unchanged, compile with a C++ compiler and run thread by thread.
// It is for tests where there is no GPU: slow, but strict where a GPU forgives. Of the schedules that CUDA allows it
// takes unkind ones: a warp runs as far as it can before another begins, in an order drawn anew behind every barrier, and
// copies to shared memory land at once or only when they are waited for. Shared memory starts as NaN.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // one CTA runs at a time
#define __align__(n) alignas(n)

namespace emulator {

struct Index {
  unsigned x;
};

struct Copy {  // cp.async
  void* to;
  const void* from;
  int bytes, size;  // what is read of `size`; the rest becomes zero

  void land() const {
    std::memset(to, 0, size);
    std::memcpy(to, from, bytes);
  }
};

struct Thread {
  Index index;
  ucontext_t start;
  jmp_buf resume;
  bool started, done;
  const uint64_t* waits_on;  // goes on when this counter is no longer `value`
  uint64_t value;
  std::vector<Copy> copies;               // since the last group
  std::deque<std::vector<Copy>> groups;  // that have not landed yet
};

struct Warp {
  void* slot[32];
  int arrived;
  uint64_t round;
};

// All that runs: one CTA at a time, its threads in turns on one thread of the CPU.
struct Machine {
  static constexpr int kMaxThreads = 1024, kStack = 256 << 10, kShared = 228 << 10;
  static constexpr uint32_t kSharedBase = 1024;  // no address is 0

  bool late_copies = false;  // cp.async lands when it is waited for, not at once
  int shared_limit = 0;      // bytes that a CTA may have
  std::mt19937 order{0};
  int64_t bank_conflicts = 0;  // of ldmatrix and stmatrix
  std::string error;

  std::vector<Thread> threads{kMaxThreads};
  std::vector<Warp> warps{kMaxThreads / 32};
  std::unique_ptr<char[]> stacks{new char[size_t{kMaxThreads} * kStack]};
  alignas(1024) char shared[kShared];
  int shared_bytes = 0, thread_count = 0;
  jmp_buf scheduler;
  Thread* current = nullptr;
  Index block{}, grid{};
  void (*body)(void*) = nullptr;
  void* body_args = nullptr;
  int arrived = 0, votes = 0, last_votes = 0;  // at the barrier of the CTA
  uint64_t round = 0;
};
inline Machine machine;

[[noreturn]] inline void fail(const std::string& what) {
  if (machine.error.empty())
    machine.error = what + " (CTA " + std::to_string(machine.block.x) + ", thread " +
                    std::to_string(machine.current ? machine.current->index.x : 0) + ")";
  _longjmp(machine.scheduler, 2);
}

inline void wait_while(const uint64_t& round, uint64_t value) {
  Thread& me = *machine.current;
  me.waits_on = &round;
  me.value = value;
  if (_setjmp(me.resume) == 0) _longjmp(machine.scheduler, 1);
}

// What a warp does together: the last of its threads to come does it for all, with what each of them brings.
template <class T, class F>
void together(T& mine, const F& act) {
  Warp& warp = machine.warps[machine.current->index.x / 32];
  warp.slot[machine.current->index.x % 32] = &mine;
  if (++warp.arrived < 32) return wait_while(warp.round, warp.round);
  T* all[32];
  for (int lane = 0; lane < 32; ++lane) all[lane] = static_cast<T*>(warp.slot[lane]);
  act(all);
  warp.arrived = 0;
  ++warp.round;
}

inline int barrier(int vote) {
  Machine& m = machine;
  m.votes |= vote;
  if (++m.arrived < m.thread_count) {
    wait_while(m.round, m.round);
  } else {
    m.last_votes = m.votes;
    m.arrived = m.votes = 0;
    ++m.round;
  }
  return m.last_votes;
}

inline char* shared_memory() { return machine.shared; }

// The bytes at an address of shared memory.
inline char* shared_at(uint32_t address, int bytes) {
  if (address < Machine::kSharedBase || address - Machine::kSharedBase + bytes > static_cast<uint32_t>(machine.shared_bytes))
    fail("shared memory is left at byte " + std::to_string(int64_t{address} - Machine::kSharedBase));
  if (address % bytes != 0) fail("a shared address is not aligned");
  return machine.shared + (address - Machine::kSharedBase);
}

inline void thread_main() {
  machine.body(machine.body_args);
  machine.current->done = true;
  _longjmp(machine.scheduler, 1);
}

inline void go_on(Thread& thread) {
  machine.current = &thread;
  const int how = _setjmp(machine.scheduler);
  if (how == 2) return;  // failed
  if (how == 1) return;  // it waits, or is done
  if (thread.started) _longjmp(thread.resume, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void run_cta() {
  Machine& m = machine;
  std::memset(m.shared, 0xff, sizeof(m.shared));
  m.arrived = m.votes = 0;
  for (int i = 0; i < m.thread_count; ++i) {
    Thread& t = m.threads[i];
    t.index.x = i;
    t.started = t.done = false;
    t.waits_on = nullptr;
    t.copies.clear();
    t.groups.clear();
    getcontext(&t.start);
    t.start.uc_stack.ss_sp = m.stacks.get() + size_t(i) * Machine::kStack;
    t.start.uc_stack.ss_size = Machine::kStack;
    t.start.uc_link = nullptr;
    makecontext(&t.start, thread_main, 0);
  }
  const int warp_count = (m.thread_count + 31) / 32;
  std::vector<int> order(warp_count);
  for (int w = 0; w < warp_count; ++w) {
    order[w] = w;
    m.warps[w].arrived = 0;
  }
  for (int left = m.thread_count; left > 0;) {
    bool any = false;
    std::shuffle(order.begin(), order.end(), m.order);
    for (const int w : order) {
      for (bool again = true; again;) {
        again = false;
        for (int i = w * 32; i < std::min(w * 32 + 32, m.thread_count); ++i) {
          Thread& t = m.threads[i];
          if (t.done || (t.waits_on && *t.waits_on == t.value)) continue;
          go_on(t);
          if (!m.error.empty()) return;
          left -= t.done;
          again = any = true;
        }
      }
    }
    if (!any) {
      m.error = "threads of CTA " + std::to_string(m.block.x) + " wait for others that never come";
      return;
    }
  }
  for (int i = m.shared_bytes; i < Machine::kShared; ++i)
    if (m.shared[i] != char(0xff)) m.error = "a CTA wrote behind its shared memory";
}

// kernel<<<grid, threads, shared_bytes, stream>>>
template <class... P>
auto launch(void (*kernel)(P...), unsigned grid, int threads, int shared_bytes = 0, void* = nullptr) {
  return [=](P... args) {
    Machine& m = machine;
    m.error.clear();
    if (threads > Machine::kMaxThreads || shared_bytes > m.shared_limit) {
      m.error = "a launch asks for too much";
      return;
    }
    m.grid.x = grid;
    m.thread_count = threads;
    m.shared_bytes = shared_bytes;
    auto call = [&] { kernel(args...); };
    m.body = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
    m.body_args = &call;
    for (m.block.x = 0; m.block.x < grid && m.error.empty(); ++m.block.x) run_cta();
  };
}

}  // namespace emulator

#define threadIdx (emulator::machine.current->index)
#define blockIdx (emulator::machine.block)
#define gridDim (emulator::machine.grid)

inline void __syncthreads() { emulator::barrier(0); }
inline int __syncthreads_or(int vote) { return emulator::barrier(vote != 0); }
inline void __syncwarp() {
  int nothing = 0;
  emulator::together(nothing, [](int**) {});
}
inline int __any_sync(unsigned, int vote) {
  emulator::together(vote, [](int** all) {
    int any = 0;
    for (int i = 0; i < 32; ++i) any |= *all[i] != 0;
    for (int i = 0; i < 32; ++i) *all[i] = any;
  });
  return vote;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  emulator::together(value, [&](T** all) {
    T old[32];
    for (int i = 0; i < 32; ++i) old[i] = *all[i];
    for (int i = 0; i < 32; ++i) *all[i] = old[i ^ mask];
  });
  return value;
}
template <class T>
T atomicAdd(T* at, T more) {
  const T before = *at;
  *at += more;
  return before;
}
inline void __threadfence() {}
inline void __trap() { emulator::fail("__trap"); }
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const char*>(pointer) - emulator::machine.shared + emulator::Machine::kSharedBase;
}

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ---- the host's side

using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaDevAttrMaxSharedMemoryPerBlockOptin };
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaGetLastError() { return emulator::machine.error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulator::machine.shared_limit;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = __CUDA_ARCH__ / 10;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= emulator::machine.shared_limit ? cudaSuccess : cudaErrorInvalidValue;
}
