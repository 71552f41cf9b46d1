// Float32 operands for tensor cores, each split into two float16 components.
//
// A tile is divided by a power of two, so that its largest magnitude is in [2^14, 2^15). An element
// is then the sum of `big`, the nearest float16, and `small`, the float16 nearest to the remainder.
// The product x y = big_x big_y + big_x small_y + small_x big_y omits small_x small_y, at most
// 2^-22 of it. Three TF32 products (tile/products_tf32x3.cuh) are as accurate and take twice the
// time. An element of at least 2^-17 of the tile's largest keeps 22 bits or more. A smaller one has
// an error of at most 2^-39 of the largest, while float32 sums of products are rounded by 2^-24.
//
// Tensor cores accumulate with rounding toward zero. As in products_tf32x3.cuh, the contribution of
// each tile is therefore accumulated separately, and added to the sum on CUDA cores.
#pragma once

#include "ptx/base.cuh"
#include "tile/element.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

// Type and number of the components that an `Element` is split into for tensor cores.
template <class Element>
struct Components {
  using type = Element;
  static constexpr int count = 1;
};
template <>
struct Components<float> {
  using type = half_t;
  static constexpr int count = 2;
};

// Unit of a tile: a power of two (`size`) by which its elements are divided, and its inverse.
struct Unit {
  float size;
  float inverse;

  // Returns the unit that makes numbers up to `largest` less than 2^15. NaN counts as 2^-100.
  __device__ static Unit for_largest(float largest) {
    constexpr unsigned below = 14;
    const float kept = fminf(fmaxf(largest, 0x1p-100f), 0x1p126f);
    const unsigned exponent = (__float_as_uint(kept) >> 23) - below;
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
  }

  // Returns the unit whose size is `size`, a power of two that `for_largest()` has chosen.
  __device__ static Unit of_size(float size) {
    return {size, __uint_as_float((254u << 23) - __float_as_uint(size))};
  }
};

// Components of two numbers below 2^15, packed with the first number in the lower 16 bits.
struct SplitPair {
  unsigned big;
  unsigned small;

  __device__ static SplitPair split(float low, float high) {
    const unsigned big = pack<half_t>(low, high);
    const float low_left = low - ptx::cvt_f32_f16(static_cast<unsigned short>(big));
    const float high_left = high - ptx::cvt_f32_f16(static_cast<unsigned short>(big >> 16));
    return {big, pack<half_t>(low_left, high_left)};
  }
};

// Accumulates sums += left right, small products first. The first index of an operand selects its
// big or small components. `right` holds two column tiles, as loaded by ldmatrix.
template <int row_tiles>
__device__ void multiply_components(float (&sums)[row_tiles][2][4],
                                    const unsigned (&left)[2][row_tiles][4],
                                    const unsigned (&right)[2][4]) {
#pragma unroll
  for (int term = 0; term < 3; ++term) {
    const int of_left = term == 0, of_right = term == 1;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma<half_t>(sums[i][t], left[of_left][i], right[of_right][2 * t],
                    right[of_right][2 * t + 1]);
      }
    }
  }
}

// Adds factor(i) * product[i][t] to sums[i][first + t], for t = 0 and 1.
template <int row_tiles, int column_tiles, class Factor>
__device__ void add_scaled(float (&sums)[row_tiles][column_tiles][4], int first,
                           const float (&product)[row_tiles][2][4], Factor factor) {
#pragma unroll
  for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& sum = sums[i][first + t][c];
        sum = fma(product[i][t][c], factor(i), sum);
      }
    }
  }
}

// Accumulates sums += left right^T, for 16 * `row_tiles` rows of `left` and 8 * `column_tiles` rows
// of `right`. A row holds the big components of `Dim` columns, then the small ones.
template <class Layout, int Dim, int row_tiles, int column_tiles>
__device__ void multiply_rows(float (&sums)[row_tiles][column_tiles][4], unsigned left,
                              unsigned right) {
  const int lane = threadIdx.x % 32;
  const unsigned left_lane = left + Layout::offset(lane % 16, lane / 16);
  const unsigned right_lane = right + Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 2
  for (int step = 0; step < Dim / 16; ++step) {
    unsigned of_left[2][row_tiles][4];
#pragma unroll
    for (int component = 0; component < 2; ++component) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        ptx::ldmatrix_x4(of_left[component][i],
                         Layout::advance(left_lane, 16 * i, 2 * step + component * Dim / 8));
      }
    }
#pragma unroll
    for (int pair = 0; pair < column_tiles / 2; ++pair) {
      unsigned of_right[2][4];
#pragma unroll
      for (int component = 0; component < 2; ++component) {
        ptx::ldmatrix_x4(of_right[component],
                         Layout::advance(right_lane, 16 * pair, 2 * step + component * Dim / 8));
      }
      float product[row_tiles][2][4] = {};
      multiply_components(product, of_left, of_right);
      add_scaled(sums, 2 * pair, product, [](int) { return 1.0f; });
    }
  }
}

#endif  // __CUDA_ARCH__ >= 800
