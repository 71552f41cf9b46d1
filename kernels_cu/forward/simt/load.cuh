// Copies of row tiles to shared memory, converted to the accumulator type.
#pragma once

#include "forward/simt/layout.cuh"
#include "ptx/base.cuh"
#include "scheduler/pages.cuh"

namespace simt {

// Copies rows [begin, begin + Rows) of one head into shared memory, converted to T. A
// row is read in units of `unit` elements. Columns from Dim to the end of the last unit are set to
// zero and not read. With `Checked`, so are rows from `end` on.
template <class Config, int Rows, int Dim, int Stride, bool Checked>
struct TileLoad {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;

  static constexpr int unit = L::unit;
  static constexpr int row_units = ceil_div(round_up(Dim, L::width), unit);
  static constexpr int lanes = row_units < Config::threads ? row_units : Config::threads;
  static constexpr int rows_at_once = Config::threads / lanes;
  static constexpr int passes = ceil_div(Rows, rows_at_once);
  static constexpr bool whole = row_units * unit == Dim;
#if __CUDA_ARCH__ >= 800
  static constexpr bool async = sizeof(Element) == sizeof(T);
#else
  static constexpr bool async = false;
#endif
  static_assert(row_units * unit <= Stride);

  __device__ static void run(T* shared, const Element* head, int64 row_stride, int begin, int end) {
    const int first_row = threadIdx.x / lanes;
    if (Config::threads % lanes != 0 && first_row >= rows_at_once) return;
    const Element* source = head + (begin + first_row) * row_stride;
#pragma unroll 4
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row + pass * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      const bool exists = !Checked || begin + row < end;
#pragma unroll
      for (int first = 0; first < row_units; first += lanes) {
        const int index = first + threadIdx.x % lanes;
        if (row_units % lanes != 0 && index >= row_units) continue;
        const int column = index * unit;
        copy(shared + row * Stride + column, exists ? source + column : head, column, exists);
      }
      source += rows_at_once * row_stride;
    }
  }

  // Like run(), for rows at the arbitrary addresses that row_at() returns. Several addresses are
  // looked up before the first row is copied, because a lookup may read memory.
  template <class RowAt>
  __device__ static void gather(T* shared, RowAt row_at) {
    constexpr int rows_per_batch = passes < 4 ? passes : 4;
    const int first_row = threadIdx.x / lanes;
    if (Config::threads % lanes != 0 && first_row >= rows_at_once) return;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass += rows_per_batch) {
      Row<Element> source[rows_per_batch];
#pragma unroll
      for (int i = 0; i < rows_per_batch; ++i) {
        source[i] = row_at(first_row + (pass + i) * rows_at_once);
      }
#pragma unroll
      for (int i = 0; i < rows_per_batch; ++i) {
        const int row = first_row + (pass + i) * rows_at_once;
        if (Rows % (rows_per_batch * rows_at_once) != 0 && row >= Rows) break;
#pragma unroll
        for (int first = 0; first < row_units; first += lanes) {
          const int index = first + threadIdx.x % lanes;
          if (row_units % lanes != 0 && index >= row_units) continue;
          const int column = index * unit;
          copy(shared + row * Stride + column, source[i].begin + column, column, source[i].exists);
        }
      }
    }
  }

  // Copies the unit at `column` of a row of Dim columns, or zeros if the row does not exist.
  __device__ static void copy(T* shared, const Element* source, int column, bool exists) {
#if __CUDA_ARCH__ >= 800
    if constexpr (async) {
      const int count = !exists ? 0 : whole ? unit : max(0, min(unit, Dim - column));
      ptx::cp_async<unit* int(sizeof(Element))>(ptx::shared_address(shared), source,
                                                count * int(sizeof(Element)));
      return;
    }
#endif
    // These conditions compare `column`. If they compared a clamped `count`, as above, ptxas of
    // CUDA 13.0 would generate wrong code that overwrites the predicate before its use.
    Vector<Element, unit> loaded = {};
    if (exists && (whole || column + unit <= Dim)) {
      loaded = *reinterpret_cast<const Vector<Element, unit>*>(source);
    } else if (exists && !whole) {
#pragma unroll
      for (int i = 0; i < unit; ++i) {
        if (column + i < Dim) loaded.data[i] = source[i];
      }
    }
    constexpr int part = unit < L::width ? unit : L::width;
    constexpr int parts = unit / part;
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      // If a thread writes two vectors, eight lanes write every other vector at a time. The upper
      // four lanes start with their odd vector, so that all eight together access all bank groups.
      const int vector_index = parts == 2 ? i ^ (threadIdx.x >> 2 & 1) : i;
      Vector<T, part> converted;
#pragma unroll
      for (int j = 0; j < part; ++j) {
        converted.data[j] = widen(parts == 2 && vector_index != i ? loaded.data[(i ^ 1) * part + j]
                                                                  : loaded.data[i * part + j]);
      }
      *reinterpret_cast<Vector<T, part>*>(shared + vector_index * part) = converted;
    }
  }
};

// Waits until this thread's copies have landed. Copies of other threads need a barrier after this.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
#endif
}

}  // namespace simt
