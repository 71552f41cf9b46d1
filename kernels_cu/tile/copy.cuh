// Copies of tiles from global to shared memory by all threads of a CTA or of a warp.
#pragma once

#include "params.cuh"
#include "ptx/base.cuh"
#include "ptx/stream.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "scheduler/pages.cuh"

#if __CUDA_ARCH__ >= 800

// Copies `Rows` rows of `Columns` elements into a `Layout` of padded rows. Padding columns become
// zeros and, if `Ragged`, so do rows from `rows_left` on. Every row's address is a multiple of
// `Alignment` bytes. Rows with 2-byte alignment are copied synchronously, through registers.
//
// Each thread copies a fixed column and steps down the rows by adding to one pointer. The products
// row * row_stride of all copies are loop-invariant, and would take one register per copy.
template <class Layout, class Element, int Rows, int Columns, int Threads, int Alignment>
struct RowCopy {
  static constexpr int copy_bytes = Alignment >= 4 ? Alignment : 16;
  static constexpr int copy_elements = copy_bytes / int(sizeof(Element));
  static constexpr int copies_per_row = Layout::row_bytes / copy_bytes;
  static constexpr int copies_per_chunk = 16 / copy_bytes;
  static constexpr int columns_at_once = copies_per_row < Threads ? copies_per_row : Threads;
  static constexpr int rows_at_once = Threads / columns_at_once;
  static constexpr bool whole_rows = Columns * int(sizeof(Element)) == Layout::row_bytes;

  // Returns the source address of this thread's first copy; the tile starts at `global`. `thread`
  // is the index of the thread among the `Threads` threads.
  static __device__ const Element* source(const Element* global, int64 row_stride,
                                          unsigned thread = threadIdx.x) {
    return global + thread / columns_at_once * row_stride +
           thread % columns_at_once * copy_elements;
  }

  // Starts this thread's copies. `source` is the address that `source()` returned.
  template <bool Ragged>
  static __device__ void start(unsigned shared, const Element* source, int64 row_stride,
                               int rows_left, unsigned thread = threadIdx.x) {
    const int first_row = thread / columns_at_once;
    if (Threads % columns_at_once != 0 && first_row >= rows_at_once) return;
    // `left` is compared with compile-time constants below, so that no row index is computed.
    // `opaque()` makes the compiler recompute `left` for each tile, which saves a register.
    const int left = Ragged ? rows_left - ptx::opaque(thread) / columns_at_once : 0;
#pragma unroll
    for (int pass = 0; pass < (Rows + rows_at_once - 1) / rows_at_once; ++pass) {
      const int row = first_row + pass * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      copy_row(thread, shared, row, source, !Ragged || pass * rows_at_once < left);
      source += rows_at_once * row_stride;
    }
  }

  // Like `start()`, for rows at arbitrary addresses, which `row_at()` returns. Up to four addresses
  // are requested before the first copy, because `row_at()` may load from memory (a block table).
  template <class RowAt>
  static __device__ void gather(unsigned shared, RowAt row_at) {
    constexpr int passes = (Rows + rows_at_once - 1) / rows_at_once;
    constexpr int rows_per_batch = passes < 4 ? passes : 4;
    const int first_row = threadIdx.x / columns_at_once;
    if (Threads % columns_at_once != 0 && first_row >= rows_at_once) return;
#pragma unroll
    for (int begin = 0; begin < passes; begin += rows_per_batch) {
      Row<Element> rows[rows_per_batch];
#pragma unroll
      for (int i = 0; i < rows_per_batch; ++i) {
        rows[i] = row_at(first_row + (begin + i) * rows_at_once);
      }
#pragma unroll
      for (int i = 0; i < rows_per_batch; ++i) {
        const int row = first_row + (begin + i) * rows_at_once;
        if ((begin + i + 1) * rows_at_once > Rows && row >= Rows) break;
        // `copy_row()` is not used: addresses relative to the start of the row save one register.
#pragma unroll
        for (int first = 0; first < copies_per_row; first += columns_at_once) {
          const int copy = first + threadIdx.x % columns_at_once;
          if (copies_per_row % columns_at_once != 0 && copy >= copies_per_row) break;
          const int column = copy * copy_elements;
          int elements = whole_rows ? copy_elements : max(0, min(copy_elements, Columns - column));
          if (!rows[i].exists) elements = 0;
          copy_one(shared + Layout::offset(row, copy / copies_per_chunk) +
                       copy % copies_per_chunk * copy_bytes,
                   rows[i].begin + column, elements, 0);
        }
      }
    }
  }

  // Copies one thread's part of one row; `source` is the source address of its first copy. Writes
  // zeros if the row does not exist. `policy` is an L2 cache policy or 0; `columns` is the number
  // of valid columns.
  static __device__ void copy_row(unsigned thread, unsigned shared, int row, const Element* source,
                                  bool exists, unsigned long long policy = 0,
                                  int columns = Columns) {
#pragma unroll
    for (int first = 0; first < copies_per_row; first += columns_at_once) {
      const int copy = first + thread % columns_at_once;
      if (copies_per_row % columns_at_once != 0 && copy >= copies_per_row) break;
      int elements =
          whole_rows ? copy_elements : max(0, min(copy_elements, columns - copy * copy_elements));
      copy_one(shared + Layout::offset(row, copy / copies_per_chunk) +
                   copy % copies_per_chunk * copy_bytes,
               source + first * copy_elements, exists ? elements : 0, policy);
    }
  }

  static __device__ void copy_one(unsigned target, const Element* source, int elements,
                                  unsigned long long policy) {
    if constexpr (Alignment >= 4) {
      const int bytes = elements * int(sizeof(Element));
      if (policy != 0) {
        ptx::cp_async<copy_bytes>(target, source, bytes, policy);
      } else {
        ptx::cp_async<copy_bytes>(target, source, bytes);
      }
    } else {
      Vector<Element, copy_elements> values = {};
#pragma unroll
      for (int e = 0; e < copy_elements; ++e) {
        if (e < elements) values.data[e] = source[e];
      }
      ptx::st_shared_v4(target, reinterpret_cast<const unsigned (&)[4]>(values));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
