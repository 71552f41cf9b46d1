// Sums that thread blocks add to one after another, in one order: same inputs, same bits.
//
// Each tile of sums has a counter, which says whose turn it is. A block that has its turn adds, and
// passes the turn on. It waits for blocks of smaller blockIdx only, which the hardware starts
// first and does not stop, so that some block can always go on. Waiting is rare: neighbouring
// blocks are of different heads, and all walk through the tiles of a head in the same order, each a
// step behind the one whose turn it awaits.
#pragma once

#include "ptx/adds.cuh"

#if __CUDA_ARCH__ >= 800

// One thread of a block keeps its turns; barriers tell the others.
//
//   look_at_turn   early, as the answer takes its time
//   pass_turn      of the tile before, behind a barrier of all that have added to it
//   await_turn     before a barrier of all that will add
//
// The fence that passing a turn on takes serves the look before it as well.
__device__ inline int look_at_turn(const int* counter) { return ptx::ld_relaxed_gpu(counter); }

// A null counter stands for no turn.
__device__ inline void pass_turn(int* counter) {
  ptx::fence_acq_rel_gpu();
  if (counter != nullptr) ptx::red_add_relaxed_gpu(counter, 1);
}

// `found` is what the look found.
__device__ inline void await_turn(const int* counter, int turn, int found) {
  if (found == turn) return;
  while (ptx::ld_acquire_gpu(counter) != turn) {
  }
}

#endif  // __CUDA_ARCH__ >= 800
