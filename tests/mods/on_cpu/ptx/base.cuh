// Host versions of the instructions that conversions and functions are made of.
#pragma once

#include "cuda.h"

namespace ptx {

inline float ex2_approx(float x) { return std::exp2(x); }
inline float rcp_approx(float x) { return 1 / x; }
inline float div_rn(float x, float y) { return x / y; }
inline float mul_rn(float x, float y) { return x * y; }
inline unsigned short cvt_rn_f16_f32(float) { std::abort(); }

inline float cvt_f32_f16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const float size = exponent == 31  ? (digits ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(digits), -24)
                                     : std::ldexp(float(digits + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}

}  // namespace ptx
