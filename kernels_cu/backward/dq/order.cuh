// Order in which CTAs add to the dq of a query tile: the CTA of the last KV tile adds first. Each
// CTA starts with the first queries that attend to its keys. With a causal mask, CTAs that start
// together thus reach a query tile one after another in this order, and none waits.
//
// In this ascending order, one section of heads follows another without waits. But with a causal
// mask, the CTA of the first KV tile has the most query tiles and starts last, so that most SMs are
// idle at the end of the kernel. The last section of heads therefore has the opposite, descending
// order (`GradientParams::last_section`): the CTA of the first KV tile starts first and adds
// first, and each CTA goes from the last query tile to the first. Each x is a query tile that
// attends to the KV tile:
//
//               query tile  0 1 2 3    ascending order (->)   descending order (<-)
//   CTA of KV tile 0        x x x x    starts last            starts first
//                  1          x x x
//                  2            x x
//                  3              x    starts first           starts last
//
// In descending order, all CTAs begin with the last query tile, so each CTA waits one step for its
// predecessor.
#pragma once

#include "scheduler/tile_coord.cuh"
#include "score/mask.cuh"

// Index of a CTA in the dq order of each query tile. The CTA's KV tile starts at key `begin`.
template <int Br, int Bc, class Config>
struct DqOrder {
  Mask<Config> mask;
  int begin;
  int rows;  // query rows of the sequence
  // Query tiles that the CTA iterates over: [`first_tile`, `end_tile`).
  int first_tile;
  int end_tile;

  __device__ DqOrder(const Mask<Config>& mask, int begin, int rows)
      : mask(mask), begin(begin), rows(rows) {
    const QueryTileRange tiles =
        query_tile_range<Br>(mask, begin, min(begin + Bc, mask.seqlen_k), rows);
    first_tile = tiles.begin;
    // If no row attends to the CTA's keys, the range must be empty: the dq order skips this CTA.
    end_tile = mask.row_begin(begin, rows) < rows ? tiles.end : tiles.begin;
  }

  // Returns the CTA's index in the dq order of a query tile. KV tiles to which the query tile does
  // not attend are not counted. If `descends`, the mask must have no left bound.
  __device__ int order_index(int tile, bool descends) const {
    return descends ? begin / Bc : kv_tiles_after(tile);
  }
  // Returns whether the CTA is the last one in the dq order of a query tile.
  __device__ bool is_last_cta(int tile, bool descends) const {
    if (descends) return kv_tiles_after(tile) == 0;
    return begin / Bc == mask.visible_begin(tile * Br) / Bc;
  }

 private:
  // Returns the number of KV tiles after the CTA's to which the query tile attends.
  __device__ int kv_tiles_after(int tile) const {
    const int end = mask.visible_end(min((tile + 1) * Br, rows) - 1);
    return ceil_div(end, Bc) - 1 - begin / Bc;
  }
};
