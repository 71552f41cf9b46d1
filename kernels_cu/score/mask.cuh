// Which (query, key) pairs are seen, and which tiles of keys need a mask at all.
#pragma once

#include "params.cuh"
#include "work/schedule.cuh"

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
  const int full = mask.visible_end(q_begin) / Bc;
  if constexpr (!Split) return {0, min(full, seen), seen};
  const int share = ceil_div(seen, num_splits);
  const int begin = min(seen, split * share);
  const int end = min(seen, begin + share);
  return {begin, max(begin, min(full, end)), end};
}
