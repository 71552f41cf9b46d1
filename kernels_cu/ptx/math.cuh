// One inline function per PTX instruction that functions of a modification are made of, beside
// those of base.cuh.
#pragma once

#include "ptx/base.cuh"

namespace ptx {

// tanh.approx.f32: to 2^-11.
__device__ inline float tanh_approx(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// min.NaN.f32: NaN if either is, which architectures before sm_80 need a comparison for.
__device__ inline float min_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x < y || x != x ? x : y;
#endif
}

// max.NaN.f32: NaN if either is.
__device__ inline float max_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x > y || x != x ? x : y;
#endif
}

}  // namespace ptx
