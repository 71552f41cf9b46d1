// A warp's copies of tiles of rows into shared memory, from wherever the rows lie.
#pragma once

#include "params.cuh"
#include "ptx/here.cuh"
#include "ptx/stream.cuh"
#include "ptx/wide.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "tile/team_columns.cuh"
#include "grid/pages.cuh"
#include "grid/shares.cuh"

#if __CUDA_ARCH__ >= 800

// Where a warp's copy has its rows from. In rows that lie evenly a lane steps through its own by
// adding to one pointer.
template <class Element>
struct EvenRows {
  const Element* begin;
  int64 row_stride;
  int rows_there;  // of the others nothing is read

  __device__ void start(int row) { begin += row * row_stride; }
  template <int Step>
  __device__ const Element* next(int row, bool& is_there) {
    is_there = row < rows_there;
    const Element* one = begin;
    begin += Step * row_stride;
    return one;
  }
};

// In others it asks: row_at(row, is_there), in which all lanes take part.
template <class RowAt>
struct AskedRows {
  RowAt row_at;

  __device__ void start(int) const {}
  template <int Step>
  __device__ auto next(int row, bool& is_there) const {
    return row_at(row, is_there);
  }
};
template <class RowAt>
AskedRows(RowAt) -> AskedRows<RowAt>;

// One warp's copy of Rows rows of Columns elements into a Layout; what lies past the Columns is
// filled with zeros. Rows with a number of copies that is no power of two are copied in pieces that
// are, so that no lane is idle, and none branches: 18 chunks are 16 of two rows at once, and then 2
// of sixteen. 128 x 8192 keys of 576 columns take an H200 328 us so, by one row of 18 lanes at once
// 416. `First` is the piece's first copy. What other warps copy too had better come through L1.
template <class Layout, class Element, int Rows, int Columns, int Alignment, bool ThroughL1 = false,
          int First = 0>
struct WarpCopy {
  using Block = RowCopy<Layout, Element, Rows, Columns, 32, Alignment>;
  static constexpr int left = Block::copies_per_row - First;
  static constexpr int lanes = left >= 32  ? 32
                               : left >= 16 ? 16
                               : left >= 8  ? 8
                               : left >= 4  ? 4
                               : left >= 2  ? 2
                                            : 1;
  static constexpr int rows_at_once = 32 / lanes;
  static constexpr int passes = (Rows + rows_at_once - 1) / rows_at_once;

  // A policy of 0 is none. Rows that are not there become zeros, and those that are not whole may
  // have other `columns`.
  template <class From>
  __device__ static void start(unsigned shared, unsigned long long policy, const From& from,
                               int columns = Columns) {
    const int copy = First + threadIdx.x % lanes;
    constexpr int most = Block::copy_elements;
    const int elements = Block::whole_rows ? most : max(0, min(most, columns - copy * most));
    const int first_row = threadIdx.x % 32 / lanes;
    From rows = from;
    rows.start(first_row);
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row + pass * rows_at_once;
      bool is_there;
      const Element* source = rows.template next<rows_at_once>(row, is_there) + copy * most;
      if (Rows % rows_at_once != 0 && row >= Rows) continue;
      const unsigned target = shared + Layout::offset(row, copy / Block::copies_per_chunk) +
                              copy % Block::copies_per_chunk * Block::copy_bytes;
      const int there = is_there ? elements : 0;
      if constexpr (ThroughL1 && Alignment == 16) {
        ptx::cp_async_through_l1(target, source, there * int(sizeof(Element)));
      } else {
        Block::copy_one(target, source, there, policy);
      }
    }
    if constexpr (left > lanes) {
      WarpCopy<Layout, Element, Rows, Columns, Alignment, ThroughL1, First + lanes>::start(
          shared, policy, from, columns);
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
  int next_page;  // of the tile, or the lane's row, that is loaded next

  // Where a head's begin in the first sequence, or on the first page.
  struct Head {
    const Element* keys;
    const Element* values;

    __device__ Head(const Params& p, int head_kv)
        : keys(p.k.head<const Element>(0, head_kv)), values(p.v.head<const Element>(0, head_kv)) {}
  };

  __device__ KeyRows(const Params& p, const Part& part, const Head& head, int tile)
      : p(p),
        seqlen_k(part.sequence.seqlen_k),
        pages(p.pages),
        table(p.block_table + part.batch * p.block_table_stride) {
    // Only packed keys do not begin with the first row.
    const int batch = page_size > 0 ? 0 : part.sequence.k_batch;
    const int64 first = page_size > 0 || Config::balanced ? 0 : part.sequence.k_first;
    keys = ptx::here(head.keys + batch * p.k.batch_stride + first * p.k.row_stride);
    values = ptx::here(head.values + batch * p.v.batch_stride + first * p.v.row_stride);
    if constexpr (page_size > 0) next_page = page_of(tile);
  }

  // Starts copying a tile of keys and values; the next call is for the one Step tiles on, whose
  // pages are looked up already. Returns the page of the tile, or of the lane's row, or -1.
  template <int Step>
  __device__ int start(unsigned key_target, unsigned value_target, int tile,
                       unsigned long long policy) {
    int page = -1;
    if constexpr (page_size > 0) {
      // Checked only now, as whoever needs the number waits for it: decoding 8 x 4096 keys of 4
      // heads of 128 takes 22.7 us that way, in pages of one row 18.0; checked when it is asked
      // for, 25.5 and 20.8.
      if (is_page(next_page, pages)) page = next_page;
      next_page = page_of(tile + Step);
    }
    copy<KeyColumns>(key_target, keys, p.k, tile, page, policy);
    if constexpr (!Config::values_in_keys) {
      copy<ValueColumns>(value_target, values, p.v, tile, page, policy);
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
                       int page, unsigned long long policy) const {
    const int member = threadIdx.x / 32 % Config::team;
    const int columns = Columns::left_of(member);
    const int first = tile * Bc;
    base += member * Columns::padded;
    if constexpr (page_size > 0 && !one_page) {
      const AskedRows rows = {[&](int row, bool& is_there) {
        const int row_page = __shfl_sync(~0u, page, row % 32);
        is_there = row_page >= 0 && row < seqlen_k - first;
        return base + row_page * tensor.batch_stride +
               (first + row) % page_size * tensor.row_stride;
      }};
      Copy<Columns>::start(target, policy, rows, columns);
    } else {
      const bool reads = !one_page || page >= 0;
      if constexpr (one_page) base += page * tensor.batch_stride;
      base += (one_page ? first % page_size : first) * tensor.row_stride;
      const EvenRows<Element> rows = {base, tensor.row_stride, reads ? seqlen_k - first : 0};
      Copy<Columns>::start(target, policy, rows, columns);
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
