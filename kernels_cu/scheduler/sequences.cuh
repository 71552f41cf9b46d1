// The rows that one sequence occupies in a varlen (packed), cached or paged batch.
//
// Lengths and offsets come from the caller's device arrays, which are not validated. Any values are
// safe: no address outside of q, k, v and out is formed.
#pragma once

#include "params.cuh"

__device__ inline int clamp(int x, int low, int high) { return max(low, min(x, high)); }

// Position and lengths of one sequence.
struct Sequence {
  int q_batch;  // index along the first axis of q and out
  int q_first;  // first row of the sequence in q[q_batch]
  int seqlen_q;
  int k_batch;  // index along the first axis of k and v, unless they are paged
  int k_first;  // first row of the sequence in k[k_batch]
  int seqlen_k;

  // Returns the position of the first query of sequence `batch` among its keys. The last used query
  // is aligned with the last key; with `Config::padded`, `p.q_offset` aligns the padded arrays.
  template <class Config>
  __device__ int q_offset(const Params& p, int batch) const {
    const int used = used_queries<Config>(p, batch);
    return first_position<Config>(p, batch, Config::padded ? p.q_offset : seqlen_k - used);
  }

 private:
  // A template, because only kernels with modifications have the array `seqused_q`.
  template <class Config, class AnyParams>
  __device__ int used_queries(const AnyParams& p, int batch) const {
    if constexpr (Config::seqused_q) {
      return max(0, min(seqlen_q, p.mods.seqused_q.at(batch)));
    } else {
      return seqlen_q;
    }
  }
};

// PageSize is 0 if k and v are not paged; MayBePacked is false if neither q nor k can be packed.
// Sets `capacity` to the largest possible number of keys: 0 if the cache_batch_idx is invalid.
template <int PageSize, bool MayBePacked = true>
__device__ Sequence find_sequence(const Params& p, int batch, int& capacity) {
  Sequence sequence = {batch, 0, p.seqlen_q, batch, 0, 0};
  if (MayBePacked && p.cu_seqlens_q != nullptr) {
    sequence.q_batch = 0;
    sequence.q_first = clamp(p.cu_seqlens_q[batch], 0, p.total_q);
    const int end = clamp(p.cu_seqlens_q[batch + 1], sequence.q_first, p.total_q);
    sequence.seqlen_q = min(end - sequence.q_first, p.seqlen_q);
  }
  capacity = p.seqlen_k;
  int keys = p.keys;
  if (MayBePacked && p.cu_seqlens_k != nullptr) {
    const int first = p.cu_seqlens_k[batch];
    keys = max(0, p.cu_seqlens_k[batch + 1]) - max(0, first);
    if (PageSize == 0) {
      sequence.k_batch = 0;
      sequence.k_first = clamp(first, 0, p.total_k);
      capacity = min(capacity, p.total_k - sequence.k_first);
    }
  }
  if (p.seqused_k != nullptr) keys = p.seqused_k[batch];
  if (p.cache_batch_idx != nullptr) {
    sequence.k_batch = p.cache_batch_idx[batch];
    if (sequence.k_batch < 0 || sequence.k_batch >= p.caches) sequence.k_batch = capacity = 0;
  }
  // The sum cannot overflow, because a capacity is at most 2^30.
  sequence.seqlen_k = clamp(clamp(keys, 0, capacity) + p.new_keys, 0, capacity);
  return sequence;
}

template <int PageSize>
__device__ Sequence find_sequence(const Params& p, int batch) {
  int capacity;
  return find_sequence<PageSize>(p, batch, capacity);
}
