// PTX wrappers for loads and conversions of 8-bit types, and for products and choices of bytes of
// integers: one inline function per instruction.
#pragma once

namespace ptx {

// ld.shared.v2.b32
__device__ inline void ld_shared_v2(unsigned (&x)[2], unsigned shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(shared)
               : "memory");
}

// ld.shared.v2.f32
__device__ inline void ld_shared_v2(float (&x)[2], unsigned shared) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x[0]), "=f"(x[1])
               : "r"(shared)
               : "memory");
}

// prmt.b32: selects four bytes. Hex digit i of `Digits` names the source of byte i: 0 to 3 are the
// bytes of x, 4 to 7 those of y.
template <unsigned Digits>
__device__ inline unsigned prmt(unsigned x, unsigned y) {
  unsigned chosen;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(x), "r"(y), "n"(Digits));
  return chosen;
}

// mul.wide.u32. The compiler multiplies by a constant above 2^31 with three instructions.
__device__ inline unsigned long long mul_wide_u32(unsigned x, unsigned y) {
#ifdef __CUDA_ARCH__
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
#else
  return static_cast<unsigned long long>(x) * y;
#endif
}

// prmt.b32 that replicates signs: the lower two bytes repeat the highest bit of byte `byte` of x,
// the upper two that of byte `byte` of y. `byte` must be a constant after unrolling.
__device__ inline unsigned prmt_sign_bytes(unsigned x, unsigned y, int byte) {
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(result)
      : "r"(x), "r"(y), "r"(0xcc88 + 0x1111 * byte));
  return result;
}

#if __CUDA_ARCH__ >= 800

// sub.rn.f16x2
__device__ inline unsigned sub_rn_f16x2(unsigned x, unsigned y) {
  unsigned result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

#endif  // __CUDA_ARCH__ >= 800

#if __CUDA_ARCH__ >= 890

// cvt.rn.f16x2.e4m3x2
__device__ inline unsigned cvt_rn_f16x2_e4m3x2(unsigned short x) {
  unsigned result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(x));
  return result;
}

// cvt.rn.satfinite.e4m3x2.f32: converts one number. Values out of range become the largest finite
// e4m3 number.
__device__ inline unsigned char cvt_rn_satfinite_e4m3_f32(float x) {
  unsigned short result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(0.0f), "f"(x));
  return static_cast<unsigned char>(result);
}

#endif  // __CUDA_ARCH__ >= 890

// cvt.rni.s32.f32: rounds to the nearest integer, ties to even. NaN becomes 0.
__device__ inline int cvt_rni_s32_f32(float x) {
  int result;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

}  // namespace ptx
