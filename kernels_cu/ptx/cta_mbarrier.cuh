// PTX wrappers for mbarriers that only threads of one CTA arrive at, on sm_80 and newer. For those
// with transaction counts, see sm90a.cuh.
#pragma once

#if __CUDA_ARCH__ >= 800

namespace ptx {

// mbarrier.init: initializes a barrier whose phases complete after `count` arrivals.
__device__ inline void cta_mbarrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// mbarrier.arrive: releases what this thread observed and wrote before.
__device__ inline void cta_mbarrier_arrive(unsigned barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

// mbarrier.test_wait.parity: waits until the phase of that parity is complete, and acquires what
// its arrivals released.
__device__ inline void cta_mbarrier_wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "wait_for_phase:\n"
      "mbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n"
      "@!complete bra wait_for_phase;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
