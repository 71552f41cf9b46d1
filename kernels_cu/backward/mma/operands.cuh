// Products of a warp. The right operand is some of the columns of a tile in shared memory. The left
// one is in registers, or in a tile in shared memory that is read as stored or transposed. Elements
// are 16-bit, or float32 components: first all big components of a row, then all small ones.
#pragma once

#include "backward/preprocess/float32_fp16x2.cuh"
#include "ptx/base.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

// Left operand of one k step: `row_tiles` tiles of 16 rows.
template <int row_tiles>
using LeftStep = unsigned[row_tiles][4];

// Packs the column tiles 2 * step and 2 * step + 1 of `scores` into a left operand.
template <class Element, int row_tiles, int column_tiles>
__device__ void pack_step(LeftStep<row_tiles>& left,
                          const float (&scores)[row_tiles][column_tiles][4], int step) {
#pragma unroll
  for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&values)[4] = scores[i][2 * step + half];
      left[i][2 * half] = pack<Element>(values[0], values[1]);
      left[i][2 * half + 1] = pack<Element>(values[2], values[3]);
    }
  }
}

// Splits the same column tiles of float32 `scores`, below 2^15, into two left operands.
template <int row_tiles, int column_tiles>
__device__ void split_step(LeftStep<row_tiles>& big, LeftStep<row_tiles>& small,
                           const float (&scores)[row_tiles][column_tiles][4], int step) {
#pragma unroll
  for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* values = scores[i][2 * step + r / 2] + 2 * (r % 2);
      const SplitPair pair = SplitPair::split(values[0], values[1]);
      big[i][r] = pair.big;
      small[i][r] = pair.small;
    }
  }
}

// Shared-memory tile that warps write from accumulators, and read as stored or transposed.
template <class Element, int Columns>
struct Exchange {
  using Layout = SwizzledRows<Element, Columns>;

  // Writes a left operand to the rows from `row` on and the 16 columns from 16 * `step` on.
  template <int row_tiles>
  __device__ static void write(unsigned shared, const LeftStep<row_tiles>& left, int row,
                               int step) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#if __CUDA_ARCH__ >= 900
      ptx::stmatrix_x4(lane_address(shared, row, step) + 16 * i * Layout::row_bytes, left[i]);
#else
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write_chunk(shared, left[i][2 * half], left[i][2 * half + 1], row + 16 * i,
                    2 * step + half);
      }
#endif
    }
  }

  // Writes eight columns of a left operand, as the chunk of index `chunk`, to the 16 rows from
  // `row` on. `low` is the lane's pair of elements in the first eight rows, and `high` that in the
  // other rows.
  __device__ static void write_chunk(unsigned shared, unsigned low, unsigned high, int row,
                                     int chunk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::st_shared(shared + Layout::offset(row + 8 * half + lane / 4, chunk) + lane % 4 * 4,
                     half == 0 ? low : high);
    }
  }

  // Reads a left operand that another warp has written by `write()`.
  template <int row_tiles>
  __device__ static void read(LeftStep<row_tiles>& left, unsigned shared, int row, int step) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      ptx::ldmatrix_x4(left[i], lane_address(shared, row, step) + 16 * i * Layout::row_bytes);
    }
  }

  // Reads the transpose of the 16 rows from `row` on and the columns from 16 * `column_step` on.
  template <int row_tiles>
  __device__ static void read_transposed(LeftStep<row_tiles>& left, unsigned shared, int row,
                                         int column_step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      const int chunk = 2 * (column_step + i) + lane / 8 % 2;
      ptx::ldmatrix_x4_trans(left[i], shared + row * Layout::row_bytes +
                                          Layout::offset(lane % 8 + lane / 16 * 8, chunk));
    }
  }

 private:
  // Returns the address that a lane passes to ldmatrix and stmatrix for a left operand.
  __device__ static unsigned lane_address(unsigned shared, int row, int step) {
    const int lane = threadIdx.x % 32;
    return shared + row * Layout::row_bytes + Layout::offset(lane % 16, 2 * step + lane / 16);
  }
};

// Columns of a tile that one of `warps` warps takes as its right operand: 16 of every 16 * `warps`.
template <class Element, class Layout, int Columns, int warps>
struct ColumnSlice {
  static constexpr int steps = Columns / 16 / warps;
  static_assert(steps * 16 * warps == Columns, "all warps process equally many columns");

  // Returns the lane's address for the functions below. `warp` is its index among `warps` warps.
  __device__ static unsigned lane_address(unsigned shared, int warp) {
    const int lane = threadIdx.x % 32;
    return shared + Layout::offset(lane % 16, 2 * warp + lane / 16);
  }

  // Accumulates sums += left B over `k_steps` steps of 16 rows of B. `b` is the `lane_address()` of
  // the first rows, and `read_left(left, step)` reads the left operand of a step. `sums` holds all
  // or some of the warp's columns, starting at column 16 * `first`. Operands are read from shared
  // memory during the products before theirs, because few warps hide each other's latency.
  template <int k_steps, int row_tiles, int column_tiles, class ReadLeft>
  __device__ static void multiply(float (&sums)[row_tiles][column_tiles][4], ReadLeft read_left,
                                  unsigned b, int first = 0) {
    constexpr int count = column_tiles / 2;
    LeftStep<row_tiles> left[2];
    unsigned right[2][4];
    const auto read_right = [&](int number) {
      ptx::ldmatrix_x4_trans(right[number % 2],
                             Layout::advance(b, 16 * (number / count),
                                             2 * warps * (first + number % count)));
    };
    read_left(left[0], 0);
    read_right(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
#pragma unroll
      for (int column = 0; column < count; ++column) {
        const int current = step * count + column;
        if (current + 1 < k_steps * count) read_right(current + 1);
        if (column == 0 && step + 1 < k_steps) read_left(left[(step + 1) % 2], step + 1);
        const unsigned (&four)[4] = right[current % 2];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<Element>(sums[i][2 * column], left[step % 2][i], four[0], four[1]);
          mma<Element>(sums[i][2 * column + 1], left[step % 2][i], four[2], four[3]);
        }
      }
    }
  }

  // For float32 components: accumulates sums[i] += factor(i) (left B)[i], i a row tile. The product
  // over all 16 * `depth` rows of B is summed separately, and then added. `first` has the same
  // meaning as in `multiply()`.
  template <int row_tiles, int column_tiles, int depth, class Factor>
  __device__ static void add_product(float (&sums)[row_tiles][column_tiles][4],
                                     const LeftStep<row_tiles> (&left)[depth][2], unsigned b,
                                     Factor factor, int first = 0) {
#pragma unroll
    for (int step = 0; step < column_tiles / 2; ++step) {
      float product[row_tiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < depth; ++k) {
        unsigned right[2][4];
#pragma unroll
        for (int component = 0; component < 2; ++component) {
          ptx::ldmatrix_x4_trans(
              right[component],
              Layout::advance(b, 16 * k, 2 * warps * (first + step) + component * Columns / 8));
        }
        multiply_components(product, left[k], right);
      }
      add_scaled(sums, 2 * step, product, factor);
    }
  }

  // Returns the column, in the tile, of the lane's first element of sums[i][j], for warp `warp`.
  __device__ static int column(int j, int warp) {
    return (j / 2 * warps + warp) * 16 + j % 2 * 8 + threadIdx.x % 4 * 2;
  }
};

#endif  // __CUDA_ARCH__ >= 800
