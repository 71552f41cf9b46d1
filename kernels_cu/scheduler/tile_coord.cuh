// Tile coordinates: the batch, head, first query row and KV split of a work tile.
#pragma once

#include "params.cuh"

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct TileCoord {
  int q_begin;  // first row of the tile
  int batch;
  int head;     // query head; the first one if the tile packs several
  int head_kv;  // KV head of these query heads
  int split;    // index of the KV split
};

// Returns the coordinates of work tile number `block`. Unless the grid is persistent, `block` is
// blockIdx.x, in whose order CTAs start. Heads are taken in sections of `section_heads`, whose K
// and V stay in L2 together. Within a section, query tiles run from the last, the longest with a
// causal mask, to the first, so that short ones fill the tail.
//
// If a tile packs the `Group` query heads of a KV head, its row r is query r / Group of head
// r % Group among them. K and V are then read once for all of these heads.
template <int Br, int Group = 1>
__device__ TileCoord tile_coord(const Params& p, int block) {
  const int q_tiles = ceil_div(p.seqlen_q * Group, Br);
  const int heads = p.batch * (p.heads_q / Group);
  int id = block;
  const int split = id % p.num_splits;
  id /= p.num_splits;
  const int section = id / (p.section_heads / Group * q_tiles);
  const int first_head = section * (p.section_heads / Group);
  const int section_heads = min(p.section_heads / Group, heads - first_head);
  id -= first_head * q_tiles;
  const int q_tile = q_tiles - 1 - id / section_heads;
  const int batch_head = first_head + id % section_heads;
  const int head = batch_head % (p.heads_q / Group) * Group;
  return {q_tile * Br, batch_head / (p.heads_q / Group), head, head / (p.heads_q / p.heads_kv),
          split};
}
