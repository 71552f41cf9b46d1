// Copies of KV tiles into shared memory by one warp, from strided arrays or from a paged cache.
#pragma once

#include "params.cuh"
#include "ptx/compute_here.cuh"
#include "ptx/stream.cuh"
#include "ptx/wide_access.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "tile/warp_columns.cuh"
#include "scheduler/pages.cuh"
#include "scheduler/kv_partition.cuh"

#if __CUDA_ARCH__ >= 800

// Source rows with a constant stride: each lane steps through its rows by adding to one pointer.
template <class Element>
struct StridedRows {
  const Element* begin;
  int64 row_stride;
  int row_count;  // number of rows that exist; the copy fills the others with zeros

  __device__ void start(int row) { begin += row * row_stride; }
  template <int Step>
  __device__ const Element* next(int row, bool& exists) {
    exists = row < row_count;
    const Element* address = begin;
    begin += Step * row_stride;
    return address;
  }
};

// Source rows at arbitrary addresses, which row_at(row, exists) returns. row_at() may use warp
// shuffles, so all lanes call it together.
template <class RowAt>
struct GatheredRows {
  RowAt row_at;

  __device__ void start(int) const {}
  template <int Step>
  __device__ auto next(int row, bool& exists) const {
    return row_at(row, exists);
  }
};
template <class RowAt>
GatheredRows(RowAt) -> GatheredRows<RowAt>;

// Copies `Rows` rows of `Columns` elements into a `Layout` by one warp. Padding columns become
// zeros. Rows are copied in slices of a power of two of chunks, so that no lane idles. If a row has
// 18 chunks, the warp copies 16 chunks of 2 rows at once, then 2 chunks of 16 rows at once (328 us
// instead of 416 us: H200, 128 x 8192 keys, 576 columns). `First` is the index
// in a row of the slice's first chunk. `ThroughL1` is for rows that several warps copy: the SM then
// fetches them once.
template <class Layout, class Element, int Rows, int Columns, int Alignment, bool ThroughL1 = false,
          int First = 0>
struct WarpCopy {
  using WarpRowCopy = RowCopy<Layout, Element, Rows, Columns, 32, Alignment>;
  static constexpr int remaining = WarpRowCopy::copies_per_row - First;
  static constexpr int lanes = remaining >= 32   ? 32
                               : remaining >= 16 ? 16
                               : remaining >= 8  ? 8
                               : remaining >= 4  ? 4
                               : remaining >= 2  ? 2
                                                 : 1;
  static constexpr int rows_at_once = 32 / lanes;
  static constexpr int passes = (Rows + rows_at_once - 1) / rows_at_once;

  // Starts the copy. Rows that do not exist become zeros. `policy` is an L2 cache policy or 0;
  // `columns` is the number of valid columns.
  template <class SourceRows>
  __device__ static void start(unsigned shared, unsigned long long policy,
                               const SourceRows& source_rows, int columns = Columns) {
    const int copy = First + threadIdx.x % lanes;
    constexpr int per_copy = WarpRowCopy::copy_elements;
    const int elements =
        WarpRowCopy::whole_rows ? per_copy : max(0, min(per_copy, columns - copy * per_copy));
    const int first_row = threadIdx.x % 32 / lanes;
    SourceRows rows = source_rows;
    rows.start(first_row);
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row + pass * rows_at_once;
      bool exists;
      const Element* source = rows.template next<rows_at_once>(row, exists) + copy * per_copy;
      if (Rows % rows_at_once != 0 && row >= Rows) continue;
      const unsigned target = shared + Layout::offset(row, copy / WarpRowCopy::copies_per_chunk) +
                              copy % WarpRowCopy::copies_per_chunk * WarpRowCopy::copy_bytes;
      const int valid = exists ? elements : 0;
      if constexpr (ThroughL1 && Alignment == 16) {
        ptx::cp_async_through_l1(target, source, valid * int(sizeof(Element)));
      } else {
        WarpRowCopy::copy_one(target, source, valid, policy);
      }
    }
    if constexpr (remaining > lanes) {
      WarpCopy<Layout, Element, Rows, Columns, Alignment, ThroughL1, First + lanes>::start(
          shared, policy, source_rows, columns);
    }
  }
};

// The K and V rows of one KV head of a sequence, stored as `Element`. If several warps process the
// same keys (`Config::column_warps` > 1), each warp copies its slice of the columns.
template <class Config, class Element>
struct KvRows {
  static constexpr int Bc = Config::Bc;
  static constexpr int page_size = Config::page_size;
  // Whether all rows of a KV tile lie on one page. If not, each lane looks up the page of one row.
  static constexpr bool one_page = page_size > 0 && page_size % Bc == 0;

  template <class Columns>
  using Copy = WarpCopy<SwizzledRows<Element, Columns::padded>, Element, Bc, Columns::last_valid,
                        Config::alignment>;
  using KeyColumns = WarpColumns<Config::head_dim, Config::column_warps>;
  using ValueColumns = WarpColumns<Config::head_dim_v, Config::column_warps>;

  const Params& p;
  const int seqlen_k;
  const int pages;
  const int* table;  // the sequence's page numbers
  const Element* keys;
  const Element* values;
  int next_page;  // page of the KV tile (or of this lane's row of it) that `start()` copies next

  // Addresses of a head's K and V rows in the first sequence or, if paged, on page 0.
  struct Head {
    const Element* keys;
    const Element* values;

    __device__ Head(const Params& p, int head_kv)
        : keys(p.k.head<const Element>(0, head_kv)), values(p.v.head<const Element>(0, head_kv)) {}
  };

  __device__ KvRows(const Params& p, const PartialTile& partial_tile, const Head& head, int tile)
      : p(p),
        seqlen_k(partial_tile.sequence.seqlen_k),
        pages(p.pages),
        table(p.block_table + partial_tile.batch * p.block_table_stride) {
    // `k_first` is nonzero for packed keys only.
    const int batch = page_size > 0 ? 0 : partial_tile.sequence.k_batch;
    const int64 first = page_size > 0 || Config::balanced ? 0 : partial_tile.sequence.k_first;
    keys = ptx::compute_here(head.keys + batch * p.k.batch_stride + first * p.k.row_stride);
    values = ptx::compute_here(head.values + batch * p.v.batch_stride + first * p.v.row_stride);
    if constexpr (page_size > 0) next_page = page_of(tile);
  }

  // Starts copying KV tile `tile`, and looks up the page of tile `tile + Step`, which the next call
  // must copy. Returns the page of the KV tile, or of this lane's row of it, or -1.
  template <int Step>
  __device__ int start(unsigned key_target, unsigned value_target, int tile,
                       unsigned long long policy) {
    int page = -1;
    if constexpr (page_size > 0) {
      // The page number is checked here, one tile after `page_of()`, because a check waits for the
      // load: 22.7 us instead of 25.5 us (decoding, 8 x 4096 keys, 4 heads of 128 columns).
      if (is_valid_page(next_page, pages)) page = next_page;
      next_page = page_of(tile + Step);
    }
    copy<KeyColumns>(key_target, keys, p.k, tile, page, policy);
    if constexpr (!Config::values_in_keys) {
      copy<ValueColumns>(value_target, values, p.v, tile, page, policy);
    }
    return page;
  }

 private:
  // Loads the block-table entry of the KV tile, or of this lane's row of it, without checking it.
  __device__ int page_of(int tile) const {
    const int key = tile * Bc + (one_page ? 0 : threadIdx.x % 32);
    return key < seqlen_k ? ptx::ld_global(table + key / page_size) : -1;
  }

  template <class Columns>
  __device__ void copy(unsigned target, const Element* base, const Tensor& tensor, int tile,
                       int page, unsigned long long policy) const {
    const int column_warp = threadIdx.x / 32 % Config::column_warps;
    const int columns = Columns::columns_from(column_warp);
    const int first = tile * Bc;
    base += column_warp * Columns::padded;
    if constexpr (page_size > 0 && !one_page) {
      const GatheredRows rows = {[&](int row, bool& exists) {
        const int row_page = __shfl_sync(~0u, page, row % 32);
        exists = row_page >= 0 && row < seqlen_k - first;
        return base + row_page * tensor.batch_stride +
               (first + row) % page_size * tensor.row_stride;
      }};
      Copy<Columns>::start(target, policy, rows, columns);
    } else {
      const bool has_rows = !one_page || page >= 0;
      if constexpr (one_page) base += page * tensor.batch_stride;
      base += (one_page ? first % page_size : first) * tensor.row_stride;
      const StridedRows<Element> rows = {base, tensor.row_stride, has_rows ? seqlen_k - first : 0};
      Copy<Columns>::start(target, policy, rows, columns);
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
