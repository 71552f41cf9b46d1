// Wrappers that control where the compiler computes and holds 32-bit values; they compute nothing.
#pragma once

namespace ptx {

// Forces the compiler to have computed the values at this point, and to treat them as new values
// afterwards. Needed around wgmma, whose asynchronous writes to registers the compiler cannot see.
template <int N>
__device__ inline void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ inline void pin(unsigned (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// mov.b32: copies to another register; the compiler cannot move the copy elsewhere.
__device__ inline unsigned mov(unsigned x) {
  unsigned result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(x) : "memory");
  return result;
}

}  // namespace ptx
