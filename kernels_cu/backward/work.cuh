// Which rows of gradients a thread block computes: those of a tile of keys, or of queries.
#pragma once

#include "backward/params.cuh"
#include "grid/schedule.cuh"

struct GradientWork {
  int begin;  // first row of the tile
  int batch;
  int head;   // of the gradient's rows
};

// Heads are taken in sections, few enough that what their tiles read stays in L2 together; within a
// section tiles go from the first to the last, or back, so that the longest of a causal mask come
// first.
template <int Rows, bool FromLast>
__device__ GradientWork find_gradient_work(int rows, int batch, int heads, int section_heads,
                                           int block) {
  const int tiles = ceil_div(rows, Rows);
  const int section = block / (section_heads * tiles);
  const int first_head = section * section_heads;
  const int heads_here = min(section_heads, batch * heads - first_head);
  const int place = block - first_head * tiles;
  const int tile = place / heads_here;
  const int batch_head = first_head + place % heads_here;
  return {(FromLast ? tiles - 1 - tile : tile) * Rows, batch_head / heads, batch_head % heads};
}
