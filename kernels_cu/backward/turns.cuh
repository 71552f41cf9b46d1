// Ordered accumulation: CTAs add to sums in a fixed order, so that same inputs give same bits.
//
// Each tile of sums has a semaphore, which holds the index of the CTA that may add next. That CTA
// adds, and then increments the semaphore. A CTA waits only for CTAs of smaller blockIdx, which the
// hardware starts first and does not stop, so some CTA can always make progress. Waiting is rare:
// neighbouring CTAs belong to different heads, and the CTAs of a head iterate over its tiles in the
// same order, each one step after its predecessor.
#pragma once

#include "ptx/adds.cuh"

#if __CUDA_ARCH__ >= 800

// One thread of a CTA operates the semaphores; barriers order it with the other threads.
//
//   look_at_turn   reads the semaphore early, to hide the latency of the load
//   pass_turn      releases the previous tile, after a barrier of all threads that added to it
//   await_turn     waits for a tile, before a barrier of all threads that will add to it
//
// The fence in `pass_turn` also makes the earlier load in `look_at_turn` an acquire.
__device__ inline int look_at_turn(const int* counter) { return ptx::ld_relaxed_gpu(counter); }

// Increments the semaphore at `counter`. If `counter` is null, only executes the fence.
__device__ inline void pass_turn(int* counter) {
  ptx::fence_acq_rel_gpu();
  if (counter != nullptr) ptx::red_add_relaxed_gpu(counter, 1);
}

// Waits until the semaphore is `turn`. `found` is what `look_at_turn` returned.
__device__ inline void await_turn(const int* counter, int turn, int found) {
  if (found == turn) return;
  while (ptx::ld_acquire_gpu(counter) != turn) {
  }
}

#endif  // __CUDA_ARCH__ >= 800
