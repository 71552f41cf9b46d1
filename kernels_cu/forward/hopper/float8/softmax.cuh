// Softmax of one KV tile if P is float8, for the two rows of which a lane holds elements.
//
// The largest p of a row is 2^8, up to float32 rounding. e4m3 has three mantissa bits, so that
// rounding changes a number by up to 1/16 of it. A row that attends to one key, or to keys with
// equal scores, would have that error if its largest p were not an e4m3 number. So the base always
// follows the row maximum, without lazy rescaling.
#pragma once

#include "forward/hopper/float8/float8.cuh"
#include "forward/hopper/softmax.cuh"
#include "ptx/base.cuh"
#include "ptx/registers.cuh"
#include "score/softmax.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperSoftmax<Config, true> {
  using Math = SoftmaxMath<float>;
  using Operand = HopperOperand<typename Config::Element>;
  static constexpr int Bc = Config::Bc;
  using Scores = float[Bc / 2];
  using Probabilities = unsigned[Bc / 8];
  static constexpr float largest_exponent = 8;

  struct Row : StatisticsOf<Config, float> {
    float base;  // p = exp2(score * scale_log2 - base); -inf before the first visible key
    float sum;   // sum of this lane's p

    __device__ void reset() {
      base = -Math::infinity();
      sum = 0;
      static_cast<StatisticsOf<Config, float>&>(*this) = {};
    }

    // Returns log(sum(exp(scale * s))), the natural log-sum-exp. A NaN in the sum stays.
    __device__ float log_sum_exp() const {
      return sum == 0 ? -Math::infinity() : (base + Math::log2(sum)) * Math::ln_2;
    }

    __device__ RowSummary<float> summary(float unit) const {
      if (sum == 0) return {};
      return RowSummary<float>::of(*this, sum, Math::log2(sum), unit);
    }
  };

  float scale_log2;
  Row rows[2];
  bool negates;  // whether the scores' scale is negative

  __device__ explicit HopperSoftmax(const Params&) {}

  __device__ void reset() {
    rows[0].reset();
    rows[1].reset();
  }

  // Sets the scales of a work tile: they depend on its batch and head.
  template <class WorkTile>
  __device__ void enter(const WorkTile& work_tile, const Params& p) {
    scale_log2 = work_tile.scales.exponent_scale(exponent_scale<Config, float>(p));
    negates = work_tile.scales.negates();
  }

  __device__ void apply_factor(Scores& scores) const {
    if (negates) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] = -scores[i];
      // Without the pin, the compiler replaces the branch by a select for each score.
      ptx::pin(scores);
    }
    if constexpr (prior_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] *= prior_factor<Config>;
    }
  }

  // Masks the keys from visible_end(half) on, counted from the first one that this lane holds.
  template <class VisibleEnd>
  __device__ static void mask(Scores& scores, VisibleEnd visible_end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fill_row_from<Bc / 8>(scores + 2 * half, visible_end(half), -Math::infinity());
    }
  }

  // Computes P from the scores, and the factors by which the previous output must be multiplied.
  __device__ void exponentiate(const Scores& scores, Probabilities& probabilities,
                               float (&rescale)[2]) {
    float largest[2], bases[2], parts[2][2] = {};
    ExponentMoment<float, Config::entropy> moments[2];
    find_largest(scores, largest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float least = fmaf(max_of_lanes(largest[half]), scale_log2, -largest_exponent);
      const float base = fmaxf(rows[half].base, least);
      bases[half] = base == -Math::infinity() ? 0 : base;
      rescale[half] = ptx::ex2_approx(rows[half].base - bases[half]);
      rows[half].include_score(largest[half]);
      rows[half].shift_base(bases[half] - rows[half].base, rows[half].sum, rescale[half]);
      rows[half].base = base;
    }
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) {
      const int half = i % 2;
      float p[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float exponent = fmaf(scores[2 * i + c], scale_log2, -bases[half]);
        p[c] = ptx::ex2_approx(exponent);
        parts[half][c] += p[c];
        moments[half].include_exponent(p[c], exponent);
      }
      Operand::store_pair(p[0], p[1], i, probabilities);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].sum = fmaf(rows[half].sum, rescale[half], parts[half][0] + parts[half][1]);
      if constexpr (Config::entropy) rows[half].moment += moments[half].moment;
    }
    ptx::pin(probabilities);
  }

 private:
  // Finds this lane's largest score in each row. The result is wrong if all scores are negative.
  // This matters only if all earlier scores of the row are negative, too. The scores are then
  // compared again as floats.
  __device__ void find_largest(const Scores& scores, float (&largest)[2]) const {
    bool may_count = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int bits = largest_bits_of_lane<Bc>(scores, half);
      may_count |= bits < 0 && rows[half].base < -largest_exponent;
      largest[half] = __int_as_float(bits);
    }
    if (may_count) {
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[half] = largest_of_lane<Bc>(scores, half);
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
