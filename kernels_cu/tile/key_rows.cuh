// A warp's copies of tiles of rows into shared memory, from wherever the rows lie.
#pragma once

#include "params.cuh"
#include "ptx/stream.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "tile/team_columns.cuh"
#include "grid/pages.cuh"
#include "grid/shares.cuh"

#if __CUDA_ARCH__ >= 800

// One warp's copy of Rows rows of Columns elements into a Layout; what lies past the Columns is
// filled with zeros.
template <class Layout, class Element, int Rows, int Columns, int Alignment>
struct WarpCopy {
  using Block = RowCopy<Layout, Element, Rows, Columns, 32, Alignment>;
  static constexpr int lanes = Block::columns_at_once;
  static constexpr int rows_at_once = 32 / lanes;
  static constexpr int passes = (Rows + rows_at_once - 1) / rows_at_once;

  // The row of this lane's first copy, and the column; the next copies are rows_at_once rows on.
  __device__ static int first_row() { return threadIdx.x % 32 / lanes; }
  __device__ static int first_column() { return threadIdx.x % 32 % lanes * Block::copy_elements; }

  // A policy of 0 is none. next_row(row, is_inside) gives the address of this lane's first column
  // in its next row, and whether to read it: else the row becomes zeros. All lanes take part in it.
  // Rows that are not whole may have other `columns`.
  template <class NextRow>
  __device__ static void start(unsigned shared, unsigned long long policy, NextRow next_row,
                               int columns = Columns) {
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row() + pass * rows_at_once;
      bool is_inside;
      const Element* source = next_row(row, is_inside);
      if ((32 % lanes != 0 && first_row() >= rows_at_once) ||
          (Rows % rows_at_once != 0 && row >= Rows)) {
        continue;
      }
      Block::copy_row(threadIdx.x % 32, shared, row, source, is_inside, policy, columns);
    }
  }
};

// The same of rows with a number of copies that is no power of two, as a team's often are: in pieces
// that are, so that no lane is idle, and none branches. 18 chunks are 16 of two rows at once, and
// then 2 of sixteen. 128 x 8192 keys of 576 columns take an H200 328 us so, by one row of
// 18 lanes at once 416.
template <class Layout, class Element, int Rows, int Columns, int Alignment, int First = 0>
struct PiecewiseCopy {
  using Block = RowCopy<Layout, Element, Rows, Columns, 32, Alignment>;
  static constexpr int left = Block::copies_per_row - First;
  static constexpr int lanes = left >= 32  ? 32
                               : left >= 16 ? 16
                               : left >= 8  ? 8
                               : left >= 4  ? 4
                               : left >= 2  ? 2
                                            : 1;
  static constexpr int rows_at_once = 32 / lanes;

  // next_row(row, is_inside) gives where any of the rows begins.
  template <class RowAt>
  __device__ static void start(unsigned shared, unsigned long long policy, RowAt row_at,
                               int columns) {
    const int copy = First + threadIdx.x % lanes;
    constexpr int most = Block::copy_elements;
    const int elements = Block::whole_rows ? most : max(0, min(most, columns - copy * most));
#pragma unroll
    for (int pass = 0; pass < (Rows + rows_at_once - 1) / rows_at_once; ++pass) {
      const int row = threadIdx.x % 32 / lanes + pass * rows_at_once;
      bool is_inside;
      const Element* source = row_at(row, is_inside) + copy * most;
      if (Rows % rows_at_once != 0 && row >= Rows) continue;
      const unsigned target = shared + Layout::offset(row, copy / Block::copies_per_chunk) +
                              copy % Block::copies_per_chunk * Block::copy_bytes;
      Block::copy_one(target, source, is_inside ? elements : 0, policy);
    }
    if constexpr (left > lanes) {
      PiecewiseCopy<Layout, Element, Rows, Columns, Alignment, First + lanes>::start(
          shared, policy, row_at, columns);
    }
  }
};

// The rows of one key/value head of a sequence, which the cache holds as Elements; of a team, the
// columns that the warp has of them.
template <class Config, class Element>
struct KeyRows {
  static constexpr int Bc = Config::Bc;
  static constexpr int page_size = Config::page_size;
  // Whether all rows of a tile lie on one page; else each lane finds the page of one row.
  static constexpr bool one_page = page_size > 0 && page_size % Bc == 0;

  template <class Columns>
  using Copy = WarpCopy<SwizzledRows<Element, Columns::padded>, Element, Bc, Columns::least,
                        Config::alignment>;
  using KeyColumns = TeamColumns<Config::head_dim, Config::team>;
  using ValueColumns = TeamColumns<Config::head_dim_v, Config::team>;

  const Params& p;
  const int seqlen_k;
  const int pages;
  const int* table;  // the sequence's page numbers
  const Element* keys;
  const Element* values;
  const unsigned long long& policy;  // of L2; in shared memory, to take no registers
  int next_page;                     // of the tile, or the lane's row, that is loaded next

  __device__ KeyRows(const Params& p, const Part& part, int tile, const unsigned long long& policy)
      : p(p),
        seqlen_k(part.sequence.seqlen_k),
        pages(p.pages),
        table(p.block_table + part.batch * p.block_table_stride),
        policy(policy) {
    const int batch = page_size > 0 ? 0 : part.sequence.k_batch;
    const int64 first = page_size > 0 ? 0 : part.sequence.k_first;
    keys = p.k.head<const Element>(batch, part.head_kv) + first * p.k.row_stride;
    values = p.v.head<const Element>(batch, part.head_kv) + first * p.v.row_stride;
    if constexpr (page_size > 0) next_page = page_of(tile);
  }

  // Starts copying a tile of keys and values; the next call is for the one Step tiles on, whose
  // pages are looked up already. Returns the page of the tile, or of the lane's row, or -1.
  template <int Step>
  __device__ int start(unsigned key_target, unsigned value_target, int tile) {
    int page = -1;
    if constexpr (page_size > 0) {
      // Checked only now, as whoever needs the number waits for it: decoding 8 x 4096 keys of 4
      // heads of 128 takes 22.7 us that way, in pages of one row 18.0; checked when it is asked
      // for, 25.5 and 20.8.
      if (is_page(next_page, pages)) page = next_page;
      next_page = page_of(tile + Step);
    }
    copy<KeyColumns>(key_target, keys, p.k, tile, page);
    if constexpr (!Config::values_in_keys) {
      copy<ValueColumns>(value_target, values, p.v, tile, page);
    }
    return page;
  }

 private:
  // What the table says of the page that the tile lies on, or the lane's row of it.
  __device__ int page_of(int tile) const {
    const int key = tile * Bc + (one_page ? 0 : threadIdx.x % 32);
    return key < seqlen_k ? ptx::ld_global(table + key / page_size) : -1;
  }

  template <class Columns>
  __device__ void copy(unsigned target, const Element* base, const Tensor& tensor, int tile,
                       int page) const {
    using Rows = Copy<Columns>;
    const int member = threadIdx.x / 32 % Config::team;
    const int columns = Columns::left_of(member);
    base += member * Columns::padded;
    if constexpr (Config::team > 1) {
      const bool reads = !one_page || page >= 0;
      const int first = tile * Bc;
      if constexpr (one_page) base += page * tensor.batch_stride;
      const Element* begin = base + (one_page ? first % page_size : first) * tensor.row_stride;
      const auto row_at = [&](int row, bool& is_inside) {
        is_inside = reads && row < seqlen_k - first;
        if constexpr (page_size == 0 || one_page) return begin + row * tensor.row_stride;
        const int row_page = __shfl_sync(~0u, page, row % 32);
        is_inside = is_inside && row_page >= 0;
        return base + row_page * tensor.batch_stride + (first + row) % page_size * tensor.row_stride;
      };
      using Pieces = PiecewiseCopy<SwizzledRows<Element, Columns::padded>, Element, Bc,
                                   Columns::least, Config::alignment>;
      Pieces::start(target, policy, row_at, columns);
      return;
    }
    base += Rows::first_column();
    if constexpr (page_size > 0 && !one_page) {
      const auto next_row = [&](int row, bool& is_inside) {
        const int key = tile * Bc + row;
        const int row_page = __shfl_sync(~0u, page, row % 32);
        is_inside = row_page >= 0 && key < seqlen_k;
        return base + row_page * tensor.batch_stride + key % page_size * tensor.row_stride;
      };
      Rows::start(target, policy, next_row, columns);
    } else {
      const int first = tile * Bc + Rows::first_row();
      const int rows_left = one_page && page < 0 ? 0 : seqlen_k - tile * Bc;
      if constexpr (one_page) base += page * tensor.batch_stride;
      base += (one_page ? first % page_size : first) * tensor.row_stride;
      const auto next_row = [&](int row, bool& is_inside) {
        is_inside = row < rows_left;
        const Element* source = base;
        base += Rows::rows_at_once * tensor.row_stride;
        return source;
      };
      Rows::start(target, policy, next_row, columns);
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
