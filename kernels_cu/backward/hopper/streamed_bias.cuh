// Bias that TMA loads in addition to q and dout: its layout, and a lane's elements of one part of a
// query tile. Narrow heads only.
//
// A stage holds the bias of `columns` query rows and the keys of the CTA. Stages form a ring of
// their own, whose barriers are `bias_full` and `bias_empty`. Consumers release a stage once they
// have computed P, so that the next load overlaps the products of a whole query tile.
#pragma once

#include "backward/hopper/listed_tiles.cuh"
#include "backward/softmax_backward.cuh"
#include "ptx/base.cuh"
#include "ptx/sm90a.cuh"
#include "score/capture.cuh"
#include "tile/element.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"

#if __CUDA_ARCH__ == 900

// Default, if TMA does not load the bias: the bias of each pair is loaded when the pair needs it.
template <class Config, bool Streamed = (Config::bias_stages > 0)>
struct HopperPartBias {
  using Cta = HopperCta<Config>;
  using Pairs = PairsOnDemand;

  __device__ void wait(const Cta&) const {}
  __device__ void release(const Cta&) const {}
  __device__ Pairs pairs() const { return {}; }
};

template <class Config>
struct HopperPartBias<Config, true> {
  using Cta = HopperCta<Config>;
  using Element = typename Config::Element;
  using Tile = typename Cta::BiasTile;
  // Number of the lane's rows whose bias is loaded at once: those of 16 rows of the tile.
  static constexpr int rows_at_once = 4;

  // Each word holds two rows of one key. Words 2 j and 2 j + 1 hold the lane's two rows among rows
  // 8 j to 8 j + 7 of the part: word 2 j of its first key, word 2 j + 1 of its second key.
  unsigned words[Config::columns / 4];
  PipelineState<Config::bias_stages> ring = {};

  __device__ void wait(const Cta& cta) const {
    ptx::mbarrier_wait(cta.bias_full(ring.index), ring.phase);
  }

  // Loads the bias of `rows_at_once` of the lane's rows, from `first` on. `fragment` is the offset
  // in a tile of the lane's row address for ldmatrix, for the first 16 rows.
  __device__ void load(const Cta& cta, unsigned fragment, int first) {
    unsigned four[4];
    ptx::ldmatrix_x4_trans(
        four, cta.bias_address(ring.index) + fragment + Tile::row_step(first / rows_at_once));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[first + i] = four[i];
  }

  // Releases the stage. The fence makes TMA wait for the reads of ldmatrix, as in the forward pass.
  __device__ void release(const Cta& cta) {
    ptx::fence_proxy_async();
    arrive_warp(cta.bias_empty(ring.index));
    ring.advance();
  }

  // Bias of one of the lane's rows, which is in the lower or the upper half of its words.
  struct Row {
    const unsigned* words;
    int half;

    template <class Load>
    __device__ float bias(int step, Load) const {
      const unsigned two = words[step / 8];
      return widen(Element{static_cast<unsigned short>(half ? two >> 16 : two)});
    }
  };

  // Function object for `SoftmaxBackward`. Words need no check of bounds. Without the branch for
  // it, there is only one copy of the code that computes P.
  struct Pairs {
    static constexpr bool checks_bounds = false;
    const unsigned* words;

    __device__ Row operator()(int r) const { return {words + r / 2 * 2, r % 2}; }
  };
  __device__ Pairs pairs() const { return {words}; }
};

#endif  // __CUDA_ARCH__ == 900
