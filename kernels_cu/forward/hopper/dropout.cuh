// Dropout of a consumer of the Hopper kernel. The random numbers of a KV tile are drawn while the
// tensor cores compute its scores, and kept as one bit for each pair.
#pragma once

#include "forward/hopper/cta.cuh"
#include "ptx/registers.cuh"
#include "score/dropout.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool Enabled = Config::dropout>
struct HopperDropout {
  __device__ explicit HopperDropout(const HopperCta<Config>&) {}
  __device__ void draw(int, int, int) const {}
  template <class Probabilities>
  __device__ void apply(Probabilities&) const {}
};

template <class Config>
struct HopperDropout<Config, true> {
  using Cta = HopperCta<Config>;
  static_assert(Config::Bc % 16 == 0, "whole squares of pairs");

  const Cta& cta;
  const DropoutNumbers numbers;
  KeptPairs<false, Config::Bc> kept;

  __device__ explicit HopperDropout(const Cta& cta)
      : cta(cta), numbers(dropout_numbers<Config>(cta.p)) {}

  // Draws the numbers of a KV tile for the consumer's rows, of which `first_row` is the first.
  __device__ void draw(int work_tile_slot, int first_row, int kv_tile) {
    const TileCoord& coord = cta.work_tile_at(work_tile_slot)->coord;
    kept.draw(numbers, coord.batch, coord.head, first_row + threadIdx.x / 32 % 4 * 16,
              kv_tile * Config::Bc);
    // Otherwise the compiler draws the numbers where they are used, after the wait for the scores.
    ptx::compute_before_wait(kept.bits);
  }

  // Sets the probabilities of dropped pairs, packed in accumulator order, to 0.
  __device__ void apply(unsigned (&probabilities)[1][Config::Bc / 4]) const {
#pragma unroll
    for (int i = 0; i < Config::Bc / 4; ++i) probabilities[0][i] &= kept.mask(i);
  }
};

#endif  // __CUDA_ARCH__ == 900
