// The scales of a cache of 8 bits. Scores are multiplied by that of their key, probabilities by that
// of their key's value, once they have been summed up.
#pragma once

#include "grid/shares.cuh"
#include "params.cuh"
#include "ptx/bytes.cuh"
#include "ptx/stream.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"

// Without data they are 1. cupy_flash/families/params.py declares the same struct.
struct QuantizedParams : Params {
  Tensor k_scale;  // (caches or pages, rows, heads_kv), with strides of 0 where all have one
  Tensor v_scale;
};

// What a config names only where it is quantized.
template <class Config, bool quantized = Config::quantized>
struct CacheOf {
  using Arguments = Params;
  using Element = typename Config::Element;
  static constexpr bool k_by_key = false, v_by_key = false;
};
template <class Config>
struct CacheOf<Config, true> {
  using Arguments = QuantizedParams;
  using Element = typename Config::CacheElement;
  static constexpr bool k_by_key = Config::k_scales_by_key, v_by_key = Config::v_scales_by_key;
};

#if __CUDA_ARCH__ >= 800

// Of the keys of a part, or of their values: one that all of them have, or each its own, which come
// to a stage behind the rows that they are of.
template <class Config, bool by_key>
struct ScalesOfPart {
  static constexpr int Bc = Config::Bc;
  static constexpr int page_size = Config::page_size;
  static constexpr int bytes = by_key ? Bc * int(sizeof(float)) : 0;
  static_assert(Bc == 32, "a lane brings the scale of one key");

  const Tensor& scales;
  float of_all;
  const float* from;

  __device__ explicit ScalesOfPart(const Tensor& scales) : scales(scales) {}

  __device__ void begin(const Part& part) {
    of_all = 1;
    from = nullptr;
    if (scales.data == nullptr) return;
    const int batch = page_size > 0 ? 0 : part.sequence.k_batch;
    const int64 first = page_size > 0 ? 0 : part.sequence.k_first;
    from = scales.head<const float>(batch, part.head_kv) + first * scales.row_stride;
    if constexpr (!by_key) of_all = *from;
  }

  // Starts copying those of a tile; `page` is that of the tile or, where pages are shorter, of the
  // lane's row.
  __device__ void start(unsigned target, int tile, int page, int seqlen_k) const {
    if constexpr (by_key) {
      const int lane = threadIdx.x % 32;
      const int key = tile * Bc + lane;
      bool is_inside = key < seqlen_k;
      const float* source = from;
      if constexpr (page_size > 0) {
        is_inside = is_inside && page >= 0;
        source += page * scales.batch_stride + key % page_size * scales.row_stride;
      } else {
        source += key * scales.row_stride;
      }
      ptx::cp_async<4>(target + lane * 4, is_inside ? source : from, is_inside ? 4 : 0);
    }
  }

  // Those of the keys that the lane has in accumulator fragments.
  using OfLane = float[Bc / 8][2];
  __device__ void take(OfLane& of_lane, unsigned stage) const {
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      if constexpr (by_key) {
        ptx::ld_shared_v2(of_lane[j], stage + (8 * j + threadIdx.x % 4 * 2) * 4);
      } else {
        of_lane[j][0] = of_lane[j][1] = of_all;
      }
    }
  }
};

// A warp's. Of 16-bit caches there are none.
template <class Config, bool quantized = Config::quantized>
struct DecodeScales {
  static constexpr int bytes = 0;

  __device__ explicit DecodeScales(const Params&) {}
  __device__ void begin(const Part&) {}
  __device__ void start(unsigned, int, int, int) const {}
};

template <class Config>
struct DecodeScales<Config, true> {
  using Keys = ScalesOfPart<Config, Config::k_scales_by_key>;
  using Values = ScalesOfPart<Config, Config::v_scales_by_key>;
  static constexpr int bytes = Keys::bytes + Values::bytes;
  // A probability times a scale is rounded to 16 bits, and float16 has no small ones. So there scales
  // are in units of a power of two, which grows with the largest that came.
  static constexpr bool has_unit =
      Config::v_scales_by_key && headroom<typename Config::Element> == 0;
  static constexpr float least_unit = 1.17549435e-38f;

  Keys keys;
  Values values;
  float unit;

  __device__ explicit DecodeScales(const QuantizedParams& p) : keys(p.k_scale), values(p.v_scale) {}

  __device__ void begin(const Part& part) {
    keys.begin(part);
    values.begin(part);
    unit = has_unit ? least_unit : 1;
  }

  __device__ void start(unsigned target, int tile, int page, int seqlen_k) const {
    keys.start(target, tile, page, seqlen_k);
    values.start(target + Keys::bytes, tile, page, seqlen_k);
  }

  template <int row_tiles>
  __device__ void multiply(float (&scores)[row_tiles][Config::Bc / 8][4], unsigned stage) const {
    typename Keys::OfLane factors;
    keys.take(factors, stage);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Config::Bc / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[i][j][c] *= factors[j][c % 2];
      }
    }
  }

  // What probabilities of the lane's keys are multiplied by. `out` is what has been summed up, in
  // the unit so far.
  template <int row_tiles, int column_tiles>
  __device__ void take_of_values(typename Values::OfLane& factors, unsigned stage,
                                 float (&out)[row_tiles][column_tiles][4]) {
    if constexpr (!Config::v_scales_by_key) {
      // The output's as a whole.
#pragma unroll
      for (int j = 0; j < Config::Bc / 8; ++j) factors[j][0] = factors[j][1] = 1;
      return;
    }
    values.take(factors, stage + Keys::bytes);
    if constexpr (has_unit) {
      float largest = 0;
#pragma unroll
      for (int j = 0; j < Config::Bc / 8; ++j) {
        largest = fmaxf(largest, fmaxf(fabsf(factors[j][0]), fabsf(factors[j][1])));
      }
      largest = max_of_lanes(largest);
      if (largest > unit && largest <= largest_float) {
        // Its exponent.
        const float grown = __uint_as_float(__float_as_uint(largest) & 0x7f800000u);
        const float rescale = unit / grown;
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          scale_row<column_tiles>(out[i][0], rescale);
          scale_row<column_tiles>(out[i][0] + 2, rescale);
        }
        unit = grown;
      }
#pragma unroll
      for (int j = 0; j < Config::Bc / 8; ++j) {
        factors[j][0] = ptx::div_rn(factors[j][0], unit);
        factors[j][1] = ptx::div_rn(factors[j][1], unit);
      }
    }
  }

  // What the output is multiplied by in the end.
  __device__ float of_output() const {
    return Config::v_scales_by_key ? unit : values.of_all;
  }

 private:
  static constexpr float largest_float = 3.40282347e38f;
};

#endif  // __CUDA_ARCH__ >= 800
