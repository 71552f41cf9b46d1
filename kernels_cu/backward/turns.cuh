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

// To be called by one thread; a barrier tells the others.
__device__ inline void await_turn(const int* counter, int turn) {
  if (turn == 0) return;
  while (ptx::ld_acquire_gpu(counter) != turn) {
  }
}

// By one thread, behind a barrier of all that have added.
__device__ inline void pass_turn(int* counter, int turn) {
  ptx::st_release_gpu(counter, turn + 1);
}

#endif  // __CUDA_ARCH__ >= 800
