// Log-sum-exp of each query row on Hopper (sm_90a), without the output of attention, for float16 and
// bfloat16 without modifications.
//
// A work item is a query tile of Br rows, which is the left operand of the score pipeline. Its right
// tiles are KV tiles of Bc keys.
#pragma once

#include "params.cuh"
#include "received/hopper/score_pipeline.cuh"
#include "scheduler/packed_tiles.cuh"
#include "scheduler/tile_coord.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

// Sums of 2^(score * scale_log2 - base) for the two rows of which a lane holds scores. The base is
// the maximum of some earlier tile: float32 sums terms up to 2^most_exponent times as large without
// another base, so that most tiles need no maximum.
template <class Config>
struct LaneRowSums {
  using Math = SoftmaxMath<float>;
  static constexpr int Bc = Config::Bc;
  static constexpr int most_exponent = 64;

  const float scale_log2;
  float base[2] = {};
  float sum[2] = {};
  bool has_base[2] = {};
  bool has_bases = false;  // whether all rows of the warp have a base

  // Adds the scores of a KV tile. With `Masked`, a row attends to its first visible[half] keys,
  // counted from the lane's first key.
  template <bool Masked>
  __device__ void add(const float (&scores)[Bc / 2], const int (&visible)[2]) {
    const auto score = [&](int i) {
      const bool is_visible = !Masked || i / 4 * 8 + i % 2 < visible[i / 2 % 2];
      const float x = prior_factor<Config> == 1 ? scores[i] : scores[i] * prior_factor<Config>;
      return is_visible ? x : -Math::infinity();
    };
    float sums[2];
    exponentiate(score, sums);
    const bool is_valid = has_bases && !is_too_large(sums[0]) && !is_too_large(sums[1]);
    if (!__all_sync(~0u, is_valid)) {
      update_bases(score);
      exponentiate(score, sums);
    }
    sum[0] += sums[0];
    sum[1] += sums[1];
  }

  // Returns the log-sum-exp of one of the rows, in all its lanes.
  __device__ float log_sum_exp(int half) const {
    const float total = sum_of_lanes(sum[half]);
    // A row without a base has only masked keys, or NaN scores, whose sum is NaN.
    const bool is_empty = !has_base[half] && total == 0;
    return is_empty ? -Math::infinity() : (base[half] + Math::log2(total)) * Math::ln_2;
  }

 private:
  __device__ static bool is_too_large(float sum) {
    constexpr float limit = 1 / power_of_half(most_exponent);
    return !(sum < limit);
  }

  template <class Score>
  __device__ void exponentiate(Score score, float (&sums)[2]) const {
    // Independent chains hide the latency of additions.
    float parts[2][2] = {};
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) {
      const int half = i / 2 % 2;
      parts[half][i % 2] += Math::exp2(fmaf(score(i), scale_log2, -base[half]));
    }
    sums[0] = parts[0][0] + parts[0][1];
    sums[1] = parts[1][0] + parts[1][1];
  }

  // Gives bases to rows that have none, unless all their scores are masked, and new bases to rows
  // that have outgrown theirs.
  template <class Score>
  __device__ void update_bases(Score score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = -Math::infinity();
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        max = fmaxf(max, fmaxf(score(4 * j + 2 * half), score(4 * j + 2 * half + 1)));
      }
      const float exponent = max_of_lanes(max) * scale_log2;
      const bool changes = has_base[half] ? exponent > base[half] + most_exponent / 2
                                          : exponent > -Math::infinity();
      if (!changes) continue;
      if (has_base[half]) sum[half] *= Math::exp2(base[half] - exponent);
      base[half] = exponent;
      has_base[half] = true;
    }
    has_bases = __all_sync(~0u, has_base[0] && has_base[1]);
  }
};

template <class Config_>
struct HopperLse {
  using Config = Config_;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  using Pipeline = ScorePipeline<Config, Br, Bc, false>;

  struct Item {
    const Params& p;
    TileCoord coord;
    Sequence sequence;
    Mask<Config> mask;
    KvTileRange tiles;

    __device__ ScoreWork work() const {
      return {coord.batch,       coord.head,  coord.q_begin, coord.head_kv,
              coord.head_kv + 1, tiles.begin, tiles.end};
    }

    __device__ void consume(Pipeline& pipeline, int consumer) const {
      const int first_row = coord.q_begin + 64 * consumer;
      const int lane_row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      const int first_masked_tile = mask.template full_tiles<Bc>(first_row);
      const int last_row = min(first_row + 64, sequence.seqlen_q) - 1;
      const int end = first_row > last_row ? 0 : ceil_div(mask.visible_end(last_row), Bc);
      LaneRowSums<Config> sums = {exponent_scale<Config, float>(p)};
      if (!work().is_empty()) {
        pipeline.multiply(
            work(), consumer, tiles.begin, end,
            [&](const typename Pipeline::Scores& scores, const ScoreTile& tile, const float*) {
              if (tile.tile < first_masked_tile) {
                sums.template add<false>(scores, {});
                return;
              }
              const int lane_key = tile.tile * Bc + threadIdx.x % 4 * 2;
              sums.template add<true>(scores, {mask.visible_end(lane_row) - lane_key,
                                               mask.visible_end(lane_row + 8) - lane_key});
            });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lse = sums.log_sum_exp(half);
        const int row = lane_row + 8 * half;
        if (threadIdx.x % 4 == 0 && row < sequence.seqlen_q) {
          static_cast<float*>(p.lse)[lse_index<Config>(p, sequence, coord.head, row)] = lse;
        }
      }
    }
  };

  const Params& p;
  const TensorMap* left_map;
  const TensorMap* right_map;

  __device__ unsigned items() const { return ceil_div(p.seqlen_q, Br) * p.batch * p.heads_q; }

  __device__ Item item(unsigned index) const {
    const TileCoord coord = tile_coord<Br>(p, index);
    const Sequence sequence = sequence_of<Config>(p, coord.batch);
    const Mask<Config> mask = mask_of<Config>(p, sequence, coord.batch);
    const int q_end = min(coord.q_begin + Br, sequence.seqlen_q);
    return {p, coord, sequence, mask, kv_tile_range<Bc, false>(mask, coord.q_begin, q_end, 0, 1)};
  }
};

template <class Config>
__device__ void hopper_lse(const ScoreMaps& maps, const Params& p) {
  run_score_kernel(HopperLse<Config>{p, &maps.q, &maps.k});
}

#endif  // __CUDA_ARCH__ == 900
