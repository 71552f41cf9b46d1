// No instructions, or none that computes: where the compiler is to have 32-bit values.
#pragma once

namespace ptx {

// Values that the compiler must have computed before here, and takes for new ones from here on.
// Around asynchronous products, whose accumulators it believes ready at once.
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

// mov.b32: to another register, here and not where the compiler would have it.
__device__ inline unsigned mov(unsigned x) {
  unsigned result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(x) : "memory");
  return result;
}

}  // namespace ptx
