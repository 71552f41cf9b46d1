// PTX wrappers for the arithmetic of generated mask and score functions, in addition to base.cuh:
// one inline function per instruction.
#pragma once

#include "ptx/base.cuh"

namespace ptx {

// tanh.approx.f32: tanh(x) with a relative error of about 2^-11.
__device__ inline float tanh_approx(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// min.NaN.f32: returns NaN if either argument is NaN. Before sm_80, comparisons compute the same.
__device__ inline float min_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x < y || x != x ? x : y;
#endif
}

// max.NaN.f32: returns NaN if either argument is NaN.
__device__ inline float max_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x > y || x != x ? x : y;
#endif
}

// not.b32
__device__ inline int not_b32(int x) {
  int result;
  asm("not.b32 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}

// The arithmetic below keeps subnormal numbers, although kernels are compiled with -ftz, and is
// never contracted to an FMA. mul.rn.f32 and div.rn.f32 are in base.cuh.

// add.rn.f32
__device__ inline float add_rn(float x, float y) {
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// sub.rn.f32
__device__ inline float sub_rn(float x, float y) {
  float result;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// sqrt.rn.f32
__device__ inline float sqrt_rn(float x) {
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// neg.f32
__device__ inline float neg(float x) {
  float result;
  asm("neg.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// abs.f32
__device__ inline float abs(float x) {
  float result;
  asm("abs.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rmi.f32.f32: floor
__device__ inline float cvt_rmi(float x) {
  float result;
  asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rpi.f32.f32: ceil
__device__ inline float cvt_rpi(float x) {
  float result;
  asm("cvt.rpi.f32.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rzi.f32.f32: trunc
__device__ inline float cvt_rzi(float x) {
  float result;
  asm("cvt.rzi.f32.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rni.f32.f32: rint
__device__ inline float cvt_rni(float x) {
  float result;
  asm("cvt.rni.f32.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rn.f32.f64
__device__ inline float cvt_rn_f32_f64(double x) {
  float result;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(x));
  return result;
}

// cvt.f64.f32
__device__ inline double cvt_f64_f32(float x) {
  double result;
  asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(x));
  return result;
}

// Returns x < y, which is false for NaN: the negation of setp.geu.f32. ptxas (CUDA 13.0 and 13.5)
// replaces setp.lt and setp.le of a negative constant and |x|, or 2^x, by true even if x is NaN.
__device__ inline bool setp_lt(float x, float y) {
  unsigned result;
  asm("{\n.reg .pred p;\nsetp.geu.f32 p, %1, %2;\nselp.u32 %0, 0, 1, p;\n}"
      : "=r"(result)
      : "f"(x), "f"(y));
  return result != 0;
}

// Returns x <= y, which is false for NaN: the negation of setp.gtu.f32, see setp_lt().
__device__ inline bool setp_le(float x, float y) {
  unsigned result;
  asm("{\n.reg .pred p;\nsetp.gtu.f32 p, %1, %2;\nselp.u32 %0, 0, 1, p;\n}"
      : "=r"(result)
      : "f"(x), "f"(y));
  return result != 0;
}

// setp.eq.f32: false for NaN
__device__ inline bool setp_eq(float x, float y) {
  unsigned result;
  asm("{\n.reg .pred p;\nsetp.eq.f32 p, %1, %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(result)
      : "f"(x), "f"(y));
  return result != 0;
}

// cvt.rzi.s32.f32: truncates to an integer and saturates; NaN becomes 0.
__device__ inline int cvt_rzi_s32(float x) {
  int result;
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

// fma.rz.ftz.f32: rounds toward zero, so that a result out of range becomes the largest finite
// number. Unlike the functions above it flushes subnormal numbers to zero.
__device__ inline float fma_rz(float x, float y, float z) {
  float result;
  asm("fma.rz.ftz.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
}

}  // namespace ptx
