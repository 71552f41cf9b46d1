// Sequence of query tiles of a CTA whose mask is a function: the list that the block mask has for
// its KV tile (block_mask/build_lists.cu). Query tiles without visible pairs are not in the list,
// and no CTA waits for another one at such a tile. The preprocess kernel zeroes dq of query tiles
// that are in no list (preprocess/zero_rows.cuh).
//
// An entry holds the CTA's index in the dq order, which counts the CTAs of later keys that have the
// query tile in their lists. These have a smaller blockIdx (tile_coord.cuh), so a CTA waits only
// for CTAs that start before it, whatever the mask is.
//
// With `Config::stores_pairs`, the block mask also holds the visible pairs of entries that are not
// full. The loader copies them to shared memory with q, and no warp evaluates the mask.
#pragma once

#include "backward/hopper/cta.cuh"
#include "block_mask/query_tile_lists.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperListedCta : HopperGradientCta<Config> {
  using Base = HopperGradientCta<Config>;
  using Base::Base, Base::coord, Base::p;
  static_assert(!Config::splits_queries, "each CTA processes all query tiles of its KV head");
  static_assert(!Config::may_descend, "the dq order of the lists ascends");

  struct Step : QueryTileEntry {
    int head;
    int index;  // of the entry in all lists

    __device__ Step(unsigned entry, int head, int index) : head(head), index(index) {
      memcpy(static_cast<QueryTileEntry*>(this), &entry, sizeof(entry));
    }
    __device__ unsigned word() const {
      unsigned entry;
      memcpy(&entry, static_cast<const QueryTileEntry*>(this), sizeof(entry));
      return entry;
    }
  };

  __device__ bool has_steps() const { return load(first_index()) != no_entry; }
  __device__ Step first_step() const {
    return step_at(coord.head * (p.heads_q / p.heads_kv), first_index());
  }
  __device__ bool is_last(const Step& step) const {
    return step.ends_list && (step.head + 1u) * p.heads_kv == (coord.head + 1u) * p.heads_q;
  }
  // The query heads of a KV head have the same list.
  __device__ Step next_step(const Step& step) const {
    if (!step.ends_list) return step_at(step.head, step.index + 1);
    return step_at(step.head + 1, first_index());
  }

  // Store and load the step of the tile in a stage of q. Consumers with keys of their own load the
  // step whenever they need it, because they have no registers to keep it: kept steps cost 60 bytes
  // of spills per thread (head_dim 128). A loaded step has no `index`.
  __device__ static void store_step(const Step& step, int stage) {
    if (Base::step_bytes > 0 && threadIdx.x % 32 == 0) {
      *stage_step(stage) = {step.word(), step.head};
    }
  }
  __device__ static Step stored_step(const Step&, int stage) {
    const StoredStep stored = *stage_step(stage);
    return Step(stored.entry, stored.head, 0);
  }
  __device__ static Step next_stored_step(const Step& step, int stage) {
    return stored_step(step, stage);
  }

  // Returns whether a step needs the mask. The keys of a prefix are not in the block mask's band.
  __device__ bool is_masked(const Step& step) const {
    if (!step.is_full) return true;
    return Config::prefix && Base::is_masked({step.head, int(step.tile)});
  }

  // Returns whether a key of the KV tile has a visible pair, with `Config::stores_pairs`.
  __device__ bool is_visible_key(int key) const {
    const int offset = key - coord.begin;
    return lists(p).visible_keys(list(), query_tiles(), Config::Bc)[offset / 32] >> offset % 32 & 1;
  }

  __device__ int order_index(const Step& step) const { return step.order_index; }
  __device__ bool is_last_cta(const Step& step) const { return step.is_last_cta; }

 private:
  // `p.block_mask` exists only in translation units with modifications.
  template <class AnyParams>
  __device__ static QueryTileLists lists(const AnyParams& params) {
    return {params.block_mask};
  }
  __device__ int query_tiles() const { return ceil_div(p.seqlen_q, Config::Br); }
  __device__ int list() const {
    return lists(p).list(coord.batch, coord.head, coord.begin / Config::Bc, p.heads_kv);
  }
  __device__ int first_index() const { return list() * query_tiles(); }
  __device__ unsigned load(int index) const { return __ldg(lists(p).words() + index); }
  __device__ Step step_at(int head, int index) const {
    return Step(load(index), head, index);
  }

  struct alignas(8) StoredStep {
    unsigned entry;
    int head;
  };
  static_assert(Base::step_bytes == 0 || sizeof(StoredStep) == Base::step_bytes, "as laid out");
  __device__ static StoredStep* stage_step(int stage) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<StoredStep*>(shared_memory + Base::steps_offset) + stage;
  }
};

// The CTA's state with the sequence of query tiles that `Config` requires.
template <class Config, bool Listed = Config::block_mask>
struct HopperCtaOf {
  using type = HopperGradientCta<Config>;
};
template <class Config>
struct HopperCtaOf<Config, true> {
  using type = HopperListedCta<Config>;
};
template <class Config>
using HopperCta = typename HopperCtaOf<Config>::type;

#endif  // __CUDA_ARCH__ == 900
