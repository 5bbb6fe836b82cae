// A 16-bit number that converts to and from float, which is all that the kernels ask of it.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    bits = x != x ? 0x7fff : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t u = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};
