// Copies of row tiles between global and shared memory, by all threads of a block or of a warp.
#pragma once

#include "params.cuh"
#include "ptx/base.cuh"
#include "ptx/stream.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "grid/pages.cuh"

#if __CUDA_ARCH__ >= 800

// Copies Rows rows of Columns elements into a Layout of padded rows; what lies past the Columns,
// and with Ragged past the first rows_left rows, is filled with zeros. Alignment is what every
// row's address is a multiple of, in bytes; rows that are only aligned to single 16-bit elements
// are copied at once, through registers.
//
// A thread keeps its column and steps down the rows by adding to one pointer: row * row_stride for
// each of its copies would be loop-invariant, and the compiler would keep them all in registers.
template <class Layout, class Element, int Rows, int Columns, int Threads, int Alignment>
struct RowCopy {
  static constexpr int copy_bytes = Alignment >= 4 ? Alignment : 16;
  static constexpr int copy_elements = copy_bytes / int(sizeof(Element));
  static constexpr int copies_per_row = Layout::row_bytes / copy_bytes;
  static constexpr int copies_per_chunk = 16 / copy_bytes;
  static constexpr int columns_at_once = copies_per_row < Threads ? copies_per_row : Threads;
  static constexpr int rows_at_once = Threads / columns_at_once;
  static constexpr bool whole_rows = Columns * int(sizeof(Element)) == Layout::row_bytes;

  // Where this thread's copies begin in rows that begin at `global`.
  static __device__ const Element* source(const Element* global, int64 row_stride) {
    return global + threadIdx.x / columns_at_once * row_stride +
           threadIdx.x % columns_at_once * copy_elements;
  }

  // `source` as above.
  template <bool Ragged>
  static __device__ void start(unsigned shared, const Element* source, int64 row_stride,
                               int rows_left) {
    const int first_row = threadIdx.x / columns_at_once;
    if (Threads % columns_at_once != 0 && first_row >= rows_at_once) return;
    // Compared with constants below, instead of as many rows with rows_left; and made of a thread
    // index that the compiler takes for a new one, instead of kept in a register between the tiles.
    const int left = Ragged ? rows_left - ptx::opaque(threadIdx.x) / columns_at_once : 0;
#pragma unroll
    for (int pass = 0; pass < (Rows + rows_at_once - 1) / rows_at_once; ++pass) {
      const int row = first_row + pass * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      copy_row(threadIdx.x, shared, row, source, !Ragged || pass * rows_at_once < left);
      source += rows_at_once * row_stride;
    }
  }

  // The same of rows that lie anywhere, row_at() says where. A few are asked for before the first
  // is copied, for asking may be a read from memory.
  template <class RowAt>
  static __device__ void gather(unsigned shared, RowAt row_at) {
    constexpr int passes = (Rows + rows_at_once - 1) / rows_at_once;
    constexpr int asked = passes < 4 ? passes : 4;
    const int first_row = threadIdx.x / columns_at_once;
    if (Threads % columns_at_once != 0 && first_row >= rows_at_once) return;
#pragma unroll
    for (int begin = 0; begin < passes; begin += asked) {
      Row<Element> rows[asked];
#pragma unroll
      for (int i = 0; i < asked; ++i) rows[i] = row_at(first_row + (begin + i) * rows_at_once);
#pragma unroll
      for (int i = 0; i < asked; ++i) {
        const int row = first_row + (begin + i) * rows_at_once;
        if ((begin + i + 1) * rows_at_once > Rows && row >= Rows) break;
        // Not by copy_row(): counted from where the row begins, the addresses took a register less.
#pragma unroll
        for (int first = 0; first < copies_per_row; first += columns_at_once) {
          const int copy = first + threadIdx.x % columns_at_once;
          if (copies_per_row % columns_at_once != 0 && copy >= copies_per_row) break;
          const int column = copy * copy_elements;
          int elements = whole_rows ? copy_elements : max(0, min(copy_elements, Columns - column));
          if (!rows[i].is_there) elements = 0;
          copy_one(shared + Layout::offset(row, copy / copies_per_chunk) +
                       copy % copies_per_chunk * copy_bytes,
                   rows[i].begin + column, elements, 0);
        }
      }
    }
  }

  // The part of one row that one of the threads copies, from where its first copy begins; zeros if
  // the row is not there. A policy of 0 is none. Rows that are not whole may have other `columns`.
  static __device__ void copy_row(unsigned thread, unsigned shared, int row, const Element* source,
                                  bool is_there, unsigned long long policy = 0,
                                  int columns = Columns) {
#pragma unroll
    for (int first = 0; first < copies_per_row; first += columns_at_once) {
      const int copy = first + thread % columns_at_once;
      if (copies_per_row % columns_at_once != 0 && copy >= copies_per_row) break;
      int elements =
          whole_rows ? copy_elements : max(0, min(copy_elements, columns - copy * copy_elements));
      copy_one(shared + Layout::offset(row, copy / copies_per_chunk) +
                   copy % copies_per_chunk * copy_bytes,
               source + first * copy_elements, is_there ? elements : 0, policy);
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
        if (e < elements) values.at[e] = source[e];
      }
      ptx::st_shared_v4(target, reinterpret_cast<const unsigned (&)[4]>(values));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
