// Sequence of query tiles of a CTA whose mask is a function: the list that the block mask has for
// its KV tile (block_mask/build_lists.cu). Query tiles without visible pairs are not in the list,
// and no CTA waits for another one at such a tile.
//
// An entry holds the CTA's index in the dq order, which counts the CTAs of later keys that have the
// query tile in their lists. Kernels start the CTAs of later keys first (`FromLast` in
// tile_coord.cuh), so a CTA waits only for CTAs of smaller blockIdx, whatever the mask is.
#pragma once

#include "block_mask/query_tile_lists.cuh"
#include "scheduler/tile_coord.cuh"

// `Cta` is the state of a family's CTA, whose sequence of query tiles the list replaces.
template <class Config, class Cta>
struct ListedCta : Cta {
  using Base = Cta;
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

  __device__ bool has_steps() const { return load_entry(first_index()) != no_entry; }
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

  // Returns whether a step needs the mask. The keys of a prefix are not in the block mask's band.
  __device__ bool is_masked(const Step& step) const {
    if (!step.is_full) return true;
    return Config::prefix && Base::is_masked({step.head, int(step.tile)});
  }

  __device__ int order_index(const Step& step) const { return step.order_index; }
  __device__ bool is_last_cta(const Step& step) const { return step.is_last_cta; }

 protected:
  // `p.block_mask` exists only in translation units with modifications.
  template <class AnyParams>
  __device__ static QueryTileLists lists(const AnyParams& params) {
    return {params.block_mask};
  }
  __device__ int query_tiles() const { return ceil_div(p.seqlen_q, Config::Br); }
  __device__ int list() const {
    return lists(p).list(coord.batch, coord.head, coord.begin / Config::Bc, p.heads_kv);
  }

 private:
  __device__ int first_index() const { return list() * query_tiles(); }
  __device__ unsigned load_entry(int index) const { return __ldg(lists(p).words() + index); }
  __device__ Step step_at(int head, int index) const {
    return Step(load_entry(index), head, index);
  }
};

// State of a CTA with the sequence of query tiles that `Config` requires: `Listed` for lists.
template <class Config, class Cta, class Listed = ListedCta<Config, Cta>,
          bool has_lists = Config::block_mask>
struct CtaWithSteps {
  using type = Cta;
};
template <class Config, class Cta, class Listed>
struct CtaWithSteps<Config, Cta, Listed, true> {
  using type = Listed;
};
