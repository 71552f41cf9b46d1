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

// cp.async.bulk: bytes of shared memory to global memory, both on 16 bytes.
__device__ inline void cp_async_bulk_store(float* global, unsigned shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.add.f32: the same, added to what is there, each rounded to nearest.
__device__ inline void cp_reduce_async_bulk_add(float* global, unsigned shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// cp.async.bulk.commit_group
__device__ inline void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read: until at most Pending of this thread's groups still read shared
// memory.
template <int Pending>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// cp.async.bulk.wait_group: until all of this thread's groups have written.
__device__ inline void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// fence.proxy.async of global memory: between what a thread has learnt or tells, and what the copy
// engine does for it.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
