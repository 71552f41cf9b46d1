// PTX wrapper for named barriers, which synchronize a subset of a CTA's warps.
#pragma once

namespace ptx {

// barrier.sync.aligned: synchronizes `threads` threads (whole warps) by named barrier `barrier`,
// from 1 to 15.
__device__ inline void barrier_sync_aligned(int barrier, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ptx
