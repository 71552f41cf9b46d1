// Epilogue of a consumer warpgroup: writes the log-sum-exp of its rows and their output or, if KV
// is split, their partial output.
#pragma once

#include "forward/hopper/cta.cuh"
#include "forward/hopper/products.cuh"
#include "forward/hopper/softmax.cuh"
#include "ptx/base.cuh"
#include "score/dropout.cuh"
#include "score/modify.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperEpilogue {
  using Cta = HopperCta<Config>;
  using Element = typename Cta::Output;
  using WorkTile = typename Cta::WorkTile;
  using Products = HopperProducts<Config>;
  using SoftmaxRow = typename HopperSoftmax<Config>::Row;
  // For float8, `Products::columns_v` is larger if V is padded to whole partial outputs.
  static constexpr int columns_v =
      Cta::transposes_values ? round_up(Config::head_dim_v, 16) : Products::columns_v;

  // Bound on |base| of rows that this kernel computes itself, with Config::marks_low_rows.
  static constexpr float max_base = -low_score<float> - 64;

  const Cta& cta;
  Products& products;
  const int next;  // index in the ring of work tiles that follows that of the finished work tile

  __device__ const WorkTile& finished_work_tile() const {
    return *cta.work_tile_at(next == 0 ? Cta::work_tile_slots - 1 : next - 1);
  }

  // Computes the factors that output rows are multiplied by, and writes the log-sum-exp and the
  // statistics. Returns whether any row of the warp is special; write_output() then handles such
  // rows. A row is special if its factor is 0 or, with Config::detects_one_key_rows, if one lane
  // holds its whole sum, so that the row may attend to one key only. In the latter case the factor
  // in that lane is minus the sum, which normalize_one_key_rows() replaces. Most tiles have no
  // special row.
  __device__ bool finish_softmax(const SoftmaxRow (&finished)[2], float (&normalizer)[2]) const {
    SoftmaxRow state[2] = {finished[0], finished[1]};
    bool may_be_one_key[2] = {}, is_special = false;
    if constexpr (Config::modified) is_special = sum_rows(state, may_be_one_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!Config::modified) state[half].sum = sum_of_lanes(state[half].sum);
      normalizer[half] = state[half].sum == 0 ? 0 : ptx::rcp_approx(state[half].sum);
      if constexpr (Cta::transposes_values) normalizer[half] *= finished_work_tile().scales.values;
      if constexpr (Config::dropout) normalizer[half] *= kept_weight<Config, float>(cta.p);
      if constexpr (Config::sinks && !Config::split_keys) {
        float lse = state[half].log_sum_exp();
        normalizer[half] *= apply_sink<Config>(cta.p, finished_work_tile().coord.head, lse);
      }
      if (is_special && may_be_one_key[half]) normalizer[half] = -state[half].sum;
    }
    if constexpr (Config::modified && Config::sinks) {
      // A large sink may make a factor 0 although the sum is not 0.
      is_special = __any_sync(~0u, is_special || normalizer[0] == 0 || normalizer[1] == 0);
    }
    if constexpr (has_statistics<Config>) write_statistics(state);
    if (Cta::cta_rank() != 0 || (!Config::split_keys && cta.p.lse == nullptr)) return is_special;
    const WorkTile& work_tile = finished_work_tile();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(work_tile.coord, half);
      if (threadIdx.x % 4 == 0 && row < work_tile.sequence(cta.p).seqlen_q) {
        if constexpr (Config::split_keys && Partials<Config>::lse_is_pair) {
          ExponentSum<float> sum = state[half].exponent_sum();
          if constexpr (Config::marks_low_rows) {
            // Marks the row for low_rows.cuh. Otherwise, splits whose scores are not high would
            // hide that this split was left out.
            if (!(state[half].base < max_base)) sum.base = SoftmaxMath<float>::infinity();
          }
          cta.write_log_sum_exp(work_tile, row, sum);
        } else {
          float lse = state[half].log_sum_exp();
          if constexpr (!Config::split_keys) apply_sink<Config>(cta.p, work_tile.coord.head, lse);
          cta.write_log_sum_exp(work_tile, row, lse);
        }
      }
    }
    return is_special;
  }

  // Writes the row statistics. The row sums in `state` must already include all lanes.
  __device__ void write_statistics(SoftmaxRow (&state)[2]) const {
    const WorkTile& work_tile = finished_work_tile();
    float unit = logit_unit<Config, float>(cta.p);
    if constexpr (Cta::transposes_values) unit = work_tile.scales.exponent_scale(unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Config::max_logits) state[half].largest = max_of_lanes(state[half].largest);
      if constexpr (Config::entropy) state[half].moment = sum_of_lanes(state[half].moment);
      const int row = row_of(work_tile.coord, half);
      if (Cta::cta_rank() != 0 || threadIdx.x % 4 != 0 ||
          row >= work_tile.sequence(cta.p).seqlen_q) {
        continue;
      }
      RowSummary<float> summary = state[half].summary(unit);
      if constexpr (!Config::split_keys) {
        float lse = state[half].log_sum_exp();
        summary.scale_weights(apply_sink<Config>(cta.p, work_tile.coord.head, lse));
      }
      cta.write_statistics(work_tile, row, summary);
    }
  }

  // Sums each row over its four lanes. Sets may_be_one_key[half] in a lane whose own sum is the
  // row's sum. Returns whether any row of the warp is special. With Config::marks_low_rows, the sum
  // of a row becomes 0 in two cases, and low_rows.cuh computes the row. Its base may be near the
  // low scores, which are masked though they have weight in this row. Or its base is at least
  // max_base: then scores of the KV tile that set the base are rounded differently from those of
  // later ones. `max_base` allows for the base exceeding the largest score, by at most 32.
  __device__ static bool sum_rows(SoftmaxRow (&state)[2], bool (&may_be_one_key)[2]) {
    bool is_special = false, is_low[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lane_sum = state[half].sum;
      state[half].sum = sum_of_lanes(lane_sum);
      may_be_one_key[half] = Config::detects_one_key_rows && lane_sum == state[half].sum;
      is_low[half] = Config::marks_low_rows && !(fabsf(state[half].base) < max_base);
      is_special |= may_be_one_key[half] || state[half].sum == 0 || is_low[half];
    }
    is_special = __any_sync(~0u, is_special);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_low[half]) state[half].sum = 0;
    }
    return is_special;
  }

  __device__ void write_output(float (&normalizer)[2], bool is_special) const {
    const WorkTile& work_tile = finished_work_tile();
    if (Config::detects_one_key_rows && is_special) normalize_one_key_rows(normalizer);
    products.scale_output(normalizer);
    if (Config::modified && is_special) {
      // A row with a sum of 0 holds 0 times values that other rows attend to. It has no visible key
      // or, with Config::marks_low_rows, only low scores or a high score. With marks_low_rows, all
      // such rows are filled with -0, and counters[0] makes low_rows.cuh look for them.
      constexpr float empty = Config::marks_low_rows ? -0.f : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (normalizer[half] == 0) {
          fill_row_from<columns_v / 8>(products.out + 2 * half, 0, empty);
          if constexpr (Config::marks_low_rows) *cta.p.counters = 1;
        }
      }
    }
    if constexpr (Config::split_keys) {
      write_partial(work_tile.coord);
    } else {
      write_rows(work_tile);
    }
  }

  // Replaces the negative factors that finish_softmax() has set, and the factors of the same rows
  // in other lanes. The output of a row that attends to one key is the value times P rounded to 16
  // bits, so the quotient by the rounded sum is exactly the value. If a row attends to several
  // keys, some of its quotients are not 16-bit numbers; then the factor is 1 / sum, as for any row.
  // Each lane checks one column: checking all 32 makes calls with a bias 1% slower (bfloat16,
  // head_dim 128, 8192 keys, H200). If only the checked columns have 16-bit quotients, the output
  // has the relative error of rounding the sum to 16 bits, half a unit in the last place.
  __device__ void normalize_one_key_rows(float (&normalizer)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = max_of_lanes(-normalizer[half]);
      const float p = widen(narrow<Element>(sum));
      const float inverse = ptx::rcp_approx(p);
      const float x = products.out[2 * half];
      const bool are_values = !any_of_lanes(widen(narrow<Element>(x * inverse)) * p != x);
      if (sum > 0) normalizer[half] = ptx::rcp_approx(are_values ? p : sum);
    }
  }

  __device__ void write_rows(const WorkTile& work_tile) const {
    if constexpr (sizeof(Element) == 4) {
      write_float_rows(work_tile);
    } else {
      write_narrow_rows(work_tile);
    }
  }

  // Four lanes with two columns each write 32 contiguous bytes.
  __device__ void write_float_rows(const WorkTile& work_tile) const {
    const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(work_tile.coord, half);
      if (row >= work_tile.sequence(cta.p).seqlen_q) continue;
      Element* target = cta.output_row(work_tile, row) + first_column;
#pragma unroll
      for (int j = 0; j < columns_v / 8; ++j) {
        const float* two = products.out + 4 * j + 2 * half;
        const int columns_left = Config::head_dim_v - 8 * j - first_column;
        if (Config::out_alignment >= 8 && columns_left >= 2) {
          *reinterpret_cast<Vector<Element, 2>*>(target + 8 * j) = {two[0], two[1]};
        } else {
          if (columns_left > 0) target[8 * j] = two[0];
          if (columns_left > 1) target[8 * j + 1] = two[1];
        }
      }
    }
  }

  __device__ void write_narrow_rows(const WorkTile& work_tile) const {
    // First column of this lane after the exchange with its neighbour lane.
    const int first_column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<Element, 4> columns[columns_v / 16];
#pragma unroll
      for (int i = 0; i < columns_v / 16; ++i) {
        const float* two = products.out + 8 * i + 2 * half;
        columns[i] = exchange(pack<Element>(two[0], two[1]), pack<Element>(two[4], two[5]));
      }
      // One branch encloses all stores: with a branch for each, they would wait for each other.
      const int row = row_of(work_tile.coord, half);
      if (row >= work_tile.sequence(cta.p).seqlen_q) continue;
      if (Config::has_seqlens && Config::causal && cta.is_written_by_scheduler(work_tile, row)) {
        continue;
      }
      Element* target = cta.output_row(work_tile, row) + Cta::first_column_v() + first_column;
#pragma unroll
      for (int i = 0; i < columns_v / 16; ++i) {
        store_columns<Cta::has_whole_columns_v ? Cta::columns_v : 1, Config::out_alignment>(
            target + 16 * i, columns[i], Cta::columns_left_v() - 16 * i - first_column);
      }
    }
  }

  // Of every 16 columns, a lane holds two in the first eight and two in the second eight. Exchanges
  // one of these pairs with the neighbour lane, so that each lane holds four contiguous columns,
  // and four lanes hold 32 contiguous bytes of a row.
  __device__ static Vector<Element, 4> exchange(unsigned first, unsigned second) {
    const bool odd = threadIdx.x & 1;
    const unsigned received = __shfl_xor_sync(~0u, odd ? first : second, 1);
    const unsigned pairs[2] = {odd ? received : first, odd ? second : received};
    return reinterpret_cast<const Vector<Element, 4>&>(pairs);
  }

  __device__ void write_partial(const TileCoord& coord) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(coord, half);
      if (row >= cta.p.seqlen_q) continue;
      float* target = cta.partial_row(coord, row);
      // If no CTA has padded columns, no column needs a bounds check.
      constexpr bool whole = Cta::has_whole_columns_v;
      if (whole) target += Cta::first_column_v();
      write_row<columns_v / 8, whole ? Cta::columns_v : Config::head_dim_v>(
          target, products.out + 2 * half, [](int j, int c) {
            return (whole ? 0 : Cta::first_column_v()) + 8 * j + threadIdx.x % 4 * 2 + c;
          });
    }
  }

  // Returns the query row of this lane's upper (0) or lower (1) accumulator half.
  __device__ int row_of(const TileCoord& coord, int half) const {
    return products.first_row_of(coord) + Products::lane_row() + 8 * half;
  }
};

#endif  // __CUDA_ARCH__ == 900
