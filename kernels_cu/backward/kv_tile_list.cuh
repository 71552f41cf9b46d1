// List of all KV tiles in the workspace, from which CTAs fetch (hopper/kv_tiles.cuh). The
// preprocess kernel writes it, because loops of producer warps have no registers for divisions.
#pragma once

#include "backward/params.cuh"
#include "backward/query_chunks.cuh"
#include "backward/tile_coord.cuh"

struct alignas(16) ListedKvTile {
  int begin;  // first key, or -1 after the last KV tile
  int batch;
  int head;
  int first_head;  // first of the query heads of `head`
};

// First query head of a CTA's KV tile, if it is fetched.
template <bool Fetches>
struct FirstHead {};
template <>
struct FirstHead<true> {
  int first_head = 0;
};

// The list, and the counter of fetched KV tiles in front of it. `with_kv_tile_list()` in
// backward_common.py allocates both.
template <class Config>
struct KvTileList {
  static constexpr int counter_bytes = sizeof(ListedKvTile);  // as much as a KV tile

  const GradientParams& p;

  __device__ explicit KvTileList(const GradientParams& p) : p(p) {}

  __device__ ListedKvTile* tiles() const {
    return reinterpret_cast<ListedKvTile*>(reinterpret_cast<char*>(p.counters) + counter_bytes);
  }
  __device__ int count() const {
    return GradientTiling<true>(p).template blocks<Config, Config::Bc>(p.batch);
  }

  // Called by all threads of the preprocess kernel.
  __device__ void write() const {
    const int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (first == 0) *p.counters = 0;
    for (int64 number = first; number < count(); number += int64(gridDim.x) * blockDim.x) {
      const GradientTileCoord coord =
          gradient_tile_coord<Config, Config::Bc, true, true>(p, int(number));
      tiles()[number] = {coord.begin, coord.batch, coord.head,
                         first_head_of_chunk<Config>(p, coord)};
    }
  }

  // Fetches the next KV tile, or one that begins at -1 if there is none.
  __device__ ListedKvTile fetch() const {
    const int number = atomicAdd(p.counters, 1);
    if (number >= count()) return {-1, 0, 0, 0};
    return tiles()[number];
  }
};
