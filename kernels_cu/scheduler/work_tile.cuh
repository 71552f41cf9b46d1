// Work tiles: each is a query tile together with the range of KV tiles that it iterates over.
#pragma once

#include "score/mask.cuh"
#include "params.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/sequences.cuh"

// Sequence of a work tile: stored if `HasSeqlens`, otherwise derived from the kernel's arguments.
template <bool HasSeqlens>
struct WorkTileSequence;

template <>
struct WorkTileSequence<false> {
  __device__ Sequence sequence(const Params& p, int batch) const {
    return {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
  }
};

template <>
struct WorkTileSequence<true> {
  Sequence stored;

  __device__ const Sequence& sequence(const Params&, int) const { return stored; }
};

// A work tile. The KV tiles in `kv_tiles` are processed from the last to the first.
template <bool HasSeqlens>
struct WorkTile : WorkTileSequence<HasSeqlens> {
  TileCoord coord;
  KvTileRange kv_tiles;

  __device__ static WorkTile end_of_work() { return {{}, {-1}}; }
  __device__ bool is_end_of_work() const { return coord.q_begin < 0; }
  __device__ int kv_tile_count() const { return kv_tiles.end - kv_tiles.begin; }
  __device__ bool has_keys() const { return kv_tile_count() > 0; }

  __device__ decltype(auto) sequence(const Params& p) const {
    return WorkTileSequence<HasSeqlens>::sequence(p, coord.batch);
  }

  // With `HasSeqlens`, each sequence has its own number of keys and position of the first query.
  template <class Config>
  __device__ Mask<Config> mask(const Params& p) const {
    if constexpr (HasSeqlens) {
      const Sequence& tile_sequence = sequence(p);
      return {tile_sequence.seqlen_k,
              tile_sequence.template q_offset<Config>(p, coord.batch),
              {p, coord.batch}};
    } else {
      return Mask<Config>(p, coord.batch);
    }
  }
};
