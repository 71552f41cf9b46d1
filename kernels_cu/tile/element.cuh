// The 16-bit element types as plain storage, with their conversions. They replace those of the CUDA
// headers, so that kernels compile without a toolkit.
#pragma once

#include "ptx/base.cuh"

struct half_t {
  unsigned short bits;
};
struct bfloat16_t {
  unsigned short bits;
};

// Type of scores, probabilities and accumulators for an element type.
template <class Element>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class Element>
using Accumulator = typename AccumulatorOf<Element>::type;

__device__ inline float widen(half_t x) { return ptx::cvt_f32_f16(x.bits); }
__device__ inline float widen(bfloat16_t x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class Element>
__device__ Element narrow(Accumulator<Element> x);
template <>
__device__ inline half_t narrow<half_t>(float x) {
  return {ptx::cvt_rn_f16_f32(x)};
}
template <>
__device__ inline bfloat16_t narrow<bfloat16_t>(float x) {
#if __CUDA_ARCH__ >= 800
  return {ptx::cvt_rn_bf16_f32(x)};
#else
  // Turing has no bfloat16 conversion: round the bits to nearest even, and preserve NaN.
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<unsigned short>((bits >> 16) | 0x40)};
  return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline double narrow<double>(double x) {
  return x;
}

#if __CUDA_ARCH__ >= 800
// Returns two 16-bit elements packed into one register, `low` in the lower half.
template <class Element>
__device__ unsigned pack(float low, float high);
template <>
__device__ inline unsigned pack<half_t>(float low, float high) {
  return ptx::cvt_rn_f16x2_f32(low, high);
}
template <>
__device__ inline unsigned pack<bfloat16_t>(float low, float high) {
  return ptx::cvt_rn_bf16x2_f32(low, high);
}
#endif

// N elements that are loaded or stored by one memory access.
template <class Element, int N>
struct alignas(sizeof(Element) * N) Vector {
  Element data[N];
};
