// Powers of two, by the bits of floats.
#pragma once

// The largest that a positive number is not below; 0 of a denormal one.
__device__ inline float power_below(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7f800000u);
}

// Of a power that is from 2^-126 to 2^126.
__device__ inline float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
