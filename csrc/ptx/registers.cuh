// For kernels that use every register.
#pragma once

namespace flash::ptx {

// x, but the compiler cannot know it: what depends on it is worked out where it stands, not ahead of the loop around it,
// where it would fill registers or be spilled.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash::ptx
