// Operations on accumulator fragments, which mma and wgmma lay out alike: of every eight columns a
// lane holds two, in two rows that are eight apart. Four lanes hold a row. `row` below points to a
// lane's part of one row: float [4 j + c] is column 8 j + lane % 4 * 2 + c of the product.
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

// Return the maximum and the sum over the four lanes that hold a row.
__device__ inline float max_of_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float sum_of_lanes(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Multiplies a row by `factor`. Subnormals are not flushed, so a factor of 1 preserves all bits.
template <int column_tiles>
__device__ void scale_row(float* row, float factor) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) row[4 * j + c] = ptx::mul_rn(row[4 * j + c], factor);
  }
}

// Sets the columns from `first` on to `value`; columns are counted from the lane's first column.
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

// Sets the columns before `first` to `value`; columns are counted from the lane's first column.
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

// Writes the lane's part of a row of `Dim` columns; row[4 j + c] goes to column(j, c).
template <int column_tiles, int Dim, class Column>
__device__ void write_row(float* target, const float* row, Column column) {
#pragma unroll
  for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int target_column = column(j, c);
      if (target_column < Dim) target[target_column] = row[4 * j + c];
    }
  }
}
