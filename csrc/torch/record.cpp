#include "record.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace flash::binding {

namespace {
std::mutex record_mutex;  // backward runs on autograd's threads
// Never destroyed: it may hold a tensor whose allocator is gone by then.
std::optional<LastCall>& record = *new std::optional<LastCall>();
std::atomic<int64_t> fast_memory{cpu::kDefaultFastMemory};
}  // namespace

void set_last_call(LastCall call) {
  std::optional<LastCall> previous(std::move(call));
  // The previous record's seed tensor is released after the lock: its deleter may run anything.
  std::lock_guard<std::mutex> lock(record_mutex);
  record.swap(previous);
}

std::optional<LastCall> last_call() {
  std::lock_guard<std::mutex> lock(record_mutex);
  return record;
}

int64_t cpu_fast_memory() { return fast_memory.load(std::memory_order_relaxed); }
int64_t set_cpu_fast_memory(int64_t bytes) { return fast_memory.exchange(bytes, std::memory_order_relaxed); }

}  // namespace flash::binding
