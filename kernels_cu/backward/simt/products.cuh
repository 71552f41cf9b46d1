// Matrix products on CUDA cores by `side` x `side` threads. The rows and the columns that a thread
// computes are `side` apart. Operands pass through shared memory, one slice of head_dim at a time.
#pragma once

#include "backward/inputs/compensated_sum.cuh"
#include "backward/params.cuh"
#include "tile/element.cuh"

// Rows of one head in global memory.
template <class Element>
struct HeadRows {
  const Element* begin;
  int64 stride;
  int count;
};

// Return the rows of a sequence in q or dout, and in k or v.
template <class Element>
__device__ HeadRows<Element> query_rows(const Tensor& tensor, const Sequence& sequence, int head) {
  return {tensor.head<const Element>(sequence.q_batch, head) + sequence.q_first * tensor.row_stride,
          tensor.row_stride, sequence.seqlen_q};
}
template <class Element>
__device__ HeadRows<Element> key_rows(const Tensor& tensor, const Sequence& sequence, int head) {
  return {tensor.head<const Element>(sequence.k_batch, head) + sequence.k_first * tensor.row_stride,
          tensor.row_stride, sequence.seqlen_k};
}

template <class Element, int Rows, int Columns>
struct SimtProducts {
  using T = Accumulator<Element>;
  static constexpr int side = 16;
  static constexpr int threads = side * side;
  static constexpr int rows_per_thread = Rows / side;
  static constexpr int columns_per_thread = Columns / side;
  static_assert(Rows % side == 0 && Columns % side == 0, "whole rows and columns of threads");

  // Rows of a slice are padded by one element, so that a warp reads from different banks.
  static constexpr int slice = 32;
  static constexpr int stride = slice + 1;
  static constexpr int dims_per_thread = slice / side;
  struct Shared {
    T rows[Rows * stride];
    T columns[Columns * stride];
  };

  __device__ static int x() { return threadIdx.x % side; }
  __device__ static int y() { return threadIdx.x / side; }

  // Loads the slice of head_dim columns from `begin_dim` on, of the rows from `first` on. Elements
  // past the last row or past column `Dim` become 0. No thread may still read `target`. Returns
  // whether all elements that the thread has loaded are finite.
  template <int Dim, int Size>
  __device__ static bool load(T (&target)[Size], const HeadRows<Element>& source, int first,
                              int begin_dim) {
    bool is_clean = true;
    for (int i = threadIdx.x; i < Size / stride * slice; i += threads) {
      const int row = first + i / slice, d = begin_dim + i % slice;
      const bool exists = row < source.count && d < Dim;
      const T x = exists ? widen(source.begin[row * source.stride + d]) : T(0);
      is_clean = is_clean && is_finite(x);
      target[i / slice * stride + i % slice] = x;
    }
    return is_clean;
  }

  // Computes product = rows columns^T over `Dim` columns of head_dim.
  template <int Dim>
  __device__ static void multiply(T (&product)[rows_per_thread][columns_per_thread], Shared& shared,
                                  const HeadRows<Element>& rows, int first_row,
                                  const HeadRows<Element>& columns, int first_column) {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < columns_per_thread; ++j) product[i][j] = 0;
    }
#pragma unroll 1
    for (int begin = 0; begin < Dim; begin += slice) {
      __syncthreads();
      load<Dim>(shared.rows, rows, first_row, begin);
      load<Dim>(shared.columns, columns, first_column, begin);
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < slice; ++d) {
        T left[rows_per_thread];
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
          left[i] = shared.rows[(y() + i * side) * stride + d];
        }
#pragma unroll
        for (int j = 0; j < columns_per_thread; ++j) {
          const T right = shared.columns[(x() + j * side) * stride + d];
#pragma unroll
          for (int i = 0; i < rows_per_thread; ++i) {
            product[i][j] = fma(left[i], right, product[i][j]);
          }
        }
      }
    }
  }

  // Accumulates sums += weights columns. `weights` is in shared memory, with a row stride of
  // `Columns` + 1. Each tile is summed separately, so that long sums lose less to rounding. With
  // `Selects`, a weight of 0 means a masked pair. It is left out, because 0 times NaN is NaN.
  template <int Dim, bool Selects, int Slices>
  __device__ static void add(T (&sums)[Slices][rows_per_thread][dims_per_thread], Shared& shared,
                             const T* weights, const HeadRows<Element>& columns, int first_column) {
#pragma unroll
    for (int s = 0; s < Slices; ++s) {
      __syncthreads();
      const bool is_clean = load<Dim>(shared.columns, columns, first_column, s * slice);
      T partial[rows_per_thread][dims_per_thread] = {};
      const auto accumulate = [&](auto select) {
#pragma unroll 4
        for (int c = 0; c < Columns; ++c) {
          T right[dims_per_thread];
#pragma unroll
          for (int d = 0; d < dims_per_thread; ++d) {
            right[d] = shared.columns[c * stride + x() + d * side];
          }
#pragma unroll
          for (int i = 0; i < rows_per_thread; ++i) {
            const T left = weights[(y() + i * side) * (Columns + 1) + c];
#pragma unroll
            for (int d = 0; d < dims_per_thread; ++d) {
              partial[i][d] = fma(left, select(left, right[d]), partial[i][d]);
            }
          }
        }
      };
      bool selects = false;
      if constexpr (Selects) {
        selects = __syncthreads_or(!is_clean);
      } else {
        __syncthreads();
      }
      if (selects) {
        accumulate([](T left, T right) { return left == 0 ? T(0) : right; });
      } else {
        accumulate([](T, T right) { return right; });
      }
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
        for (int d = 0; d < dims_per_thread; ++d) sums[s][i][d] += partial[i][d];
      }
    }
  }
};
