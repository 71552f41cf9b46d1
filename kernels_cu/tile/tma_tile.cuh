// Shared-memory tiles that TMA writes and wgmma reads.
#pragma once

#include "ptx/base.cuh"
#include "tile/layout.cuh"

// Tile of `Rows` x `Columns` 16-bit elements, stored as TMA boxes. Each of the `boxes` boxes holds
// `box_row_bytes` (128 or 64) bytes of every row, in the TMA swizzle of that width, which avoids
// bank conflicts. TMA fills elements past the tensor's columns or rows with zeros.
template <int Rows, int Columns, int BoxColumns = round_up(Columns, 32) % 64 == 0 ? 64 : 32>
struct TmaTile {
  static constexpr int columns = round_up(Columns, 32);
  static constexpr int box_columns = BoxColumns;
  static constexpr int box_row_bytes = 2 * box_columns;
  static constexpr int boxes = columns / box_columns;
  static constexpr int box_bytes = Rows * box_row_bytes;
  static constexpr int bytes = boxes * box_bytes;

  static_assert(box_row_bytes == 64 || box_row_bytes == 128, "a swizzle of this width exists");
  static_assert(columns % box_columns == 0, "whole boxes");
  static_assert(Rows % 16 == 0, "boxes contain whole repetitions of the swizzle pattern");

  // Returns the byte offset in the tile of k step `step` (16 columns), if k runs along the columns.
  static constexpr int column_step(int step) {
    constexpr int steps_per_box = box_columns / 16;
    return step / steps_per_box * box_bytes + step % steps_per_box * 32;
  }

  // Returns the byte offset of 16-byte chunk first + next of a row (`next` is 0 or 1), relative to
  // the start of the row in the first box.
  __device__ static int chunk_offset(int row, int first, int next) {
    constexpr int chunks = box_row_bytes / 16;
    const int phase = box_row_bytes == 128 ? row % 8 : row / 2 % 4;
    return first / chunks * box_bytes + ((first % chunks + next) ^ phase) * 16;
  }

  // Returns the byte offset in the tile of k step `step` (16 rows), if k runs along the rows.
  static constexpr int row_step(int step) { return step * 16 * box_row_bytes; }

  // Sets the rows from `begin` on of the tile at shared address `tile` to zero. Called by one warp.
  __device__ static void clear_rows(unsigned tile, int begin) {
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
#pragma unroll 1
      for (int byte = begin * box_row_bytes + threadIdx.x % 32 * 16; byte < box_bytes;
           byte += 32 * 16) {
        ptx::st_shared_v4(tile + box * box_bytes + byte, zeros);
      }
    }
  }

  // Sets one row to zero. Called by a single thread.
  __device__ static void clear_row(unsigned tile, int row) {
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
#pragma unroll 1
      for (int byte = 0; byte < box_row_bytes; byte += 16) {
        ptx::st_shared_v4(tile + box * box_bytes + row * box_row_bytes + byte, zeros);
      }
    }
  }

  // Return the matrix descriptor (PTX ISA, "Matrix-descriptor format for wgmma") of a tile at
  // address 0; add the tile's address in units of 16 bytes. Here k runs along the columns.
  static constexpr unsigned long long k_along_columns() {
    return descriptor(16, 8 * box_row_bytes);
  }

  // Here k runs along the rows and n along the columns, across the boxes.
  static constexpr unsigned long long k_along_rows() {
    return descriptor(box_bytes, 8 * box_row_bytes);
  }

 private:
  static constexpr unsigned long long descriptor(int leading_bytes, int stride_bytes) {
    constexpr unsigned long long swizzle = box_row_bytes == 128 ? 1 : 2;
    return swizzle << 62 | static_cast<unsigned long long>(stride_bytes / 16) << 32 |
           static_cast<unsigned long long>(leading_bytes / 16) << 16;
  }
};
