// Barriers of some of a block's warps: one inline function per PTX instruction.
#pragma once

namespace ptx {

// barrier.sync.aligned: of so many threads, all of their warps, by the barrier of a number from 1
// to 15.
__device__ inline void barrier_sync_aligned(int barrier, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ptx
