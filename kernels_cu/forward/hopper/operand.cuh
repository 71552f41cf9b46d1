// Operands of the tensor cores for the elements of Q, K, V and P.
//
// A float32 is the sum of three bfloat16 components with 8 significant bits each (Henry, Tang and
// Heinecke 2019). A product of two floats is computed as six products of components, with a
// relative error of 2^-24. Unlike float16 and TF32, components need no scale. Unlike TF32 operands,
// they need not be contiguous along k, which for P V runs along the rows of V.
#pragma once

#include "scheduler/work_tile.cuh"
#include "ptx/base.cuh"
#include "tile/element.cuh"
#include "tile/tma_tile.cuh"

#if __CUDA_ARCH__ == 900

// float8 specializes the templates for operand, output, tiles and scales (float8/float8.cuh).
template <class Element>
struct HopperOutput {
  using type = Element;
};

template <class Element>
struct HopperOperand {
  using type = Element;
  static constexpr int components = 1;
  static constexpr bool transposes_values = false;

  __device__ static void split(float low, float high, unsigned (&components)[1]) {
    components[0] = pack<Element>(low, high);
  }
};

template <>
struct HopperOperand<float> {
  using type = bfloat16_t;
  static constexpr int components = 3;
  static constexpr bool transposes_values = false;

  // Splits two numbers into components, the largest first. `low` fills the lower half of each word.
  __device__ static void split(float low, float high, unsigned (&components)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      components[i] = pack<bfloat16_t>(low, high);
      low -= __uint_as_float(components[i] << 16);
      high -= __uint_as_float(components[i] & 0xffff0000u);
    }
  }

  // Like split(), but also for infinities. An infinity goes to the last component, which is only
  // multiplied by the first component of the other operand. The other components of that operand
  // may be 0 or have the opposite sign: times an infinity, they would lead to NaN.
  __device__ static void split_any(float low, float high, unsigned (&components)[3]) {
    const float bound_low = component_bound(low), bound_high = component_bound(high);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      components[i] = pack<bfloat16_t>(ptx::min_magnitude(low, bound_low),
                                       ptx::min_magnitude(high, bound_high));
      low -= __uint_as_float(components[i] << 16);
      high -= __uint_as_float(components[i] & 0xffff0000u);
    }
    components[2] = pack<bfloat16_t>(low, high);
  }

  // Returns the bound to which split_any() limits the first two components of x. For a finite x,
  // it is the largest bfloat16, so that rounding makes no component infinite. For an infinite x, it
  // is 1, so that products of these components do not overflow to an infinity of the other sign.
  __device__ static float component_bound(float x) {
    constexpr float largest = 0x1.fep127f;
    return fabsf(x) == __int_as_float(0x7f800000) ? 1 : largest;
  }
};

// Calls product(i, j, is_first) for components i and j of two operands, those with the smallest
// product first. Negligible products are omitted. With `unroll` 1, i and j are known at run time
// only, so `product` must not index registers by them.
template <int components, int unroll = components * (components + 1) / 2, class Product>
__device__ void for_each_product(Product product) {
  int sum = components - 1, i = 0;
#pragma unroll unroll
  for (int n = 0; n < components * (components + 1) / 2; ++n) {
    product(i, sum - i, n == 0);
    if (++i > sum) {
      i = 0;
      --sum;
    }
  }
}

// MLA tile of K or Q. The columns that are also V, and the others, have a `TmaTile` each.
template <int Rows, int Values, int RestColumns>
struct MlaTile {
  using First = TmaTile<Rows, Values>;
  using Rest = TmaTile<Rows, RestColumns>;
  static constexpr int bytes = First::bytes + Rest::bytes;
};

template <int Rows, int Columns, int Values, bool IsMla>
struct HopperTile {
  using type = TmaTile<Rows, Columns>;
};
template <int Rows, int Columns, int Values>
struct HopperTile<Rows, Columns, Values, true> {
  using type = MlaTile<Rows, Values, Columns - Values>;
};

template <class Config, int columns, int columns_v, class Element = typename Config::Element>
struct HopperTiles {
  static constexpr bool is_mla = Config::values_in_keys;
  using QueryTile = typename HopperTile<Config::Br, columns, columns_v, is_mla>::type;
  using KeyTile = typename HopperTile<Config::Bc, columns, columns_v, is_mla>::type;
  using ValueTile = TmaTile<Config::Bc, columns_v>;
};

template <class Config, class Element = typename Config::Element>
struct HopperWorkTile : WorkTile<Config::has_seqlens> {
  __device__ static HopperWorkTile end_of_work() {
    return {WorkTile<Config::has_seqlens>::end_of_work()};
  }
  __device__ static HopperWorkTile create(const Params&, const TileCoord& coord,
                                          const KvTileRange& keys) {
    return {{{}, coord, keys}};
  }
};

#endif  // __CUDA_ARCH__ == 900
