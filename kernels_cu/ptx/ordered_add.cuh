// PTX wrappers for ordered accumulation into global memory by several CTAs.
#pragma once

#include "ptx/base.cuh"

#if __CUDA_ARCH__ >= 800

namespace ptx {

// ld.acquire.gpu: if a release stored the loaded value, the writes before that release are visible
// to this thread's later accesses.
__device__ inline int ld_acquire_gpu(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// ld.relaxed.gpu: a load that does not order other accesses.
__device__ inline int ld_relaxed_gpu(const int* global) {
  int x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// red.relaxed.gpu.add
__device__ inline void red_add_relaxed_gpu(int* global, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// fence.acq_rel.gpu: with this fence between, a later relaxed add of this thread releases what its
// CTA wrote before the last barrier, and an earlier relaxed load of this thread acquires.
__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// st.global.v4.f32
__device__ inline void st_global_v4(float* global, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// ld.global.cg.v4.f32: loads from L2, because L1 may hold stale data that other SMs have changed.
__device__ inline void ld_global_cg_v4(float (&x)[4], const float* global) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(global)
               : "memory");
}

#if __CUDA_ARCH__ >= 900

// red.global.add.v4.f32: adds four floats, each rounded to nearest, and returns nothing.
__device__ inline void red_add_v4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// cp.async.bulk: copies from shared to global memory; addresses and `bytes` are multiples of 16.
__device__ inline void cp_async_bulk_store(float* global, unsigned shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.add.f32: adds the floats in `bytes` bytes of shared memory to those at
// `global`. Each sum is rounded to nearest.
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

// cp.async.bulk.wait_group.read: waits until at most `Pending` of this thread's groups still read
// shared memory.
template <int Pending>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// cp.async.bulk.wait_group: waits until all writes of this thread's groups are complete.
__device__ inline void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// fence.proxy.async.global: orders this thread's semaphore accesses with its bulk copies, which
// access global memory through the async proxy.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
