// Maps a CTA to its gradient tile: the dk and dv of a KV tile, or the dq of a query tile.
#pragma once

#include "backward/packed_order.cuh"
#include "scheduler/packed_tiles.cuh"
#include "backward/params.cuh"
#include "scheduler/tile_coord.cuh"

struct GradientTileCoord {
  int begin;  // first row of the tile
  int batch;
  int head;   // KV head of a KV tile, or query head of a query tile
  // Indices of the CTA's chunk of query heads and of query tiles, with Config::splits_queries, and
  // the number of chunks of query tiles.
  int head_chunk;
  int tile_chunk;
  int tile_chunks;
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

// Returns whether the CTA belongs to the last section, see gradient_tile_coord().
__device__ inline bool in_last_section(const GradientParams& p) {
  return int(blockIdx.x) >= p.last_section;
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
// chunk of query heads then counts as a KV head. The first chunks of all heads precede the second
// chunks, so that the CTA of a chunk has usually ended before the CTA of the next chunk of the same
// KV tile needs its sums.
//
// The CTAs from `p.last_section` on form one last section, unless keys are packed. It may differ
// from the other sections in two ways:
//
// - With `Config::may_descend`, its tiles are in order even if `FromLast`, so that the longest
//   tiles of a causal mask do not start last (dq/order.cuh).
// - With `Chunks`, only its CTAs have chunks of query tiles. They are shorter than the CTAs of the
//   other sections, so that all SMs become idle at about the same time. The first chunks of all its
//   tiles precede the second chunks.
//
// With packed keys, chunks of query tiles count as KV heads, too.
template <class Config, int Rows, bool OfKv, bool FromLast,
          bool Chunks = OfKv && Config::splits_queries>
__device__ GradientTileCoord gradient_tile_coord(const GradientParams& p, int block) {
  const GradientTiling<OfKv> tiling(p);
  int heads = tiling.heads, packed_chunks = 1;
  if constexpr (Chunks) heads *= p.head_chunks;
  const int longest = ceil_div(tiling.longest, Rows);
  int tiles = longest, section_heads = tiling.section_heads;
  PackedRange tile_slots = {};
  if constexpr (Config::packed) {
    if constexpr (Chunks) packed_chunks = p.tile_chunks;
    heads *= packed_chunks;
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
  int tile_chunk = 0, tile_chunks = 1;
  if constexpr (OfKv && !Config::packed && (Config::may_descend || Chunks)) {
    if (in_last_section(p)) {
      from_last = FromLast && !Config::may_descend;
      first_head = p.last_section / tiles;
      section_heads = heads - first_head;
      if constexpr (Chunks) {
        tile_chunks = p.tile_chunks;
        const int section_tiles = section_heads * tiles;
        tile_chunk = (block - p.last_section) / section_tiles;
        block -= tile_chunk * section_tiles;
      }
    } else {
      heads = p.last_section / tiles;
    }
  }
  const int section_size = min(section_heads, heads - first_head);
  const int index = block - first_head * tiles;
  const int tile = index / section_size;
  int head = first_head + index % section_size, head_chunk = 0;
  if constexpr (Chunks) {
    const int groups = Config::packed ? tiling.heads : p.batch * tiling.heads;
    const int chunk = head / groups;
    head -= chunk * groups;
    head_chunk = chunk % p.head_chunks;
    if constexpr (Config::packed) {
      tile_chunk = chunk / p.head_chunks;
      tile_chunks = packed_chunks;
    }
  }
  return {(from_last ? tiles - 1 - tile : tile) * Rows,
          Config::packed ? tile_slots.sequence : head / tiling.heads, head % tiling.heads,
          head_chunk, tile_chunk, tile_chunks};
}
