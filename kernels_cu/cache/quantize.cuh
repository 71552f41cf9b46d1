// Quantization to 8 bits: divides by a scale, rounds to nearest even, and saturates. The results
// are bitwise those of cupy_flash/arrays/quantized.py, except for the sign of a float8 NaN.
#pragma once

#include "ptx/bytes.cuh"
#include "tile/element.cuh"
#include "tile/stored_bytes.cuh"

template <class Stored>
__device__ constexpr float largest_number();
template <>
__device__ constexpr float largest_number<float8_e4m3_t>() {
  return 448;
}
template <>
__device__ constexpr float largest_number<signed_byte_t>() {
  return 127;
}

// Maximum magnitude, computed on the bits without the sign, so that NaN is larger than any number.
struct LargestMagnitude {
  unsigned bits = 0;

  template <class Element, int N>
  __device__ void update(const Element (&x)[N], int elements) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (e < elements) bits = max(bits, __float_as_uint(widen(x[e])) & 0x7fffffffu);
    }
  }

  __device__ float warp_maximum() const {
    unsigned maximum = bits;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      maximum = max(maximum, __shfl_xor_sync(~0u, maximum, step));
    }
    return __uint_as_float(maximum);
  }
};

template <class Stored>
__device__ Stored saturate(float x);
#if __CUDA_ARCH__ >= 890
template <>
__device__ inline float8_e4m3_t saturate<float8_e4m3_t>(float x) {
  return {ptx::cvt_rn_satfinite_e4m3_f32(x)};
}
#endif
template <>
__device__ inline signed_byte_t saturate<signed_byte_t>(float x) {
  constexpr float largest = largest_number<signed_byte_t>();
  const float clamped = x != x ? 0 : fminf(fmaxf(x, -largest), largest);
  return {static_cast<signed char>(ptx::cvt_rni_s32_f32(clamped))};
}

// Returns x / scale as an 8-bit number, and 0 if the scale is 0. The test for 0 uses the bits,
// because a comparison would flush a subnormal scale to 0.
template <class Stored>
__device__ Stored quantize(float x, float scale) {
  const bool is_zero = (__float_as_uint(scale) & 0x7fffffffu) == 0;
  return saturate<Stored>(is_zero ? 0 : ptx::div_rn(x, scale));
}

// Quantizes and stores the first `elements` of N numbers. `target` is aligned to min(Alignment, N)
// bytes.
template <int Alignment, class Stored, class Element, int N>
__device__ void store_quantized(Stored* target, const Element (&x)[N], int elements, float scale) {
  constexpr int width = Alignment < N ? Alignment : N;
  using Access = Vector<Stored, width>;
#pragma unroll
  for (int begin = 0; begin < N; begin += width) {
    Access access;
#pragma unroll
    for (int e = 0; e < width; ++e) {
      access.data[e] = quantize<Stored>(float(widen(x[begin + e])), scale);
    }
    if (begin + width <= elements) {
      *reinterpret_cast<Access*>(target + begin) = access;
    } else {
#pragma unroll
      for (int e = 0; e < width; ++e) {
        if (begin + e < elements) target[begin + e] = access.data[e];
      }
    }
  }
}
