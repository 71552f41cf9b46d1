// Dropout of a consumer of the Hopper gradient kernel, for a part of a query tile. For a dropped
// pair, P for dv becomes 0, and dP - delta becomes -delta. P is multiplied and delta divided by the
// factor of kept weights, see preprocess.cuh.
#pragma once

#include "ptx/registers.cuh"
#include "score/dropout.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool Enabled = Config::dropout>
struct HopperPartDropout {
  template <class Cta, class Step>
  __device__ void draw(const Cta&, const Step&, int, int) const {}
  template <class LeftOperand>
  __device__ void drop_p(LeftOperand&) const {}
  __device__ static bool keeps(int) { return true; }
};

template <class Config>
struct HopperPartDropout<Config, true> {
  static constexpr int columns = Config::columns;

  KeptPairs<true, columns> kept;

  // Draws the numbers of a part. `first_key` is the first of the warp's keys in its sequence.
  template <class Cta, class Step>
  __device__ void draw(const Cta& cta, const Step& step, int part, int first_key) {
    kept.draw(dropout_numbers<Config>(cta.p), cta.coord.batch, step.head, first_key,
              step.tile * Config::Br + part * columns);
    // Otherwise the compiler draws the numbers where they are used, after the next wait.
    ptx::compute_before_wait(kept.bits);
  }

  // Returns whether the pair of the `i`-th accumulator keeps its weight.
  __device__ bool keeps(int i) const { return kept.keeps(i); }

  __device__ void drop_p(unsigned (&left)[columns / 4]) const {
#pragma unroll
    for (int i = 0; i < columns / 4; ++i) left[i] &= kept.mask(i);
  }

  // `minus_delta` are the values of the lane's queries.
  __device__ void drop_dp(float (&gradients)[columns / 2],
                          const float (&minus_delta)[columns / 4]) const {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      gradients[i] = keeps(i) ? gradients[i] : minus_delta[i / 4 * 2 + i % 2];
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
