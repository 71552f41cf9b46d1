// Query rows of a warp as operand fragments of Q.K^T, from registers or from shared memory.
#pragma once

#include "ptx/base.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ >= 800

// Operand fragments of `row_tiles` tiles of 16 rows. A step is two 16-byte chunks of a row, the k
// of one mma: 16 columns of 16-bit elements or 8 of float32. `Keep` keeps all steps in registers.
template <class Layout, int row_tiles, int steps, bool Keep>
struct QueryFragments {
  static constexpr int kept_steps = Keep ? steps : 1;
  unsigned kept[kept_steps][row_tiles][4];

  // Reads the fragments that stay in registers. `shared` is the address of the warp's first row.
  __device__ void keep(unsigned shared) {
#pragma unroll
    for (int step = 0; step < kept_steps; ++step) read(kept[step], shared, step);
  }

  __device__ void load(unsigned (&q)[row_tiles][4], unsigned shared, int step) const {
    if constexpr (Keep) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) q[i][r] = kept[step][i][r];
      }
    } else {
      read(q, shared, step);
    }
  }

 private:
  __device__ static void read(unsigned (&q)[row_tiles][4], unsigned shared, int step) {
    const int lane = threadIdx.x % 32;
    const unsigned address = shared + Layout::offset(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      ptx::ldmatrix_x4(q[i], Layout::advance(address, 16 * i, 2 * step));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
