// float8 (e4m3) in the Hopper kernel. Inputs q, k and v have a scale for each batch and head, and
// the output has 16 bits.
//
// 8-bit wgmma needs both operands with k contiguous. So `hopper_transpose_values`
// (float8/transpose_values.cuh) transposes V into the workspace and permutes the keys of each group
// of 16. A lane holds the scores of keys 2 t and 2 t + 1 of every eight (t is lane % 4). wgmma
// reads P at indices 4 t to 4 t + 3 of every 16 from this lane, so its keys are moved there:
//
//   index    0  1  2  3   4  5   6   7   8  9  10  11  12  13  14  15
//   key      0  1  8  9   2  3  10  11   4  5  12  13   6   7  14  15
//
// When 8-bit wgmma adds products to a sum, it drops all bits below 2^-13 times the largest of these
// numbers. A sum over 16384 keys would be too small by a quarter. So the contribution of each KV
// tile to O is accumulated separately, and added in float32.
#pragma once

#include "forward/hopper/operand.cuh"
#include "params.cuh"
#include "ptx/float8.cuh"
#include "tile/tma_tile.cuh"

// A float8 input whose output has type `Out`.
template <class Out>
struct float8_for {
  unsigned char bits;
};

// All scales are 1 if the `data` of their tensor is null. families/params.py has the same struct.
struct Float8Params : Params {
  Tensor q_scale;  // (batch, 1, heads_q); stride 0 along axes with a common scale
  Tensor k_scale;  // (batch, 1, heads_kv)
  Tensor v_scale;
};

#if __CUDA_ARCH__ == 900

template <class Out>
struct HopperOutput<float8_for<Out>> {
  using type = Out;
};

template <class Out>
struct HopperOperand<float8_for<Out>> {
  using type = float8_e4m3_t;
  static constexpr int components = 1;
  static constexpr bool transposes_values = true;

  // Stores pair i of P, in accumulator order: columns 8 (i / 2) + 2 t and the next one, in the
  // upper (i % 2 == 0) or lower row of the lane.
  template <int Words>
  __device__ static void store_pair(float low, float high, int i,
                                    unsigned (&probabilities)[Words]) {
    const unsigned short two = ptx::cvt_rn_satfinite_e4m3x2_f32(low, high);
    unsigned& four = probabilities[i / 4 * 2 + i % 2];
    four = i / 2 % 2 ? ptx::mov_b32(static_cast<unsigned short>(four), two) : two;
  }
};

// Tile of Rows x Columns bytes.
template <int Rows, int Columns>
struct ByteTmaTile : TmaTile<Rows, (Columns + 1) / 2> {
  static constexpr int box_columns = TmaTile<Rows, (Columns + 1) / 2>::box_row_bytes;
};

template <class Config, int columns, int columns_v, class Out>
struct HopperTiles<Config, columns, columns_v, float8_for<Out>> {
  static_assert(Config::Bc % 32 == 0, "whole steps of k");
  static_assert(columns == Config::head_dim && columns_v == Config::head_dim_v,
                "no clusters of two CTAs");
  using QueryTile = ByteTmaTile<Config::Br, columns>;
  using KeyTile = ByteTmaTile<Config::Bc, columns>;
  // The columns of a V tile are keys. Its rows are padded to whole partial outputs.
  static constexpr int value_rows = round_up(columns_v, Config::Bc / Config::score_parts);
  using ValueTile = ByteTmaTile<value_rows, Config::Bc>;
};

// Scales of a query tile. The producer loads them, so that no consumer waits for them.
struct HopperScales {
  float scores;  // factor of the scores, besides softmax_scale
  float values;  // factor of the output

  __device__ static HopperScales load(const Params& params, const TileCoord& coord) {
    const auto& p = static_cast<const Float8Params&>(params);
    return {load_scale(p.q_scale, coord.batch, coord.head) *
                load_scale(p.k_scale, coord.batch, coord.head_kv),
            load_scale(p.v_scale, coord.batch, coord.head_kv)};
  }

  // Returns the magnitude of the scale of the exponents; negates() returns its sign. It must not be
  // 0, because masked scores of -inf are multiplied by it. A NaN is returned as it is.
  __device__ float exponent_scale(float scale_log2) const {
    const float scale = fabsf(scores) * scale_log2;
    return scale < 0x1p-100f ? 0x1p-100f : scale;
  }
  __device__ bool negates() const { return scores < 0; }

 private:
  __device__ static float load_scale(const Tensor& scale, int batch, int head) {
    return scale.data == nullptr ? 1 : *scale.head<const float>(batch, head);
  }
};

template <class Config, class Out>
struct HopperWorkTile<Config, float8_for<Out>> : WorkTile<false> {
  HopperScales scales;

  __device__ static HopperWorkTile end_of_work() { return {WorkTile<false>::end_of_work(), {}}; }
  __device__ static HopperWorkTile create(const Params& p, const TileCoord& coord,
                                          const KvTileRange& keys) {
    return {{{}, coord, keys}, HopperScales::load(p, coord)};
  }
};

#endif  // __CUDA_ARCH__ == 900
