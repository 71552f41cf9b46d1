// Batches whose sequences do not lie one behind the other at equal lengths: rows packed without
// padding, a key/value cache that is not full, pages of it anywhere in memory. The second argument
// of the kernels that serve such; cupy_flash/gpu/params.py declares the same struct.
//
// The numbers come from the caller's arrays on the device and nobody has checked them: whatever
// they are, no address outside of the arrays is formed.
#pragma once

#include "params.cuh"

struct Sequences {
  const int* cu_seqlens_q;  // (batch + 1), or null: q and out are (batch, seqlen_q, ...)
  const int* cu_seqlens_k;  // (batch + 1), or null: k and v are (caches, seqlen_k, ...), or pages
  const int* seqused_k;     // (batch) keys of each sequence, or null
  const int* cache_batch_idx;  // (batch) the row of the cache that each sequence reads, or null
  const int* block_table;      // (batch, max_pages) page numbers, or null
  int* counters;               // zeros, and zeros again when the kernel has ended; or null
  int64 block_table_stride;    // between its rows, in elements
  int total_q;                 // rows of packed q and out
  int total_k;                 // rows of packed k and v
  int caches;                  // rows of a cache that is not paged
  int pages;                   // of a paged cache
  int max_pages;               // of a sequence
  int keys;                    // of every sequence where neither array counts them
  int new_keys;                // behind those that seqused_k or `keys` count
  int num_splits;              // that were asked for; 0 leaves it to the kernel
};

__device__ inline int clamp(int x, int low, int high) { return max(low, min(x, high)); }

// Where one sequence lies.
struct Sequence {
  int q_batch;  // index of q and out along their first axis
  int q_first;  // its first row there
  int seqlen_q;
  int k_batch;  // of k and v, unless they are paged
  int k_first;
  int seqlen_k;

  // When causal, query i sees the keys j <= i + q_offset: the last query sees all.
  __device__ int q_offset() const { return seqlen_k - seqlen_q; }
};

// PageSize is 0 where k and v are not paged.
template <int PageSize>
__device__ Sequence find_sequence(const Params& p, const Sequences& s, int batch) {
  Sequence found = {batch, 0, p.seqlen_q, batch, 0, 0};
  if (s.cu_seqlens_q != nullptr) {
    found.q_batch = 0;
    found.q_first = clamp(s.cu_seqlens_q[batch], 0, s.total_q);
    const int end = clamp(s.cu_seqlens_q[batch + 1], found.q_first, s.total_q);
    found.seqlen_q = min(end - found.q_first, p.seqlen_q);
  }
  int capacity = p.seqlen_k;
  int keys = s.keys;
  if (s.cu_seqlens_k != nullptr) {
    const int first = s.cu_seqlens_k[batch];
    keys = max(0, s.cu_seqlens_k[batch + 1]) - max(0, first);
    if (PageSize == 0) {
      found.k_batch = 0;
      found.k_first = clamp(first, 0, s.total_k);
      capacity = min(capacity, s.total_k - found.k_first);
    }
  }
  if (s.seqused_k != nullptr) keys = s.seqused_k[batch];
  if (s.cache_batch_idx != nullptr) {
    found.k_batch = s.cache_batch_idx[batch];
    if (found.k_batch < 0 || found.k_batch >= s.caches) found.k_batch = capacity = 0;
  }
  // Neither sum can pass 2^31: a capacity is at most 2^30.
  found.seqlen_k = clamp(clamp(keys, 0, capacity) + s.new_keys, 0, capacity);
  return found;
}
