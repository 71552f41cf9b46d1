// Maps a CTA to its gradient tile: the dk and dv of a KV tile, or the dq of a query tile.
#pragma once

#include "backward/packed_order.cuh"
#include "backward/packed_tiles.cuh"
#include "backward/params.cuh"
#include "scheduler/tile_coord.cuh"

struct GradientTileCoord {
  int begin;  // first row of the tile
  int batch;
  int head;   // KV head of a KV tile, or query head of a query tile
  // Indices of the CTA's chunk of query heads and of query tiles, with Config::splits_queries.
  int head_chunk;
  int tile_chunk;
};

// Sizes that determine the number and order of the tiles of dk and dv (`OfKv`), or of dq.
template <bool OfKv>
struct GradientTiling {
  int heads;
  int section_heads;
  int longest;
  int total;          // rows of all packed sequences
  const int* starts;  // cu_seqlens, with Config::packed

  __device__ explicit GradientTiling(const GradientParams& p)
      : heads(OfKv ? p.heads_kv : p.heads_q),
        section_heads(OfKv ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads),
        longest(OfKv ? p.seqlen_k : p.seqlen_q),
        total(OfKv ? p.total_k : p.total_q),
        starts(OfKv ? p.cu_seqlens_k : p.cu_seqlens_q) {}

  // Returns the number of CTAs that compute all tiles, as `blocks_of()` in backward_common.py does.
  template <class Config, int Rows>
  __device__ int blocks(int batch) const {
    return heads * (Config::packed ? count_tile_slots<Rows>(total, batch)
                                   : ceil_div(longest, Rows) * batch);
  }
};

// Returns whether the CTA belongs to the last section, whose order is the opposite one, see
// gradient_tile_coord().
__device__ inline bool descends(const GradientParams& p) {
  return int(blockIdx.x) >= p.ascending_blocks;
}

// Returns the number of CTAs of a KV tile, with all heads and chunks of queries.
template <class Config>
__device__ int blocks_of_kv_tile(const GradientParams& p) {
  return Config::splits_queries ? p.heads_kv * p.head_chunks * p.tile_chunks : p.heads_kv;
}

// Returns the rows of the sequence of a CTA that computes a tile of dk and dv.
template <class Config>
__device__ Sequence sequence_of_kv_block(const GradientParams& p, int block, int batch) {
  if constexpr (Config::orders_sequences) {
    return packed_tile_slots(p)[block / blocks_of_kv_tile<Config>(p)].rows;
  }
  return sequence_of<Config>(p, batch);
}

// Returns the gradient tile of a CTA. Heads are divided into sections of `section_heads`, whose
// operands stay in L2 together, and consecutive CTAs compute the same tile of all heads of a
// section. If a packed sequence is short, its sections are larger. Packed sequences are in the
// order of the batch or, with `Config::orders_sequences`, in that of their lengths
// (packed_order.cuh). Within a section, tiles are in order or, if `FromLast`, reversed. Callers
// choose the order that starts with the longest tiles of a causal mask or, for Hopper, the dq order
// (dq/order.cuh).
//
// With `Chunks`, each KV tile has a CTA for each chunk of its queries (query_chunks.cuh). Each
// chunk then counts as a KV head. The first chunks of all heads precede the second chunks, so that
// the CTA of a chunk has usually ended before the CTA of the next chunk of the same KV tile needs
// its sums.
//
// With `Config::may_descend`, the CTAs from `p.ascending_blocks` on form one last section, whose
// tiles are in order even if `FromLast`, so that the longest tiles of a causal mask do not start
// last (dq/order.cuh).
template <class Config, int Rows, bool OfKv, bool FromLast,
          bool Chunks = OfKv && Config::splits_queries>
__device__ GradientTileCoord gradient_tile_coord(const GradientParams& p, int block) {
  const GradientTiling<OfKv> tiling(p);
  int heads = tiling.heads;
  if constexpr (Chunks) heads *= p.head_chunks * p.tile_chunks;
  const int longest = ceil_div(tiling.longest, Rows);
  int tiles = longest, section_heads = tiling.section_heads;
  PackedRange tile_slots = {};
  if constexpr (Config::packed) {
    if constexpr (OfKv && Config::orders_sequences) {
      const PackedTileSlot& slot = packed_tile_slots(p)[block / heads];
      tile_slots = {slot.sequence, slot.begin, slot.end};
    } else {
      tile_slots = find_tile_slots<Rows>(tiling.starts, p.batch, tiling.total, block / heads);
    }
    tiles = tile_slots.end - tile_slots.begin;
    section_heads = int(min(int64(heads), int64(section_heads) * max(1, longest / tiles)));
    block -= tile_slots.begin * heads;
  } else {
    heads *= p.batch;
  }
  int first_head = block / (section_heads * tiles) * section_heads;
  bool from_last = FromLast;
  if constexpr (OfKv && Config::may_descend) {
    if (descends(p)) {
      from_last = false;
      first_head = p.ascending_blocks / tiles;
      section_heads = heads;
    } else if (!Config::packed) {
      heads = p.ascending_blocks / tiles;
    }
  }
  const int section_size = min(section_heads, heads - first_head);
  const int index = block - first_head * tiles;
  const int tile = index / section_size;
  int head = first_head + index % section_size, chunk = 0, chunks_of_tiles = 1;
  if constexpr (Chunks) {
    const int groups = Config::packed ? tiling.heads : p.batch * tiling.heads;
    chunk = head / groups;
    chunks_of_tiles = p.tile_chunks;
    head -= chunk * groups;
  }
  return {(from_last ? tiles - 1 - tile : tile) * Rows,
          Config::packed ? tile_slots.sequence : head / tiling.heads, head % tiling.heads,
          chunk / chunks_of_tiles, chunk % chunks_of_tiles};
}
