// Sequence of query tiles of a CTA if functions mask pairs. The block mask has a list for each KV
// tile (block_mask/build_lists.cu), with the query tiles that have a visible pair with the KV tile.
// Other query tiles are skipped, and their dq order does not include the CTA of the KV tile.
//
// An entry of a list holds the index of the CTA in the dq order of the query tile: the number of
// later KV tiles whose lists contain the query tile, too. In this example, a number is the index,
// and a dot is a tile without visible pairs:
//
//                  query tile  0   1   2   3
//   CTA of KV tile 2           .   0   .   0    starts first
//                  1           0   .   .   1    waits for CTA 2 at query tile 3
//                  0           1   .   0   2    starts last, waits for CTA 1 at query tiles 0, 3
//
// Kernels start the CTAs of later keys first (`FromLast` in tile_coord.cuh). For every mask, a CTA
// thus waits only for CTAs of smaller blockIdx.
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
    int index;  // index of the entry among those of all lists

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

  // Returns whether a step needs the mask. With a prefix, entries ignore the causal or window band,
  // so the position is tested as well.
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

// Selects the state of a CTA by its sequence of query tiles: `Listed` with lists, otherwise `Cta`.
template <class Config, class Cta, class Listed = ListedCta<Config, Cta>,
          bool has_lists = Config::block_mask>
struct CtaWithSteps {
  using type = Cta;
};
template <class Config, class Cta, class Listed>
struct CtaWithSteps<Config, Cta, Listed, true> {
  using type = Listed;
};
