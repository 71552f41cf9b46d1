// Shared-memory tiles that TMA writes and wgmma reads.
#pragma once

#include "ptx/base.cuh"
#include "tile/layout.cuh"

// Tile of `Rows` x `Columns` 16-bit elements, stored as TMA boxes. Each of the `slabs` boxes holds
// `line_bytes` (128 or 64) bytes of every row, in the TMA swizzle of that width, which avoids bank
// conflicts. TMA fills elements past the tensor's columns or rows with zeros.
template <int Rows, int Columns>
struct SlabTile {
  static constexpr int columns = round_up(Columns, 32);
  static constexpr int line_bytes = columns % 64 == 0 ? 128 : 64;
  static constexpr int line_columns = line_bytes / 2;
  static constexpr int slabs = columns / line_columns;
  static constexpr int slab_bytes = Rows * line_bytes;
  static constexpr int bytes = slabs * slab_bytes;

  static_assert(Rows % 16 == 0, "slabs are whole repetitions of the swizzle");

  // Returns the byte offset in the tile of k step `step` (16 columns), if k runs along the columns.
  static constexpr int column_step(int step) {
    constexpr int steps_per_line = line_columns / 16;
    return step / steps_per_line * slab_bytes + step % steps_per_line * 32;
  }

  // Returns the byte offset of 16-byte chunk first + next of a row (`next` is 0 or 1), relative to
  // the start of the row in the first box.
  __device__ static int chunk_offset(int row, int first, int next) {
    constexpr int chunks = line_bytes / 16;
    const int phase = line_bytes == 128 ? row % 8 : row / 2 % 4;
    return first / chunks * slab_bytes + ((first % chunks + next) ^ phase) * 16;
  }

  // Returns the byte offset in the tile of k step `step` (16 rows), if k runs along the rows.
  static constexpr int row_step(int step) { return step * 16 * line_bytes; }

  // Sets the rows from `begin` on of the tile at shared address `tile` to zero. Called by one warp.
  __device__ static void clear_rows(unsigned tile, int begin) {
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
#pragma unroll 1
      for (int byte = begin * line_bytes + threadIdx.x % 32 * 16; byte < slab_bytes;
           byte += 32 * 16) {
        ptx::st_shared_v4(tile + slab * slab_bytes + byte, zeros);
      }
    }
  }

  // Sets one row to zero. Called by a single thread.
  __device__ static void clear_row(unsigned tile, int row) {
    const unsigned zeros[4] = {};
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
#pragma unroll 1
      for (int byte = 0; byte < line_bytes; byte += 16) {
        ptx::st_shared_v4(tile + slab * slab_bytes + row * line_bytes + byte, zeros);
      }
    }
  }

  // Return the matrix descriptor (PTX ISA, "Matrix-descriptor format for wgmma") of a tile at
  // address 0; add the tile's address in units of 16 bytes. Here k runs along the columns.
  static constexpr unsigned long long k_along_columns() { return descriptor(16, 8 * line_bytes); }

  // Here k runs along the rows and n along the columns, across the boxes.
  static constexpr unsigned long long k_along_rows() {
    return descriptor(slab_bytes, 8 * line_bytes);
  }

 private:
  static constexpr unsigned long long descriptor(int leading_bytes, int stride_bytes) {
    constexpr unsigned long long swizzle = line_bytes == 128 ? 1 : 2;
    return swizzle << 62 | static_cast<unsigned long long>(stride_bytes / 16) << 32 |
           static_cast<unsigned long long>(leading_bytes / 16) << 16;
  }
};
