// Turns lists of keys into the block table of a cache whose pages have one row, and adds the
// gradients of listed keys. Each list becomes the rows of its visible keys, in the order of the
// list. One warp per list takes 32 entries at a time:
//
//   entries     5 -1 2 30 2      the query may attend to keys 0 to 9
//   ballot      1  0 1  0 1      a lane's place is the number of ones before it
//   table       5  2 2 -1 -1     count 3
#include "params.cuh"

struct KeyListParams {
  const int* indices;  // (batch, queries, lists, entries); the last axis is contiguous
  int64 batch_stride, query_stride, list_stride;  // in elements; 0 along an axis of equal lists
  // For each query, (batch * queries): it may attend to the keys j with begins <= j < ends, and to
  // those before `prefixes`, which is null without prefixes.
  const int* begins;
  const int* ends;
  const int* prefixes;
  const int* sequences;      // sequence of each query, for the block table
  const int64* first_rows;   // row of the sequence's first key; unused with a block table
  const int* block_table;    // null without pages
  int64 block_table_stride;
  int page_size;
  int pages;
  int* table;   // (lists, batch * queries, entries); -1 after the visible keys
  int* keys;    // index of each key of `table`, 0 after the last; may be null
  int* counts;  // (lists, batch * queries)
  int queries;
  int lists;
  int entries;
  int rows;  // batch * queries
};

struct AddedParams {
  void* total;          // (rows, columns)
  const void* parts;    // (parts, columns)
  const int64* order;   // index of each part, sorted by its row
  const int64* starts;  // of each row, index in `order` of its first part; (rows + 1)
  int64 rows;
  int64 columns;
};

namespace key_lists {

// Adds to an element of `total` the parts of its row, one after another in their order. One thread
// per element.
template <class T>
__device__ inline void add(const AddedParams& p) {
  const int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= p.rows * p.columns) return;
  const int64 row = index / p.columns, column = index % p.columns;
  const T* parts = static_cast<const T*>(p.parts) + column;
  T sum = static_cast<T*>(p.total)[index];
  for (int64 i = p.starts[row]; i < p.starts[row + 1]; ++i) sum += parts[p.order[i] * p.columns];
  static_cast<T*>(p.total)[index] = sum;
}

// Returns the row of a visible key in the arrays, or -1 if the block table has no page there.
__device__ inline int find_row(const KeyListParams& p, int query, int key) {
  if (p.block_table == nullptr) return int(p.first_rows[query] + key);
  const int page =
      p.block_table[p.sequences[query] * p.block_table_stride + key / p.page_size];
  return page < 0 || page >= p.pages ? -1 : page * p.page_size + key % p.page_size;
}

__device__ inline void compact(const KeyListParams& p) {
  const int lane = threadIdx.x % 32;
  const int64 index = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (index >= int64(p.lists) * p.rows) return;
  const int list = int(index / p.rows), query = int(index % p.rows);
  const int* indices = p.indices + query / p.queries * p.batch_stride +
                       query % p.queries * p.query_stride + list * p.list_stride;
  const int begin = p.begins[query], end = p.ends[query];
  const int prefix = p.prefixes == nullptr ? 0 : p.prefixes[query];
  int* table = p.table + index * p.entries;
  int count = 0;
  for (int first = 0; first < p.entries; first += 32) {
    const int key = first + lane < p.entries ? indices[first + lane] : -1;
    const bool is_visible = key >= 0 && ((key >= begin && key < end) || key < prefix);
    const unsigned visible = __ballot_sync(~0u, is_visible);
    if (is_visible) {
      const int place = count + __popc(visible & ((1u << lane) - 1));
      table[place] = find_row(p, query, key);
      if (p.keys != nullptr) p.keys[index * p.entries + place] = key;
    }
    count += __popc(visible);
  }
  for (int place = count + lane; place < p.entries; place += 32) {
    table[place] = -1;
    if (p.keys != nullptr) p.keys[index * p.entries + place] = 0;
  }
  if (lane == 0) p.counts[index] = count;
}

}  // namespace key_lists
