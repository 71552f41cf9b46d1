// Maps a CTA to its gradient tile: the dk and dv of a KV tile, or the dq of a query tile.
#pragma once

#include "backward/params.cuh"
#include "backward/places.cuh"
#include "grid/schedule.cuh"

struct GradientTileCoord {
  int begin;  // first row of the tile
  int batch;
  int head;   // KV head of a KV tile, or query head of a query tile
};

// Sizes that determine the tiles of dk and dv (`OfKeys`) or of dq.
template <bool OfKeys>
struct GradientRows {
  int heads;
  int section_heads;
  int longest;
  int total;          // rows of all packed sequences
  const int* starts;  // cu_seqlens of packed sequences, or null

  __device__ explicit GradientRows(const GradientParams& p)
      : heads(OfKeys ? p.heads_kv : p.heads_q),
        section_heads(OfKeys ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads),
        longest(OfKeys ? p.seqlen_k : p.seqlen_q),
        total(OfKeys ? p.total_k : p.total_q),
        starts(OfKeys ? p.cu_seqlens_k : p.cu_seqlens_q) {}

  // Returns the number of CTAs, as `blocks_of()` in gradients.py does.
  template <int Rows>
  __device__ int blocks(int batch) const {
    return heads * (starts == nullptr ? ceil_div(longest, Rows) * batch
                                      : count_places<Rows>(total, batch));
  }
};

// Returns the tile of a CTA. CTAs interleave the heads of a section, whose operands stay in L2
// together; sequences shorter than the longest have larger sections. Within a section tiles are in
// order, or reversed if `FromLast`, so that the longest tiles of a causal mask start first.
template <class Config, int Rows, bool OfKeys, bool FromLast>
__device__ GradientTileCoord gradient_tile_coord(const GradientParams& p, int block) {
  const GradientRows<OfKeys> of(p);
  const int longest = ceil_div(of.longest, Rows);
  int tiles = longest, heads = p.batch * of.heads, section_heads = of.section_heads;
  PackedPart places = {};
  const bool is_packed = Config::has_seqlens && of.starts != nullptr;
  if (is_packed) {
    places = places_around<Rows>(of.starts, p.batch, of.total, block / of.heads);
    tiles = places.end - places.begin;
    heads = of.heads;
    section_heads = int(min(int64(heads), int64(section_heads) * max(1, longest / tiles)));
    block -= places.begin * heads;
  }
  const int section = block / (section_heads * tiles);
  const int first_head = section * section_heads;
  const int heads_here = min(section_heads, heads - first_head);
  const int place = block - first_head * tiles;
  const int tile = place / heads_here;
  const int head = first_head + place % heads_here;
  return {(FromLast ? tiles - 1 - tile : tile) * Rows,
          is_packed ? places.sequence : head / of.heads, head % of.heads};
}
