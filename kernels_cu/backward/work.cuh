// Which rows of gradients a thread block computes: those of a tile of keys, or of queries.
#pragma once

#include "backward/params.cuh"
#include "backward/places.cuh"
#include "grid/schedule.cuh"

struct GradientWork {
  int begin;  // first row of the tile
  int batch;
  int head;   // of the gradient's rows
};

// Of sequences of keys, or of queries.
template <bool OfKeys>
struct GradientRows {
  int heads;
  int section_heads;
  int longest;
  int total;          // of packed ones
  const int* starts;  // or null

  __device__ explicit GradientRows(const GradientParams& p)
      : heads(OfKeys ? p.heads_kv : p.heads_q),
        section_heads(OfKeys ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads),
        longest(OfKeys ? p.seqlen_k : p.seqlen_q),
        total(OfKeys ? p.total_k : p.total_q),
        starts(OfKeys ? p.cu_seqlens_k : p.cu_seqlens_q) {}

  // As gradients.py has them.
  template <int Rows>
  __device__ int blocks(int batch) const {
    return heads * (starts == nullptr ? ceil_div(longest, Rows) * batch
                                      : count_places<Rows>(total, batch));
  }
};

// Heads are taken in sections, few enough that what their tiles read stays in L2 together: those of
// sequences that are shorter than the longest in larger ones. Within a section tiles go from the
// first to the last, or back, so that the longest of a causal mask come first.
template <class Config, int Rows, bool OfKeys, bool FromLast>
__device__ GradientWork find_gradient_work(const GradientParams& p, int block) {
  const GradientRows<OfKeys> of(p);
  const int longest = ceil_div(of.longest, Rows);
  int tiles = longest, heads = p.batch * of.heads, section_heads = of.section_heads;
  PackedPart places = {};
  const bool is_packed = Config::sequences && of.starts != nullptr;
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
