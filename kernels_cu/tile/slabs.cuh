// Shared-memory tiles that the copy engine writes and wgmma reads.
#pragma once

#include "ptx/base.cuh"
#include "tile/layout.cuh"

// Rows x Columns 16-bit elements. The columns are cut into slabs; a slab holds one line of 128 or
// 64 bytes for each row, its 16-byte chunks XORed with the row as the copy engine's swizzle of that
// width does, so that eight rows' chunks of one column lie in eight different bank groups. Each
// slab is one box of the tensor map; what lies past the tensor's columns or rows arrives as zeros.
template <int Rows, int Columns>
struct SlabTile {
  static constexpr int columns = round_up(Columns, 32);
  static constexpr int line_bytes = columns % 64 == 0 ? 128 : 64;
  static constexpr int line_columns = line_bytes / 2;
  static constexpr int slabs = columns / line_columns;
  static constexpr int slab_bytes = Rows * line_bytes;
  static constexpr int bytes = slabs * slab_bytes;

  static_assert(Rows % 16 == 0, "slabs are whole repetitions of the swizzle");

  // A step is 16 columns as k; in bytes from the tile's beginning.
  static constexpr int column_step(int step) {
    constexpr int steps_per_line = line_columns / 16;
    return step / steps_per_line * slab_bytes + step % steps_per_line * 32;
  }

  // Of the 16-byte chunk first + next of a row, with next 0 or 1; in bytes from the row's line in
  // the first slab.
  __device__ static int chunk_offset(int row, int first, int next) {
    constexpr int chunks = line_bytes / 16;
    const int phase = line_bytes == 128 ? row % 8 : row / 2 % 4;
    return first / chunks * slab_bytes + ((first % chunks + next) ^ phase) * 16;
  }

  // A step is 16 rows as k.
  static constexpr int row_step(int step) { return step * 16 * line_bytes; }

  // Rows from `begin` on of the tile at this address become zeros. By one warp.
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

  // Clears one row by a single thread.
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

  // Matrix descriptors (PTX ISA, "Matrix-descriptor format for wgmma") of the whole tile at address
  // 0, to which an address in units of 16 bytes is added. With k along the columns:
  static constexpr unsigned long long k_along_columns() { return descriptor(16, 8 * line_bytes); }

  // With k along the rows, and n across the slabs:
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
