// Parts of CUDA that whole kernels need on the host, in addition to those of cuda_on_cpu.h. The
// translation unit of a kernel includes this header first.
#pragma once

#include "cuda_on_cpu.h"
// The next header is tests/mods/on_cpu/cuda.h.
#include "../../mods/on_cpu/cuda.h"

#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::exp2, std::log2, std::fma;

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdividef(float x, float y) { return x / y; }
inline bool __all_sync(unsigned, bool x) { return __ballot_sync(~0u, x) == ~0u; }
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }

// Returns whether x is true in any thread of the CTA.
inline int __syncthreads_or(int x) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= x;
  __syncthreads();
  return any;
}

// Dynamic shared memory, which kernels declare as an external array of one of these names.
alignas(1024) unsigned char shared_memory[232448];
asm(".globl shared\n.set shared, shared_memory");

inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - shared_memory);
}

// Runs kernel() for the CTAs of a grid, one by one. Shared memory is filled with NaN before each.
inline void run_grid(int blocks, int threads, const std::function<void()>& kernel) {
  gridDim.x = blocks;
  for (int block = 0; block < blocks; ++block) {
    std::memset(shared_memory, 0xff, sizeof shared_memory);
    blockIdx = {unsigned(block), 0, 0};
    run_block(threads, kernel);
  }
}
