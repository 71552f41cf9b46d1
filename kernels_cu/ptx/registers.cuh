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

// Forces the values to be computed before the next wait or barrier. Unlike `pin`, it also binds the
// assembler, which moves arithmetic below a wait for asynchronous products: the values decide
// whether an instruction with a side effect, nanosleep, is executed. It practically never is.
template <int N>
__device__ inline void compute_before_wait(const unsigned (&x)[N]) {
  unsigned all = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) all ^= x[i];
  asm volatile(
      "{\n"
      ".reg .pred sleeps;\n"
      "setp.eq.u32 sleeps, %0, 0x5a3c96e1;\n"
      "@sleeps nanosleep.u32 0;\n"
      "}"
      :
      : "r"(all)
      : "memory");
}

// mov.b32: copies to another register; the compiler cannot move the copy elsewhere.
__device__ inline unsigned mov(unsigned x) {
  unsigned result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(x) : "memory");
  return result;
}

}  // namespace ptx
