// PTX wrappers for copies with an L2 cache policy and for global memory that several CTAs access.
#pragma once

#include "ptx/base.cuh"

#if __CUDA_ARCH__ >= 800

namespace ptx {

// createpolicy.fractional.L2::evict_first: returns the cache policy for fraction 1.0.
__device__ inline unsigned long long l2_evict_first_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async with an L2 cache policy; see cp_async in base.cuh.
template <int Bytes>
__device__ inline void cp_async(unsigned shared, const void* global, int source_bytes,
                                unsigned long long policy) {
  if constexpr (Bytes == 16) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
        "l"(global), "r"(source_bytes), "l"(policy)
        : "memory");
  } else {
    static_assert(Bytes == 4 || Bytes == 8, "cp.async copies 4, 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(shared),
                 "l"(global), "n"(Bytes), "r"(source_bytes), "l"(policy)
                 : "memory");
  }
}

// ld.global as volatile asm: the compiler would sink a plain load below the copies that follow.
__device__ inline int ld_global(const int* global) {
  int x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}

// prefetch.global.L2
__device__ inline void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// atom.add.acq_rel.gpu: returns the old value. What this CTA wrote before its last barrier is
// visible to a thread that reads the sum with acquire semantics.
__device__ inline int atom_add_acq_rel(int* global, int x) {
  int old;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(global), "r"(x)
               : "memory");
  return old;
}

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
