// Work tiles: each is a query tile together with the range of KV tiles that it iterates over.
#pragma once

#include "score/mask.cuh"
#include "params.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"

// Sequence of a work tile: stored if `Found`, given by the kernel's arguments for dense batches.
template <bool Found>
struct VisitPlace;

template <>
struct VisitPlace<false> {
  __device__ Sequence sequence(const Params& p, int batch) const {
    return {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
  }
};

template <>
struct VisitPlace<true> {
  Sequence found;

  __device__ const Sequence& sequence(const Params&, int) const { return found; }
};

// A work tile. The KV tiles in `keys` are processed from the last to the first.
template <bool Found>
struct Visit : VisitPlace<Found> {
  Work work;
  KeyTiles keys;

  __device__ static Visit end_of_work() { return {{}, {-1}}; }
  __device__ bool is_end_of_work() const { return work.q_begin < 0; }
  __device__ int blocks() const { return keys.end - keys.begin; }
  __device__ bool has_keys() const { return blocks() > 0; }

  __device__ decltype(auto) sequence(const Params& p) const {
    return VisitPlace<Found>::sequence(p, work.batch);
  }

  // With `Found`, each sequence has its own number of keys and its own position of the first query.
  template <class Config>
  __device__ Mask<Config> mask(const Params& p) const {
    if constexpr (Found) {
      const Sequence& it = sequence(p);
      return {it.seqlen_k, it.template q_offset<Config>(p, work.batch), {p, work.batch}};
    } else {
      return Mask<Config>(p, work.batch);
    }
  }
};
