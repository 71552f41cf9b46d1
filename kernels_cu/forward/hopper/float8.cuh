// float8 (e4m3) as the Hopper kernel takes it: an array of q, k or v stands for its numbers times a
// scale for each batch and head, and the output is of 16 bits.
//
// Products of 8 bits have both operands with k contiguous. So the values come transposed, from an
// array that `hopper_values` has made (values.cuh), and with the keys of each sixteen in such an
// order that a lane's scores, which are of columns 2 t and 2 t + 1 of each eight (t is lane % 4),
// are at once its part of P:
//
//   place    0  1  2  3   4  5   6   7   8  9  10  11  12  13  14  15
//   key      0  1  8  9   2  3  10  11   4  5  12  13   6   7  14  15
//
// Of each number that the tensor cores add up, also of the sum so far, they keep what is above 2^-13
// of the largest, and cut off the rest: a sum over all keys would fall short by a quarter at 16384
// of them. So a block's share of the output is summed alone, and added in float32.
#pragma once

#include "forward/hopper/operand.cuh"
#include "params.cuh"
#include "ptx/float8.cuh"
#include "tile/slabs.cuh"

// An input whose output is of another type.
template <class Out>
struct float8_for {
  unsigned char bits;
};

// Without data they are 1. cupy_flash/families/params.py declares the same struct.
struct Float8Params : Params {
  Tensor q_scale;  // (batch, 1, heads_q), with strides of 0 where all have one
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
  static constexpr int pieces = 1;
  static constexpr bool transposes_values = true;

  // Pair i of the scores, as they lie: columns 8 (i / 2) + 2 t and the next of row i % 2.
  template <int Words>
  __device__ static void put(float low, float high, int i, unsigned (&probabilities)[Words]) {
    const unsigned short two = ptx::cvt_rn_satfinite_e4m3x2_f32(low, high);
    unsigned& four = probabilities[i / 4 * 2 + i % 2];
    four = i / 2 % 2 ? ptx::mov_b32(static_cast<unsigned short>(four), two) : two;
  }
};

// Rows x Columns bytes.
template <int Rows, int Columns>
struct ByteSlabTile : SlabTile<Rows, (Columns + 1) / 2> {
  static constexpr int line_columns = SlabTile<Rows, (Columns + 1) / 2>::line_bytes;
};

template <class Config, int columns, int columns_v, class Out>
struct HopperTiles<Config, columns, columns_v, float8_for<Out>> {
  static_assert(Config::Bc % 32 == 0, "whole steps of k");
  static_assert(columns == Config::head_dim && columns_v == Config::head_dim_v, "no pairs");
  using QueryTile = ByteSlabTile<Config::Br, columns>;
  using KeyTile = ByteSlabTile<Config::Bc, columns>;
  // Its columns are keys; its rows, as many as are multiplied, whole shares.
  static constexpr int value_rows = round_up(columns_v, Config::Bc / Config::score_parts);
  using ValueTile = ByteSlabTile<value_rows, Config::Bc>;
};

// The scales of a query tile are found by the producer, so that nobody waits for them.
struct HopperScales {
  float scores;  // that scores are multiplied by besides
  float values;  // and the output

  __device__ static HopperScales of(const Params& params, const Work& work) {
    const auto& p = static_cast<const Float8Params&>(params);
    return {at(p.q_scale, work.batch, work.head) * at(p.k_scale, work.batch, work.head_kv),
            at(p.v_scale, work.batch, work.head_kv)};
  }

  // The scale of exponents. Its sign is apart: whose scores are masked by -inf it has to be
  // positive, and not 0 even where no score makes a difference. NaN stays.
  __device__ float exponent_scale(float scale_log2) const {
    const float scale = fabsf(scores) * scale_log2;
    return scale < 0x1p-100f ? 0x1p-100f : scale;
  }
  __device__ bool negates() const { return scores < 0; }

 private:
  __device__ static float at(const Tensor& scale, int batch, int head) {
    return scale.data == nullptr ? 1 : *scale.head<const float>(batch, head);
  }
};

template <class Config, class Out>
struct HopperVisit<Config, float8_for<Out>> : Visit<false> {
  HopperScales scales;

  __device__ static HopperVisit end_of_work() { return {Visit<false>::end_of_work(), {}}; }
  __device__ static HopperVisit of(const Params& p, const Work& work, const KeyTiles& keys) {
    return {{{}, work, keys}, HopperScales::of(p, work)};
  }
};

#endif  // __CUDA_ARCH__ == 900
