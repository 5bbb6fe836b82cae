// A 16-bit number that converts to and from float, which is all that the kernels ask of it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t sign = u >> 16 & 0x8000, rounded = (u & 0x7fffffff) + 0xfff + (u >> 13 & 1);
    const float size = std::fabs(x);
    const uint32_t magnitude = x != x            ? 0x7fff
                               : size >= 65520.f ? 0x7c00
                               : size < 0x1p-14f ? static_cast<uint32_t>(std::nearbyint(size * 0x1p24f))
                                                 : (rounded - (112u << 23)) >> 13;
    bits = static_cast<uint16_t>(sign | magnitude);
  }
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                       : exponent == 0 ? mantissa * 0x1p-24f
                                       : std::ldexp(1024.0f + mantissa, exponent - 25);
    return bits & 0x8000 ? -size : size;
  }
};
