// csrc/ptx/registers.cuh, emulated.
#pragma once

namespace flash::ptx {

inline int opaque(int x) { return x; }

}  // namespace flash::ptx
