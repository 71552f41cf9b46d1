// The argument of every kernel of attention. cupy_flash/families/params.py declares the same struct as
// a NumPy dtype and asserts at compile time that sizes and offsets agree.
#pragma once

#include "blocks/map.cuh"

// A (batch, seqlen, heads, dim) array whose last axis is contiguous. Strides count elements.
struct Tensor {
  void* data;
  int64 batch_stride;
  int64 row_stride;
  int64 head_stride;

  template <class Element>
  __device__ Element* head(int batch, int head) const {
    return static_cast<Element*>(data) + batch * batch_stride + head * head_stride;
  }
};

struct Params {
  Tensor q;              // (batch, seqlen_q, heads_q, head_dim)
  Tensor k;              // (batch, seqlen_k, heads_kv, head_dim)
  Tensor v;              // (batch, seqlen_k, heads_kv, head_dim_v)
  Tensor out;            // (batch, seqlen_q, heads_q, head_dim_v)
  void* lse;             // (batch, heads_q, seqlen_q), contiguous, or null
  void* workspace;       // what the family asked for, or null
  double softmax_scale;  // > 0, and without what score_factor has of it
  int batch;
  int seqlen_q;
  int seqlen_k;
  int heads_q;
  int heads_kv;
  int q_offset;       // query i sees keys j <= i + q_offset when causal; see first_position()
  int num_splits;     // thread blocks that share one query tile's keys
  int section_heads;  // heads whose query tiles are interleaved, see schedule.cuh

  // Where sequences lie that are packed, cached or paged (sequences.cuh): null and 0 where all are
  // of equal lengths.
  const int* cu_seqlens_q;     // (batch + 1), or null: q and out are (batch, seqlen_q, ...)
  const int* cu_seqlens_k;     // (batch + 1), or null: k and v are (caches, seqlen_k, ...), or pages
  const int* seqused_k;        // (batch) keys of each sequence, or null
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

#ifdef CUPY_FLASH_MODIFIED
  // What modifications read; the unit declares it ahead of this file.
  alignas(8) ModArguments mods;
  // Which blocks of keys each query tile visits, where Config::mapped.
  BlockMap block_map;
#endif
};

// The position of a sequence's first query among its keys: an element of the call's array if there
// is one (Config::offsets), else `otherwise`. The array has not been checked, so its elements are
// clamped to the range that the host accepts for a number.
template <class Config, class AnyParams>
__device__ int first_position(const AnyParams& p, int batch, int otherwise) {
  if constexpr (Config::offsets) {
    constexpr int furthest = (1 << 30) - (1 << 10);
    return max(-furthest, min(furthest, p.mods.q_offset.at(batch)));
  } else {
    return otherwise;
  }
}
