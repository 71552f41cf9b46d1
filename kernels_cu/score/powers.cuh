// Powers of two, computed on the bits of floats.
#pragma once

// Returns the largest power of two that is at most the positive x, or 0 if x is subnormal.
__device__ inline float power_below(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7f800000u);
}

// Returns 1 / power for a power of two from 2^-126 to 2^126.
__device__ inline float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
