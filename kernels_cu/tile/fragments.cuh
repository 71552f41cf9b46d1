// Accumulator fragments, of mma and of wgmma alike: of each eight columns a lane has two, in two
// rows eight apart. Four lanes share a row. `row` below is a lane's part of one: floats [4 j + c],
// the columns 8 j + lane % 4 * 2 + c where the product has them in order.
#pragma once

#include "ptx/base.cuh"

template <int row_tiles, int column_tiles>
__device__ void clear(float (&fragments)[row_tiles][column_tiles][4]) {
#pragma unroll
  for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
    for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) fragments[i][j][c] = 0;
    }
  }
}

// Over the four lanes of a row.
__device__ inline float max_of_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float sum_of_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Nothing is flushed to zero: a row that is multiplied by 1 keeps its bits.
template <int column_tiles>
__device__ void scale_row(float* row, float factor) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) row[4 * j + c] = ptx::mul_rn(row[4 * j + c], factor);
  }
}

// Sets the columns from `first` on, counted from the lane's first.
template <int column_tiles>
__device__ void fill_row_from(float* row, int first, float value) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (8 * j + c >= first) row[4 * j + c] = value;
    }
  }
}

// And those before `first`.
template <int column_tiles>
__device__ void fill_row_before(float* row, int first, float value) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (8 * j + c < first) row[4 * j + c] = value;
    }
  }
}

// Writes the lane's part of a row of Dim columns; [4 j + c] is column(j, c).
template <int column_tiles, int Dim, class Column>
__device__ void write_row(float* target, const float* row, Column column) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = column(j, c);
      if (at < Dim) target[at] = row[4 * j + c];
    }
  }
}
