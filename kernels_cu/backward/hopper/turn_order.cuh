// In which order the blocks of tiles of keys add to a tile of queries: those of later keys first.
// Each starts with the first queries that see its keys, so causal ones that start together come to
// a tile one behind the other, and none waits.
#pragma once

#include "grid/schedule.cuh"
#include "score/mask.cuh"

// Of a block's keys from `begin` on, among a sequence's.
template <int Br, int Bc, class Config>
struct TurnOrder {
  Mask<Config> mask;
  int begin;
  int rows;  // of queries
  // Tiles of queries that the block visits.
  int first_tile;
  int end_tile;

  __device__ TurnOrder(const Mask<Config>& mask, int begin, int rows)
      : mask(mask), begin(begin), rows(rows) {
    const QueryTiles tiles =
        find_query_tiles<Br>(mask, begin, min(begin + Bc, mask.seqlen_k), rows);
    first_tile = tiles.begin;
    // Of keys that no row sees the last tile is none, though it may begin there: turns are counted.
    end_tile = mask.first_row(begin, rows) < rows ? tiles.end : tiles.begin;
  }

  // How many of the tiles of keys that a tile of queries sees come before this one.
  __device__ int turn_of(int tile) const {
    const int seen = mask.visible_end(min((tile + 1) * Br, rows) - 1);
    return ceil_div(seen, Bc) - 1 - begin / Bc;
  }
  // Whether none comes behind.
  __device__ bool is_last_turn(int tile) const {
    return begin / Bc == mask.visible_begin(tile * Br) / Bc;
  }
};
