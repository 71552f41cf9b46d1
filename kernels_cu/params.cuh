// The argument struct of every attention kernel. cupy_flash/families/params.py declares the same
// struct as a NumPy dtype, and asserts at compile time that sizes and offsets agree.
#pragma once

#include "block_mask/block_mask.cuh"

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
  void* workspace;       // scratch memory of the size that the family requested, or null
  double softmax_scale;  // positive; `score_factor` holds the sign and may hold a power of two
  int batch;
  int seqlen_q;
  int seqlen_k;
  int heads_q;
  int heads_kv;
  int q_offset;       // causal: query i attends to keys j <= i + q_offset; see `first_position()`
  int num_splits;     // number of KV splits of each query tile, each a work tile
  int section_heads;  // number of heads whose query tiles are interleaved, see tile_coord.cuh

  // Lengths and offsets of packed, cached or paged sequences (sequences.cuh); null and 0 for dense
  // batches.
  const int* cu_seqlens_q;     // (batch + 1), or null: q and out are (batch, seqlen_q, ...)
  const int* cu_seqlens_k;     // (batch + 1), or null: k and v are (caches, seqlen_k, ...), or pages
  const int* seqused_k;        // (batch) number of keys of each sequence, or null
  const int* cache_batch_idx;  // (batch) batch index in the cache of each sequence, or null
  const int* block_table;      // (batch, max_pages) page numbers, or null
  int* counters;               // counters that are 0 before each launch, or null
  int64 block_table_stride;    // row stride of block_table, in elements
  int total_q;                 // number of rows of packed q and out
  int total_k;                 // number of rows of packed k and v
  int caches;                  // batch size of a cache that is not paged
  int pages;                   // number of pages of a paged cache
  int max_pages;               // maximum number of pages of a sequence
  int keys;                    // number of keys of every sequence, if no array holds their lengths
  int new_keys;                // number of appended keys, not counted by seqused_k or `keys`

#ifdef CUPY_FLASH_MODIFIED
  // Arguments of the modifications; the translation unit declares the struct before this file.
  alignas(8) ModArguments mods;
  // Block mask, if `Config::block_mask`.
  BlockMask block_mask;
#endif
#ifdef CUPY_FLASH_STATISTICS
  // Row statistics, with the shape of lse. Each is null if the call does not return it.
  void* max_logits;
  void* entropy;
#endif
};

// Returns the position of a sequence's first query among its keys: an element of an array of
// offsets if the call has one (`Config::offsets`), or else `otherwise`. The array is not validated,
// so its elements are clamped to the range that the host accepts for a scalar q_offset.
template <class Config, class AnyParams>
__device__ int first_position(const AnyParams& p, int batch, int otherwise) {
  if constexpr (Config::offsets) {
    constexpr int max_position = (1 << 30) - (1 << 10);
    return max(-max_position, min(max_position, p.mods.q_offset.at(batch)));
  } else {
    return otherwise;
  }
}
