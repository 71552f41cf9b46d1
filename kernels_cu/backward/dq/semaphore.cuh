// Ordered accumulation: CTAs add to sums in a fixed order, so that results are bitwise equal if a
// call is repeated.
//
// Each tile of sums has a semaphore, which holds the index of the CTA that may add next. That CTA
// adds, and then increments the semaphore. A CTA waits only for CTAs of smaller blockIdx, which the
// hardware starts first and runs to their end, so some CTA can always make progress. CTAs that have
// many KV tiles fetch them in the same order (hopper/kv_tiles.cuh). Waiting is rare: CTAs of
// neighbouring blockIdx belong to different heads, and the CTAs of a head iterate over its tiles in
// the same order, each one step after its predecessor.
#pragma once

#include "ptx/ordered_add.cuh"

#if __CUDA_ARCH__ >= 800

// One thread of a CTA operates the semaphores. CTA barriers and mbarriers order it with the CTA's
// other threads.
//
//   semaphore_peek     reads the semaphore early, to hide the latency of the load
//   semaphore_release  lets the next CTA add, after a barrier of all threads that added to the tile
//   semaphore_wait     waits for the tile, before a barrier of all threads that will add to it
//
// The fence in `semaphore_release` also makes the earlier load in `semaphore_peek` an acquire.
__device__ inline int semaphore_peek(const int* semaphore) {
  return ptx::ld_relaxed_gpu(semaphore);
}

// Increments the semaphore at `semaphore`. If `semaphore` is null, only executes the fence.
__device__ inline void semaphore_release(int* semaphore) {
  ptx::fence_acq_rel_gpu();
  if (semaphore != nullptr) ptx::red_add_relaxed_gpu(semaphore, 1);
}

// Waits until the semaphore is `order_index`. `current` is what `semaphore_peek` returned.
__device__ inline void semaphore_wait(const int* semaphore, int order_index, int current) {
  if (current == order_index) return;
  while (ptx::ld_acquire_gpu(semaphore) != order_index) {
  }
}

#endif  // __CUDA_ARCH__ >= 800
