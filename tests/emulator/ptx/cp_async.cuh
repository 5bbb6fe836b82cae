// csrc/ptx/cp_async.cuh, emulated.
#pragma once
#include <cuda_runtime.h>

namespace flash::ptx {

inline uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

inline void cp_async(uint32_t shared, const void* global, int bytes, int size) {
  // NOTE: a GPU refuses these also where nothing is read.
  if (reinterpret_cast<uintptr_t>(global) % size != 0) emulator::fail("cp.async from an address that is not aligned");
  const emulator::Copy copy{emulator::shared_at(shared, size), global, bytes, size};
  if (emulator::machine.late_copies)
    emulator::machine.current->copies.push_back(copy);
  else
    copy.land();
}
inline void cp_async_cg_16(uint32_t shared, const void* global, int bytes) { cp_async(shared, global, bytes, 16); }
inline void cp_async_ca_4(uint32_t shared, const void* global, int bytes) { cp_async(shared, global, bytes, 4); }

inline void cp_async_commit_group() {
  emulator::Thread& me = *emulator::machine.current;
  me.groups.push_back(std::move(me.copies));
  me.copies.clear();
}

template <int kPending>
void cp_async_wait_group() {
  auto& groups = emulator::machine.current->groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const emulator::Copy& copy : groups.front()) copy.land();
}

}  // namespace flash::ptx
