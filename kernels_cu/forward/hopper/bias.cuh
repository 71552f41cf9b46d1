// A bias that the copy engine brings beside the keys: a lane's part of a block, in registers.
#pragma once

#include "forward/hopper/cta.cuh"
#include "score/capture.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool Streamed = (Config::bias_stages > 0)>
struct HopperBias {
  __device__ HopperBias(const HopperCta<Config>&, int, RingPosition<Config::bias_stages>&) {}
  __device__ FromMemory of_half(int) const { return {}; }
};

template <class Config>
struct HopperBias<Config, true> {
  using Element = typename Config::Element;
  using Cta = HopperCta<Config>;
  using Tile = typename Cta::BiasTile;
  static constexpr int steps = Config::Bc / 16;

  // Of 16 columns: the first eight of the upper row and of the lower, then the others.
  unsigned pairs[steps][4];

  // Takes it from the ring, whose place is free then.
  __device__ HopperBias(const Cta& cta, int consumer, RingPosition<Config::bias_stages>& ring) {
    ptx::mbarrier_wait(cta.bias_full(ring.slot), ring.parity);
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned line =
        cta.bias_address(ring.slot) + (consumer * 64 + row) * Tile::line_bytes;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      ptx::ldmatrix_x4(pairs[step], line + Tile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
    }
    // Else the copy engine may write what comes next before this has been read: with the tensor
    // cores' reads in its way it waits for hundreds of cycles, and who says that it left does not.
    ptx::fence_proxy_async();
    Cta::leave(cta.bias_empty(ring.slot));
    ring.advance();
  }

  // Of one of a lane's two rows.
  struct Row {
    const HopperBias& of;
    const int half;

    template <class Load>
    __device__ float bias(int step, Load) const {
      const unsigned two = of.pairs[step / 16][step % 16 / 8 * 2 + half];
      return widen(Element{static_cast<unsigned short>(step % 2 ? two >> 16 : two)});
    }
  };
  __device__ Row of_half(int half) const { return {*this, half}; }
};

#endif  // __CUDA_ARCH__ == 900
