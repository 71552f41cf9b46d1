// Rows of a tile that TMA has loaded, as the left operand of wgmma in registers.
#pragma once

#include "ptx/base.cuh"

// Copies the first `count` / 4 k steps of the warpgroup's 64 rows from `first_row` on of the tile at
// shared address `tile`.
template <class Tile, int count>
__device__ void copy_row_fragments(unsigned tile, int first_row, unsigned (&fragments)[count]) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const unsigned address = tile + (first_row + row) * Tile::box_row_bytes;
#pragma unroll
  for (int step = 0; step < count / 4; ++step) {
    unsigned fragment[4];
    ptx::ldmatrix_x4(fragment, address + Tile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[4 * step + i] = fragment[i];
  }
}
