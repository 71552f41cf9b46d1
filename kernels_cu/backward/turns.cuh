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

// Four floats of a block that has its turn. The first stores, so that nothing clears the sums.
__device__ inline void add_in_turn(float* sums, const float (&x)[4], int turn) {
#if __CUDA_ARCH__ >= 900
  if (turn == 0) {
    ptx::st_global_v4(sums, x);
  } else {
    ptx::red_add_v4(sums, x);
  }
#else
  float sum[4] = {};
  if (turn != 0) ptx::ld_global_cg_v4(sum, sums);
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] += x[c];
  ptx::st_global_v4(sums, sum);
#endif
}

#endif  // __CUDA_ARCH__ >= 800
