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
#pragma once

#include "forward/hopper/operand.cuh"
#include "params.cuh"
#include "ptx/float8.cuh"
#include "score/lagging_softmax.cuh"
#include "score/softmax.cuh"
#include "tile/slabs.cuh"

// An input whose output is of another type. With `fast_accum` the sums of a row stay in the tensor
// cores, which cut off what is below 2^-13 of a sum, of each product; else a block's share is
// added.
template <class Out, bool fast_accum>
struct float8_for {
  unsigned char bits;
};

// Without data they are 1. cupy_flash/families/params.py declares the same struct.
struct Float8Params : Params {
  Tensor q_scale;  // (batch, 1, heads_q), with strides of 0 where all have one
  Tensor k_scale;  // (batch, 1, heads_kv)
  Tensor v_scale;
};

// The range of p. e4m3 holds up to 448, and loses bits below 2^-6. The largest p of a row is 8 to
// 448, and so at least eight times what it is in a softmax that subtracts the maximum; most are
// near the upper end. A base that changes leaves it at 8, of which a lane's in a block of 224 keys
// sum up to 448: equal scores, too, need no other base. Scores around zero start with p around 2,
// so that e^5 is not too large.
template <class Out, bool fast_accum>
struct LaggingRange<float8_for<Out, fast_accum>> {
  static constexpr int highest = 8;
  static constexpr int lowest = 3;
  static constexpr float first_base = -1;
  static constexpr float most = 448;
};

#if __CUDA_ARCH__ == 900

template <class Out, bool fast_accum>
struct HopperOutput<float8_for<Out, fast_accum>> {
  using type = Out;
};

template <class Out, bool fast_accum>
struct HopperOperand<float8_for<Out, fast_accum>> {
  using type = float8_e4m3_t;
  static constexpr int pieces = 1;
  static constexpr int step = 32;
  static constexpr bool transposes_values = true;
  static constexpr bool shares = !fast_accum;
  static constexpr int words(int keys) { return keys / 8; }

  // Pair i of the scores, as they lie: columns 8 (i / 2) + 2 t and the next of row i % 2.
  __device__ static void put(float low, float high, int i, unsigned* probabilities) {
    const unsigned short two = ptx::cvt_rn_satfinite_e4m3x2_f32(low, high);
    unsigned& four = probabilities[i / 4 * 2 + i % 2];
    four = i / 2 % 2 ? ptx::mov_b32(static_cast<unsigned short>(four), two) : two;
  }
};

// Ones, eight rows of 16 bytes, which a matrix descriptor has as both halves of 32 x 8 of them:
// what P is multiplied by for the sums of its rows as rounded. A row of which one key makes up
// nearly all has a largest p anywhere between two powers of two, where a rounding is up to 1/16 of
// it; divided by that sum the output is this key's value.
struct HopperOnes {
  static constexpr int bytes = 128;
  static constexpr unsigned char one = 0x38;
};

// Rows x Columns bytes.
template <int Rows, int Columns>
struct ByteSlabTile : SlabTile<Rows, (Columns + 1) / 2> {
  static constexpr int line_columns = SlabTile<Rows, (Columns + 1) / 2>::line_bytes;
};

template <class Config, int columns, int columns_v, class Out, bool fast_accum>
struct HopperTiles<Config, columns, columns_v, float8_for<Out, fast_accum>> {
  static_assert(Config::Bc % 32 == 0, "whole steps of k");
  static_assert(columns == Config::head_dim && columns_v == Config::head_dim_v, "no pairs");
  using QueryTile = ByteSlabTile<Config::Br, Config::head_dim>;
  using KeyTile = ByteSlabTile<Config::Bc, Config::head_dim>;
  // Its columns are keys; its rows are as many as products.cuh multiplies.
  static constexpr bool is_wide =
      !fast_accum && (Config::head_dim > 128 || Config::head_dim_v > 128);
  using ValueTile = ByteSlabTile<round_up(Config::head_dim_v, is_wide ? 32 : 16), Config::Bc>;
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

template <class Config, class Out, bool fast_accum>
struct HopperVisit<Config, float8_for<Out, fast_accum>> : Visit<false> {
  HopperScales scales;

  __device__ static HopperVisit end_of_work() { return {Visit<false>::end_of_work(), {}}; }
  __device__ static HopperVisit of(const Params& p, const Work& work, const KeyTiles& keys) {
    return {{{}, work, keys}, HopperScales::of(p, work)};
  }
};

#endif  // __CUDA_ARCH__ == 900
