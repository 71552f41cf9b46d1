// What the tensor cores take in place of the elements of Q, K, V and P.
//
// float32 comes as three bfloat16 that sum up to it, 8 of its 24 bits each (Henry, Tang and
// Heinecke 2019): x y is six products of these, and leaves out 2^-24 of it. Unlike float16 and TF32
// they need no scale, and unlike TF32 they may be multiplied with keys as k, as P V does.
#pragma once

#include "grid/visit.cuh"
#include "ptx/base.cuh"
#include "tile/element.cuh"
#include "tile/slabs.cuh"

#if __CUDA_ARCH__ == 900

// float8 has an operand, an output, tiles and scales of its own (float8.cuh).
template <class Element>
struct HopperOutput {
  using type = Element;
};

template <class Element>
struct HopperOperand {
  using type = Element;
  static constexpr int pieces = 1;
  static constexpr bool transposes_values = false;

  __device__ static void split(float low, float high, unsigned (&pieces)[1]) {
    pieces[0] = pack<Element>(low, high);
  }
};

template <>
struct HopperOperand<float> {
  using type = bfloat16_t;
  static constexpr int pieces = 3;
  static constexpr bool transposes_values = false;

  // Two numbers, the first in the lower halves, the largest pieces first.
  __device__ static void split(float low, float high, unsigned (&pieces)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      pieces[i] = pack<bfloat16_t>(low, high);
      low -= __uint_as_float(pieces[i] << 16);
      high -= __uint_as_float(pieces[i] & 0xffff0000u);
    }
  }

  // The same of any numbers. An infinity is left to the last piece, which meets the first of the
  // other operand only: with the others, which may be 0 or of another sign, it would make NaN.
  __device__ static void split_any(float low, float high, unsigned (&pieces)[3]) {
    const float most_low = most_of(low), most_high = most_of(high);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces[i] =
          pack<bfloat16_t>(ptx::min_magnitude(low, most_low), ptx::min_magnitude(high, most_high));
      low -= __uint_as_float(pieces[i] << 16);
      high -= __uint_as_float(pieces[i] & 0xffff0000u);
    }
    pieces[2] = pack<bfloat16_t>(low, high);
  }

  // What the first pieces of a number are at most: the largest bfloat16, so that none is rounded to
  // infinity. Those of an infinity are not to make any of another sign.
  __device__ static float most_of(float x) {
    constexpr float largest = 0x1.fep127f;
    return fabsf(x) == __int_as_float(0x7f800000) ? 1 : largest;
  }
};

// Calls product(i, j) for the pieces i of one operand and j of the other that count, the smallest
// products first. `unroll` is 1 for a loop, whose code must not take the pieces from registers.
template <int pieces, int unroll = pieces * (pieces + 1) / 2, class Product>
__device__ void for_each_product(Product product) {
  int sum = pieces - 1, i = 0;
#pragma unroll unroll
  for (int n = 0; n < pieces * (pieces + 1) / 2; ++n) {
    product(i, sum - i, n == 0);
    if (++i > sum) {
      i = 0;
      --sum;
    }
  }
}

// Rows of keys, or of queries, whose first columns are values: these and the rest in slabs of their
// own.
template <int Rows, int Values, int Others>
struct LatentTile {
  using First = SlabTile<Rows, Values>;
  using Rest = SlabTile<Rows, Others>;
  static constexpr int bytes = First::bytes + Rest::bytes;
};

template <int Rows, int Columns, int Values, bool Latent>
struct HopperTile {
  using type = SlabTile<Rows, Columns>;
};
template <int Rows, int Columns, int Values>
struct HopperTile<Rows, Columns, Values, true> {
  using type = LatentTile<Rows, Values, Columns - Values>;
};

template <class Config, int columns, int columns_v, class Element = typename Config::Element>
struct HopperTiles {
  static constexpr bool latent = Config::values_in_keys;
  using QueryTile = typename HopperTile<Config::Br, columns, columns_v, latent>::type;
  using KeyTile = typename HopperTile<Config::Bc, columns, columns_v, latent>::type;
  using ValueTile = SlabTile<Config::Bc, columns_v>;
};

template <class Config, class Element = typename Config::Element>
struct HopperVisit : Visit<Config::sequences> {
  __device__ static HopperVisit end_of_work() { return {Visit<Config::sequences>::end_of_work()}; }
  __device__ static HopperVisit of(const Params&, const Work& work, const KeyTiles& keys) {
    return {{{}, work, keys}};
  }
};

#endif  // __CUDA_ARCH__ == 900
