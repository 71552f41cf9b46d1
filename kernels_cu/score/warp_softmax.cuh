// Online softmax of the rows that a warp holds as accumulator fragments of mma.m16n8k*: element
// [i][j][2 * half + c] of a lane is row 16 i + 8 half + lane / 4, column 8 j + lane % 4 * 2 + c.
#pragma once

#include "ptx/base.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/fragments.cuh"

template <class Element, int row_tiles, int Bc, int columns_v,
          class Statistics = RowStatistics<float>>
struct WarpSoftmax {
  using Row = SoftmaxRow<float, Statistics>;
  // The running maximum may be stale until p has grown by 2^slack, far inside float16's range.
  static constexpr int slack = 8;
  static constexpr int headroom = ::headroom<Element> ? ::headroom<Element> + slack : 0;
  // For 16-bit types, the headroom is applied by raising the running maximum (`raise`), which needs
  // no instruction for each score. This rounds exponents to 2^-20, which is too coarse for wider
  // types: there p is multiplied by 2^-factor instead.
  static constexpr int raise = sizeof(Element) == 2 ? headroom : 0;
  static constexpr int factor = headroom - raise;

  using Scores = float[row_tiles][Bc / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];
  using PerRow = float[row_tiles][2];

  // The row sums, in units of 2^-factor, include only this lane's keys.
  Row rows[row_tiles][2];

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      rows[i][0].reset();
      rows[i][1].reset();
    }
  }

  template <class Config>
  __device__ static void apply_factor(Scores& scores) {
    if constexpr (prior_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) scores[i][j][c] *= prior_factor<Config>;
        }
      }
    }
  }

  // Masks the keys from visible_end(i, half) on. Keys are counted from the lane's first key, which
  // is key threadIdx.x % 4 * 2 of the KV tile.
  template <class VisibleEnd>
  __device__ static void mask(Scores& scores, VisibleEnd visible_end) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fill_row_from<Bc / 8>(scores[i][0] + 2 * half, visible_end(i, half),
                              -SoftmaxMath<float>::infinity());
      }
    }
  }

  // Masks the keys before visible_begin(i, half), also counted from the lane's first key.
  template <class VisibleBegin>
  __device__ static void mask_before(Scores& scores, VisibleBegin visible_begin) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fill_row_before<Bc / 8>(scores[i][0] + 2 * half, visible_begin(i, half),
                                -SoftmaxMath<float>::infinity());
      }
    }
  }

  // Updates the running maxima from the scores, and rescales the output of rows whose maximum
  // changed. This is rare after the first few KV tiles, so all of the work is inside the branch.
  // Rows do not affect each other: multiplying a row by 1 keeps all of its bits.
  __device__ void update_maxima(const Scores& scores, Output& out, float scale_log2) {
    PerRow tile_max;
    bool outgrown = false;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = scores[i][0][2 * half];
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) max = fmaxf(max, scores[i][j][2 * half + c]);
        }
        max = max_of_lanes(max);
        tile_max[i][half] = max;
        rows[i][half].include_score(max);
        outgrown |= rows[i][half].outgrown_by(max, scale_log2, slack - raise);
      }
    }
    if (!__any_sync(~0u, outgrown)) return;
    const float raised_by = raise ? __fdividef(raise, scale_log2) : 0;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float max = raise ? tile_max[i][half] + raised_by : tile_max[i][half];
        const float rescale = rows[i][half].update_max(max, scale_log2, slack);
        scale_row<columns_v / 8>(out[i][0] + 2 * half, rescale);
      }
    }
  }

  __device__ void bases(PerRow& base, float scale_log2) const {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      base[i][0] = rows[i][0].base(scale_log2);
      base[i][1] = rows[i][1].base(scale_log2);
    }
  }

  // Replaces scores[i][j] (row tile i, keys [8 j, 8 j + 8)) by probabilities relative to the base.
  __device__ void exponentiate(Scores& scores, int i, int j, const PerRow& base, float scale_log2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& score = scores[i][j][c];
      const float exponent = Row::exponent(score, scale_log2, base[i][c / 2]);
      score = SoftmaxMath<float>::exp2(exponent);
      if constexpr (factor != 0) score *= power_of_half(factor);
      rows[i][c / 2].sum += score;
      rows[i][c / 2].include_exponent(score, exponent);
    }
  }

  // Returns p of the row's largest score. `row.max` must include all of the row's KV tiles.
  __device__ static float largest_probability(const Row& row, float scale_log2) {
    return Row::probability(row.max, scale_log2, row.base(scale_log2)) * power_of_half(factor);
  }

  // Reduces the row sums over the four lanes that hold a row.
  __device__ const Row& add_lanes(int i, int half) {
    Row& row = rows[i][half];
    row.sum = sum_of_lanes(row.sum);
    if constexpr (Statistics::has_moment) row.moment = sum_of_lanes(row.moment);
    return row;
  }
  __device__ void add_lanes() {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      add_lanes(i, 0);
      add_lanes(i, 1);
    }
  }
};
