// Which (query, key) pairs are seen, which tiles of keys a query tile visits, and which of those
// need a mask at all; and the transpose, which query tiles see a tile of keys. Nothing else
// compares a query with a key. cupy_flash/problem/mask.py is the same on the host.
#pragma once

#include "params.cuh"
#include "grid/schedule.cuh"

// Of a query tile whose rows are those of Group query heads in turns, see find_work().
template <bool Causal, int Group = 1>
struct Mask {
  int seqlen_k;
  int q_offset;

  __device__ explicit Mask(const Params& p) : seqlen_k(p.seqlen_k), q_offset(p.q_offset) {}

  __device__ Mask(int seqlen_k, int q_offset) : seqlen_k(seqlen_k), q_offset(q_offset) {}

  // The same mask with keys counted from `key` on. (Subtracting `key` from each row's end instead
  // would leave those ends loop-invariant, and the compiler would keep them all in registers.)
  __device__ Mask counted_from(int key) const { return {seqlen_k - key, q_offset - key}; }

  // Query row sees the keys [0, visible_end(row)).
  __device__ int visible_end(int row) const {
    return Causal ? max(0, min(seqlen_k, row / Group + q_offset + 1)) : seqlen_k;
  }

  // Of the tiles of Bc keys, how many it sees whole.
  template <int Bc>
  __device__ int full_tiles(int row) const {
    return visible_end(row) / Bc;
  }

  // The transpose: of `rows` rows, those from this one on see the key.
  __device__ int first_row(int key, int rows) const {
    return Causal ? max(0, min(rows / Group, key - q_offset)) * Group : 0;
  }
};

// The tiles of Bc keys that one thread block visits, from end - 1 down to begin. Those in
// [full_end, end) need a mask or reach past the last key; those in [begin, full_end) do not.
struct KeyTiles {
  int begin;
  int full_end;
  int end;
};

// For the rows [q_begin, q_end) of one head; with Split, the split-th of num_splits shares.
template <int Bc, bool Split, bool Causal, int Group>
__device__ KeyTiles find_key_tiles(const Mask<Causal, Group>& mask, int q_begin, int q_end,
                                   int split, int num_splits) {
  const int seen = ceil_div(mask.visible_end(q_end - 1), Bc);
  const int full = mask.template full_tiles<Bc>(q_begin);
  if constexpr (!Split) return {0, min(full, seen), seen};
  const int share = ceil_div(seen, num_splits);
  const int begin = min(seen, split * share);
  const int end = min(seen, begin + share);
  return {begin, max(begin, min(full, end)), end};
}

// The tiles of Br query rows that a tile of keys is visited by, from begin to end - 1. Those in
// [begin, full_begin) need a mask; those from full_begin on do not.
struct QueryTiles {
  int begin;
  int full_begin;
  int end;
};

// For the keys [k_begin, k_end), not none of them, and `rows` rows in all.
template <int Br, bool Causal, int Group>
__device__ QueryTiles find_query_tiles(const Mask<Causal, Group>& mask, int k_begin, int k_end,
                                       int rows) {
  const int end = ceil_div(rows, Br);
  const int seeing = mask.first_row(k_begin, rows);
  return {seeing < rows ? seeing / Br : end, ceil_div(mask.first_row(k_end - 1, rows), Br), end};
}
