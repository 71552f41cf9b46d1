// Scales of an 8-bit KV cache. A score is multiplied by the scale of its key. A probability is
// added to the row sum and then multiplied by the scale of its value.
#pragma once

#include "scheduler/kv_partition.cuh"
#include "params.cuh"
#include "ptx/bytes.cuh"
#include "ptx/stream.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"
#include "score/powers.cuh"

// All scales are 1 if the `data` of their tensor is null. families/params.py has the same struct.
struct QuantizedParams : Params {
  Tensor k_scale;  // (caches or pages, rows, heads_kv); stride 0 along axes with a common scale
  Tensor v_scale;
};

// Argument struct and element type of the cache. Config::CacheElement exists only if quantized.
template <class Config, bool quantized = Config::quantized>
struct CacheOf {
  using Arguments = Params;
  using Element = typename Config::Element;
};
template <class Config>
struct CacheOf<Config, true> {
  using Arguments = QuantizedParams;
  using Element = typename Config::CacheElement;
};

#if __CUDA_ARCH__ >= 800

// Scales of the keys, or of the values, of a partial tile. With `by_key`, each key has a scale of
// its own, stored in the ring stage after the rows of K and V. Otherwise all keys have one scale.
template <class Config, bool by_key>
struct PartialTileScales {
  static constexpr int Bc = Config::Bc;
  static constexpr int page_size = Config::page_size;
  static constexpr int bytes = by_key ? Bc * int(sizeof(float)) : 0;
  static_assert(Bc == 32, "each lane loads the scale of one key");

  const Tensor& scales;
  float common_scale;
  const float* first_scale;

  __device__ explicit PartialTileScales(const Tensor& scales) : scales(scales) {}

  __device__ void begin(const PartialTile& partial_tile) {
    common_scale = 1;
    first_scale = nullptr;
    if (scales.data == nullptr) return;
    const int batch = page_size > 0 ? 0 : partial_tile.sequence.k_batch;
    const int64 first = page_size > 0 ? 0 : partial_tile.sequence.k_first;
    first_scale = scales.head<const float>(batch, partial_tile.head_kv) + first * scales.row_stride;
    if constexpr (!by_key) common_scale = *first_scale;
  }

  // Starts copying the scales of a KV tile. `page` is the page of the tile or, if pages are shorter
  // than a tile, the page of the lane's row.
  __device__ void start(unsigned target, int tile, int page, int seqlen_k) const {
    if constexpr (by_key) {
      const int lane = threadIdx.x % 32;
      const int key = tile * Bc + lane;
      bool is_inside = key < seqlen_k;
      const float* source = first_scale;
      if constexpr (page_size > 0) {
        is_inside = is_inside && page >= 0;
        source += page * scales.batch_stride + key % page_size * scales.row_stride;
      } else {
        source += key * scales.row_stride;
      }
      ptx::cp_async<4>(target + lane * 4, is_inside ? source : first_scale, is_inside ? 4 : 0);
    }
  }

  // Scales of the keys that a lane holds in accumulator fragments. load() loads them.
  using LaneScales = float[Bc / 8][2];
  __device__ void load(LaneScales& lane_scales, unsigned stage) const {
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      if constexpr (by_key) {
        ptx::ld_shared_v2(lane_scales[j], stage + (8 * j + threadIdx.x % 4 * 2) * 4);
      } else {
        lane_scales[j][0] = lane_scales[j][1] = common_scale;
      }
    }
  }
};

// Scales held by one warp. A 16-bit cache has no scales.
template <class Config, bool quantized = Config::quantized>
struct DecodeScales {
  static constexpr int bytes = 0;

  __device__ explicit DecodeScales(const Params&) {}
  __device__ void begin(const PartialTile&) {}
  __device__ void start(unsigned, int, int, int) const {}
};

template <class Config>
struct DecodeScales<Config, true> {
  using Keys = PartialTileScales<Config, Config::k_scales_by_key>;
  using Values = PartialTileScales<Config, Config::v_scales_by_key>;
  static constexpr int bytes = Keys::bytes + Values::bytes;
  static constexpr int row_tiles = Config::Br / 16;
  static constexpr int key_tiles = Config::Bc / 8;
  using Scores = float[row_tiles][key_tiles][4];
  static constexpr float least_unit = 0x1p-126f, most_unit = 0x1p126f;

  Keys keys;
  Values values;
  // A probability times a scale is rounded to float16, which cannot represent small numbers. So the
  // products of each row are divided by the row's unit before, a power of two that grows with the
  // largest product so far.
  float units[row_tiles][2];

  __device__ explicit DecodeScales(const QuantizedParams& p) : keys(p.k_scale), values(p.v_scale) {}

  __device__ void begin(const PartialTile& partial_tile) {
    keys.begin(partial_tile);
    values.begin(partial_tile);
    if constexpr (Config::v_scales_by_key) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) units[i][0] = units[i][1] = least_unit;
    }
  }

  __device__ void start(unsigned target, int tile, int page, int seqlen_k) const {
    keys.start(target, tile, page, seqlen_k);
    values.start(target + Keys::bytes, tile, page, seqlen_k);
  }

  // Multiplies scores by the factors of their rows and the scales of their keys.
  __device__ void multiply(Scores& scores, const float (&row_factors)[row_tiles][2],
                           unsigned stage) const {
    typename Keys::LaneScales factors;
    keys.load(factors, stage);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < key_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[i][j][c] *= factors[j][c % 2] * row_factors[i][c / 2];
      }
    }
  }

  // Multiplies probabilities by the scales of their values and divides them by the units of their
  // rows. Rescales `out` if a unit grows. A common scale of all keys is left to output_scale().
  template <int column_tiles>
  __device__ void multiply_probabilities(Scores& p, unsigned stage,
                                         float (&out)[row_tiles][column_tiles][4]) {
    if constexpr (Config::v_scales_by_key) {
      typename Values::LaneScales factors;
      values.load(factors, stage + Keys::bytes);
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        float largest[2] = {};
#pragma unroll
        for (int j = 0; j < key_tiles; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            p[i][j][c] *= factors[j][c % 2];
            largest[c / 2] = fmaxf(largest[c / 2], fabsf(p[i][j][c]));
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          grow_unit<column_tiles>(units[i][half], max_of_lanes(largest[half]),
                                  out[i][0] + 2 * half);
          const float inverse = inverse_of_power(units[i][half]);
#pragma unroll
          for (int j = 0; j < key_tiles; ++j) {
            p[i][j][2 * half] *= inverse;
            p[i][j][2 * half + 1] *= inverse;
          }
        }
      }
    }
  }

  // Factors for the partial result of a row. The output is multiplied by the row's unit or by the
  // shared scale. If that could overflow a float, output and sum are also multiplied by 2^-24, and
  // the base is raised by 24.
  struct OutputScale {
    float factor;
    float base_offset;
    float sum_factor;
  };
  __device__ OutputScale output_scale(int i, int half) const {
    const float factor = Config::v_scales_by_key ? units[i][half] : values.common_scale;
    const bool is_large = fabsf(factor) > 0x1p64f;
    return {is_large ? factor * 0x1p-24f : factor, is_large ? 24.0f : 0, is_large ? 0x1p-24f : 1};
  }

 private:
  // Increases the unit of a row if `largest` is at least twice as large. Rescales the output row.
  template <int column_tiles>
  __device__ static void grow_unit(float& unit, float largest, float* row) {
    if (largest >= 2 * unit && largest < SoftmaxMath<float>::infinity()) {
      const float new_unit = fminf(power_below(largest), most_unit);
      scale_row<column_tiles>(row, unit * inverse_of_power(new_unit));
      unit = new_unit;
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
