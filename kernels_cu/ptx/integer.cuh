// PTX wrappers for integer arithmetic: one inline function per instruction.
#pragma once

namespace ptx {

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

}  // namespace ptx
