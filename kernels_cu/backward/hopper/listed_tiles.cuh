// Lists of query tiles (backward/listed_tiles.cuh) in the Hopper kernel.
//
// With `Config::stores_pairs`, the block mask also holds the visible pairs of entries that are not
// full. TMA copies them to shared memory, and no warp evaluates the mask. For narrow heads, the
// step (head and list entry) is stored, too. Both arrive in the stage of the query tile:
//
//   loader                  q, visible pairs        ->  stage, q_full
//   row statistics warp     row statistics, step    ->  stage, q_full
//   consumers               wait for q_full, read all of these, arrive at q_empty
//
// dq of query tiles that are in no list is zeroed by the preprocess kernel
// (preprocess/zero_rows.cuh) if the main kernel writes dq, and otherwise by the kernel that
// converts the dq sums.
#pragma once

#include "backward/hopper/cta.cuh"
#include "backward/listed_tiles.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperListedCta : ListedCta<Config, HopperGradientCta<Config>> {
  using Base = ListedCta<Config, HopperGradientCta<Config>>;
  using Base::Base;
  using typename Base::Step;

  // Store and load the step of the query tile in a stage of q. Consumers of narrow heads load the
  // step whenever they need it, because keeping it in registers spills 60 bytes per thread
  // (head_dim 128). A loaded step has no `index`.
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

  // Returns whether the row statistics warp inspects the tiles of q and dout of a step. All rows of
  // a full tile attend to a key, unless a changed score of -inf masks their pairs.
  __device__ bool inspects_tile(const Step& step) const {
    if constexpr (Config::stores_pairs && !Base::inspects_all) {
      return Base::inspects && !step.is_full;
    }
    return Base::inspects_tile(step);
  }

  // Returns whether a key of the KV tile has a visible pair. Needs `Config::stores_pairs`.
  __device__ bool is_visible_key(int key) const {
    const int offset = key - Base::coord.begin;
    const unsigned* const keys =
        Base::lists(Base::p).visible_keys(Base::list(), Base::query_tiles(), Config::Bc);
    return keys[offset / 32] >> offset % 32 & 1;
  }

 private:
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

template <class Config>
using HopperCta = typename CtaWithSteps<Config, HopperGradientCta<Config>,
                                        HopperListedCta<Config>>::type;

#endif  // __CUDA_ARCH__ == 900
