// Bias that TMA loads in addition to the keys: its loads, and a lane's elements of one KV tile.
#pragma once

#include "forward/hopper/cta.cuh"
#include "forward/hopper/loader.cuh"
#include "score/capture.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ == 900

// Loads the bias of a KV tile into its own ring. Called by the producer.
template <class Config>
__device__ void load_bias(const HopperLoader<Config>& loader,
                          PipelineState<Config::bias_stages>& ring, const TileCoord& coord,
                          int kv_tile) {
  using Cta = HopperCta<Config>;
  const Cta& cta = loader.cta;
  ptx::mbarrier_wait(cta.bias_empty(ring.index), ring.phase ^ 1);
  loader.template load<typename Cta::BiasTile>(
      cta.bias_address(ring.index), &static_cast<const BiasedTensorMaps&>(cta.maps).bias,
      coord.q_begin, coord.head, coord.batch, cta.bias_full(ring.index), ptx::l2_evict_normal,
      kv_tile * Config::Bc);
  ring.advance();
}

template <class Config, bool Streamed = (Config::bias_stages > 0)>
struct HopperBias {
  __device__ HopperBias(const HopperCta<Config>&, int, PipelineState<Config::bias_stages>&) {}
  __device__ LoadOnDemand row(int) const { return {}; }
};

template <class Config>
struct HopperBias<Config, true> {
  using Element = typename Config::Element;
  using Cta = HopperCta<Config>;
  using Tile = typename Cta::BiasTile;
  static constexpr int steps = Config::Bc / 16;

  // A lane's four pairs in every 16 columns: in the first eight columns of its upper and of its
  // lower row, then in the last eight columns of both rows.
  unsigned pairs[steps][4];

  // Reads the bias of a KV tile from its stage and releases the stage.
  __device__ HopperBias(const Cta& cta, int consumer, PipelineState<Config::bias_stages>& ring) {
    ptx::mbarrier_wait(cta.bias_full(ring.index), ring.phase);
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned row_address =
        cta.bias_address(ring.index) + (consumer * 64 + row) * Tile::box_row_bytes;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      ptx::ldmatrix_x4(pairs[step],
                       row_address + Tile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
    }
    // Without this fence, TMA may overwrite the stage before ldmatrix has read it. wgmma traffic
    // can delay those reads by hundreds of cycles, and the mbarrier arrival does not wait for them.
    ptx::fence_proxy_async();
    arrive_warp(cta.bias_empty(ring.index));
    ring.advance();
  }

  // Bias of one of the lane's two rows.
  struct Row {
    const HopperBias& tile_bias;
    const int half;

    template <class Load>
    __device__ float bias(int step, Load) const {
      const unsigned two = tile_bias.pairs[step / 16][step % 16 / 8 * 2 + half];
      return widen(Element{static_cast<unsigned short>(step % 2 ? two >> 16 : two)});
    }
  };
  __device__ Row row(int half) const { return {*this, half}; }
};

#endif  // __CUDA_ARCH__ == 900
