// What thread blocks that add to the same memory in turns need: one inline function per PTX
// instruction.
#pragma once

#include "ptx/base.cuh"

#if __CUDA_ARCH__ >= 800

namespace ptx {

// ld.acquire.gpu: what was written before the value was stored is seen by what follows.
__device__ inline int ld_acquire_gpu(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// ld.relaxed.gpu: orders nothing by itself.
__device__ inline int ld_relaxed_gpu(const int* global) {
  int x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// red.relaxed.gpu.add
__device__ inline void red_add_relaxed_gpu(int* global, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// fence.acq_rel.gpu: what the block wrote before its last barrier is seen by whoever sees what this
// thread adds relaxed behind it; and what was written before a value that this thread has loaded
// relaxed is seen by what follows.
__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// st.global.v4.f32
__device__ inline void st_global_v4(float* global, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// ld.global.cg.v4.f32: from L2, where other SMs write.
__device__ inline void ld_global_cg_v4(float (&x)[4], const float* global) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(global)
               : "memory");
}

#if __CUDA_ARCH__ >= 900

// red.global.add.v4.f32: each rounded to nearest, without an answer.
__device__ inline void red_add_v4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
