// The two GEMMs of a warp for 8-bit K and V: mma.m16n8k16 on Q, K and V converted to float16.
//
// ldmatrix moves 16-bit units, each two 8-bit columns of a row. This permutes the columns. In
// Q.K^T, any permutation of k is right if Q and K agree; `write_row()` undoes that of O's columns:
//
//           a lane's four bytes               use in the mma                  the lane's Q or O
//   Q.K^T   columns 4 t to 4 t + 3 of a key   k = 2 t, 2 t + 1, 2 t + 8, + 9  Q columns 4 t to + 3
//   P.V     columns 2 n, 2 n + 1 of two keys  one mma for columns 2 n,        O columns 4 t to + 3
//                                             one for columns 2 n + 1
//
// where t is lane % 4, n is lane / 4, and columns count within a step of 16.
#pragma once

#include "ptx/base.cuh"
#include "ptx/bytes.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "score/powers.cuh"
#include "tile/products_16bit.cuh"
#include "tile/stored_bytes.cuh"

#if __CUDA_ARCH__ >= 800

// Like `QueryFragments`, with all steps in registers, as float16. A bfloat16 row is first divided
// by a power of two, so that its largest element is about 1. Conversion then changes only elements
// that are subnormal in float16, by 2^-25 at most.
template <class Element, class Layout, int row_tiles, int steps>
struct Float16QueryFragments {
  static constexpr bool is_float16 = headroom<Element> == 0;
  unsigned kept[steps][row_tiles][4];
  float factors[row_tiles][2];  // the powers of two; multiply the scores of the rows by them

  __device__ void keep(unsigned shared) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors[i][half] = is_float16 ? 1 : row_factor(shared, i, half);
        const float inverse = inverse_of_power(factors[i][half]);
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          unsigned four[2];
          read(four, shared, i, half, step);
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            kept[step][i][2 * part + half] =
                is_float16 ? four[part]
                           : pack<half_t>(low(four[part]) * inverse, high(four[part]) * inverse);
          }
        }
      }
    }
  }

 private:
  __device__ static float low(unsigned pair) { return __uint_as_float(pair << 16); }
  __device__ static float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

  // Reads the lane's four columns of a step.
  __device__ static void read(unsigned (&four)[2], unsigned shared, int i, int half, int step) {
    const int lane = threadIdx.x % 32;
    const int row = 16 * i + 8 * half + lane / 4;
    ptx::ld_shared_v2(four, shared + Layout::offset(row, 2 * step + lane % 4 / 2) + lane % 2 * 8);
  }

  // Returns the power of two that a row is divided by: the largest one not above the row's maximum
  // magnitude, clamped so that its inverse is a normal number. A row with infinities uses 1.
  __device__ static float row_factor(unsigned shared, int i, int half) {
    float largest = 0;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
      unsigned four[2];
      read(four, shared, i, half, step);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        largest = fmaxf(largest, fmaxf(fabsf(low(four[part])), fabsf(high(four[part]))));
      }
    }
    largest = max_of_lanes(largest);
    if (largest == SoftmaxMath<float>::infinity()) return 1;
    return fminf(fmaxf(power_below(largest), 0x1p-126f), 0x1p126f);
  }
};

// Q (16 * row_tiles rows), K and V are `SwizzledRows` in shared memory. S has the layout described
// at `Products16Bit`.
template <class Config, int row_tiles>
struct Products8Bit {
  using Element = typename Config::Element;
  using Stored = typename Config::CacheElement;
  using Widen = WidenBytes<Stored>;
  static constexpr int Bc = Config::Bc;
  static_assert(Bc == 32, "one ldmatrix loads 16 columns of all keys");
  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int columns_v = round_up(Config::head_dim_v, 16);
  static constexpr int k_steps = columns / 16;
  static constexpr int column_steps = columns_v / 16;

  using KeyLayout = SwizzledRows<Stored, columns>;
  using ValueLayout = SwizzledRows<Stored, columns_v>;
  using Scores = float[row_tiles][Bc / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];

  const int lane = threadIdx.x % 32;
  Float16QueryFragments<Element, SwizzledRows<Element, columns>, row_tiles, k_steps> queries;

  // Adds Q K^T to `scores`, without the factors of the query rows.
  __device__ void multiply_queries_keys(Scores& scores, unsigned k_shared) {
    const unsigned k_lane = k_shared + KeyLayout::offset(lane, 0);
    unsigned k[2][4];
    ptx::ldmatrix_x4(k[0], k_lane);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      if (step + 1 < k_steps) {
        ptx::ldmatrix_x4(k[(step + 1) % 2], KeyLayout::advance(k_lane, 0, step + 1));
      }
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        const unsigned four = k[step % 2][j];
        const unsigned low = Widen::template pair<0, 1>(four);
        const unsigned high = Widen::template pair<2, 3>(four);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<half_t>(scores[i][j], queries.kept[step][i], low, high);
        }
      }
    }
  }

  // Adds P V to `out`.
  __device__ void multiply_probabilities_values(Output& out, const Scores& scores,
                                                unsigned v_shared) const {
    const unsigned v_lane = v_shared + ValueLayout::offset(lane, 0);
    unsigned v[2][4];
    ptx::ldmatrix_x4_trans(v[0], v_lane);
    unsigned probabilities[2][row_tiles][4];
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        const float (&p)[4] = scores[i][j];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          probabilities[j / 2][i][j % 2 * 2 + half] =
              pack<half_t>(p[2 * half], p[2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < column_steps; ++step) {
      if (step + 1 < column_steps) {
        ptx::ldmatrix_x4_trans(v[(step + 1) % 2], ValueLayout::advance(v_lane, 0, step + 1));
      }
      unsigned even[4], odd[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        even[j] = Widen::template pair<0, 2>(v[step % 2][j]);
        odd[j] = Widen::template pair<1, 3>(v[step % 2][j]);
      }
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned (&p)[4] = probabilities[half][i];
          mma<half_t>(out[i][2 * step], p, even[2 * half], even[2 * half + 1]);
          mma<half_t>(out[i][2 * step + 1], p, odd[2 * half], odd[2 * half + 1]);
        }
      }
    }
  }

  // Writes the lane's part of one output row, times `factor`, to the row that starts at `row`.
  __device__ void write_row(const Output& out, int i, int half, float factor, float* row) const {
#pragma unroll
    for (int step = 0; step < column_steps; ++step) {
      const float* even = out[i][2 * step] + 2 * half;
      const float* odd = out[i][2 * step + 1] + 2 * half;
      *reinterpret_cast<Vector<float, 4>*>(row + 16 * step + lane % 4 * 4) = {
          {even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor}};
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
