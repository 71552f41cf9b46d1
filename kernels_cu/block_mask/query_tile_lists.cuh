// Lists of query tiles in a block mask for the backward pass, where a CTA owns a KV tile. Built by
// build_lists.cu.
#pragma once

#include "block_mask/block_mask.cuh"

// Entry in the list of a KV tile: a query tile, and the index of the KV tile's CTA in its dq order.
struct QueryTileEntry {
  unsigned tile : 16;
  unsigned order_index : 13;  // index of the CTA of the KV tile in the dq order of the query tile
  unsigned is_full : 1;       // all pairs exist and are visible, also in the causal or window band
  unsigned is_last_cta : 1;   // the CTA of the KV tile is the last one in the dq order
  unsigned ends_list : 1;     // the entry is the last one of its list
};

// Word after the end of a list. No entry equals it, because the host allows fewer than 65536 query
// tiles.
constexpr unsigned no_entry = 0xffffffff;

// Bits of the visible pairs of a query tile and a KV tile. Their order is that in which consumers
// of the Hopper backward pass hold transposed scores: for each block of 64 keys x 64 rows, one word
// per thread of a warpgroup.
struct TransposedPairs {
  static constexpr int threads = 128;
  static constexpr int side = 64;

  // Returns the index of a thread's word. A tile has `Bc` keys.
  __device__ static int word(int row_block, int key_block, int thread, int Bc) {
    return (row_block * (Bc / side) + key_block) * threads + thread;
  }
  // Return the first row and the first key of a thread, within the block.
  __device__ static int first_row(int thread) { return thread % 4 * 2; }
  __device__ static int first_key(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  // Returns the distance from the first row to the r-th of 16 rows.
  __device__ static int row_step(int r) { return r / 2 * 8 + r % 2; }
  // Returns the bit of the r-th row and the n-th of 2 keys, which are 8 apart.
  __device__ static int bit(int r, int n) { return r / 2 * 4 + 2 * n + r % 2; }
  // Returns the bits of all rows for the n-th key.
  __device__ static unsigned bits_of_key(int n) { return 0x33333333u << 2 * n; }
};

// Arrays of a block mask for the backward pass. They are stored instead of the sorted query tiles
// and of the slots that the forward pass reads.
struct QueryTileLists {
  const BlockMask& map;

  // Array (batches, KV heads, key blocks, query tiles): for each key block, the entries of the
  // query tiles that have a visible pair with it, in ascending order. The axis of batches has length
  // 1 if neither the mask nor a length depends on the batch, and that of heads if the mask does not
  // depend on the head.
  __device__ unsigned* words() const {
    return reinterpret_cast<unsigned*>(map.memory + map.tiles_offset);
  }
  // Returns the index of the list of a key block.
  __device__ int list(int batch, int head_kv, int key_block, int heads_kv) const {
    const int heads = map.head_stride != 0 ? heads_kv : 1;
    const int list_head =
        (map.batch_stride != 0 ? batch * heads : 0) + (map.head_stride != 0 ? head_kv : 0);
    return list_head * map.key_blocks + key_block;
  }
  // Returns one bit for each key of a list's key block: whether it has a visible pair. If visible
  // pairs are not stored, all bits are 0.
  __device__ unsigned* visible_keys(int64 list, int query_tiles, int Bc) const {
    return words() + int64(map.lists) * query_tiles + list * (Bc / 32);
  }
  // Returns the visible pairs of the entry of this index in `words()`, which is not full. Each
  // entry has space for `bytes` bytes: one bit per pair, in the order of `TransposedPairs`.
  __device__ unsigned* pairs(int64 index, int bytes) const {
    return reinterpret_cast<unsigned*>(map.memory + map.pairs_offset + index * bytes);
  }
};
