// The two GEMMs of a warp for float32, each as three products on TF32 tensor cores.
//
// TF32 keeps 11 of float32's 24 significant bits. Split as x = big + small, both TF32, x keeps 22
// bits. x y is computed as big_x big_y + big_x small_y + small_x big_y, which omits about 2^-22 x y
// (Ootomo and Yokota 2022). Tensor cores round sums toward zero, so long sums drift. Each step of
// eight columns of Q.K^T, and the contribution of each KV tile to O, is therefore accumulated
// separately, and added on CUDA cores with rounding to nearest. This reduces the largest error from
// 2.5 times that of float32 FMAs to less than theirs (H100, batch 1, 512 x 512, 2 heads of 64).
#pragma once

#include "ptx/base.cuh"
#include "tile/layout.cuh"
#include "tile/queries.cuh"

#if __CUDA_ARCH__ >= 800

struct SplitFloat {
  unsigned big;
  unsigned small;

  // Splits any x. An infinite x becomes the largest finite `big` and an infinite `small`. The
  // infinity is then multiplied by the other operand's `big` only, which has that operand's sign.
  // The other operand's `small` may be 0 or have the opposite sign; with infinity in `big`, the
  // products would add up to NaN.
  __device__ static SplitFloat split(float x) {
    constexpr float largest = 0x1.ffcp127f;
    const unsigned big = ptx::cvt_tf32_f32(ptx::min_magnitude(x, largest));
    return {big, __float_as_uint(x - __uint_as_float(big))};
  }

  // Splits a finite x; an infinite x would yield NaN.
  __device__ static SplitFloat split_finite(float x) {
    const unsigned big = ptx::cvt_tf32_f32(x);
    return {big, __float_as_uint(x - __uint_as_float(big))};
  }
};

// Like `Products16Bit` in its shared-memory operands and accumulator fragments, except that the
// output columns are permuted; see `column()`.
template <class Config, int row_tiles>
struct ProductsTf32x3 {
  static constexpr int Bc = Config::Bc;
  // head_dim is padded to a multiple of 8, the k of an mma, and head_dim_v to one of 32, because V
  // is read 32 columns at a time.
  static constexpr int columns = round_up(Config::head_dim, 8);
  static constexpr int columns_v = round_up(Config::head_dim_v, 32);
  static constexpr int k_steps = columns / 8;
  static constexpr int key_pairs = Bc / 16;

  using KeyLayout = SwizzledRows<float, columns>;
  using ValueLayout = SwizzledRows<float, columns_v>;
  using Scores = float[row_tiles][Bc / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];

  const int lane = threadIdx.x % 32;
  QueryFragments<KeyLayout, row_tiles, k_steps, Config::q_in_registers> queries;

  // Each warp has its own query rows, so its index among the warps of these rows is 0.
  __device__ static int column_warp() { return 0; }

  // Adds a[i] b[t] to d[i][t] for all row tiles i and column tiles t, the small terms first. The
  // order keeps dependent products (the same accumulator) row_tiles * Tiles products apart.
  template <int Tiles>
  __device__ static void multiply(float (&d)[row_tiles][Tiles][4],
                                  const SplitFloat (&a)[row_tiles][4],
                                  const SplitFloat (&b)[Tiles][2]) {
#pragma unroll
    for (int term = 0; term < 3; ++term) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        unsigned left[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) left[r] = term == 0 ? a[i][r].small : a[i][r].big;
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
          ptx::mma_m16n8k8_tf32(d[i][t], left, term == 1 ? b[t][0].small : b[t][0].big,
                                term == 1 ? b[t][1].small : b[t][1].big);
        }
      }
    }
  }

  // Adds Q K^T to `scores`. ldmatrix moves 16-byte rows, here of four floats, and lane 4 g + t
  // receives float t of row g. This is the layout of a TF32 operand fragment.
  __device__ void multiply_queries_keys(Scores& scores, unsigned q_shared, unsigned k_shared) {
    const unsigned k_lane = k_shared + KeyLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    unsigned k[2][4];
    auto load_k = [&](int number) {
      ptx::ldmatrix_x4(k[number % 2],
                       KeyLayout::advance(k_lane, number % key_pairs * 16, number / key_pairs * 2));
    };
    load_k(0);
    // Not fully unrolled unless Q is in registers: the compiler would interleave the independent
    // sums of the steps and spill registers.
#pragma unroll(Config::q_in_registers ? k_steps : 2)
    for (int step = 0; step < k_steps; ++step) {
      unsigned raw[row_tiles][4];
      queries.load(raw, q_shared, step);
      SplitFloat q[row_tiles][4];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) q[i][r] = SplitFloat::split(__uint_as_float(raw[i][r]));
      }
#pragma unroll
      for (int pair = 0; pair < key_pairs; ++pair) {
        const int current = step * key_pairs + pair;
        if (current + 1 < k_steps * key_pairs) load_k(current + 1);
        SplitFloat keys[2][2];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          keys[r / 2][r % 2] = SplitFloat::split(__uint_as_float(k[current % 2][r]));
        }
        float sums[row_tiles][2][4] = {};
        multiply<2>(sums, q, keys);
        add<2>(scores, 2 * pair, sums);
      }
    }
  }

  // Adds `sums` to the column tiles of `accumulators` from `first` on.
  template <int Tiles, int AllTiles>
  __device__ static void add(float (&accumulators)[row_tiles][AllTiles][4], int first,
                             const float (&sums)[row_tiles][Tiles][4]) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
#pragma unroll
        for (int c = 0; c < 4; ++c) accumulators[i][first + t][c] += sums[i][t][c];
      }
    }
  }

  // Adds P V to `out`. A lane holds the scores of keys 2 t and 2 t + 1 of every eight, with
  // t = lane % 4. P and V use these two keys as k = t and k = t + 4 of the mma: any order of k is
  // right if both agree. A lane reads four adjacent columns of V at once, one for each of four
  // column tiles, which permutes the output columns. Lanes 0 to 7 read chunks 0 and 1 of rows 0, 2,
  // 4 and 6 of V; the swizzle puts these eight chunks in different bank groups.
  // exponentiate(i, j) converts scores[i][j] to P before their first use.
  template <class Exponentiate>
  __device__ void multiply_probabilities_values(Output& out, const Scores& scores,
                                                unsigned v_shared, Exponentiate exponentiate) {
#pragma unroll
    for (int group = 0; group < columns_v / 32; ++group) {
      float sums[row_tiles][4][4] = {};
#pragma unroll
      for (int step = 0; step < Bc / 8; ++step) {
        unsigned v[2][4];
        SplitFloat values[4][2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int row = lane % 4 * 2 + odd;
          const unsigned v_lane = v_shared + ValueLayout::offset(row, lane / 4);
          ptx::ld_shared_v4(v[odd], ValueLayout::advance(v_lane, 8 * step, 8 * group));
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            values[t][odd] = SplitFloat::split(__uint_as_float(v[odd][t]));
          }
        }
        SplitFloat probabilities[row_tiles][4];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          if (group == 0) exponentiate(i, step);
          const float (&p)[4] = scores[i][step];
          probabilities[i][0] = SplitFloat::split_finite(p[0]);
          probabilities[i][1] = SplitFloat::split_finite(p[2]);
          probabilities[i][2] = SplitFloat::split_finite(p[1]);
          probabilities[i][3] = SplitFloat::split_finite(p[3]);
        }
        multiply<4>(sums, probabilities, values);
      }
      add<4>(out, 4 * group, sums);
    }
  }

  // Returns the output column of out[.][j][2 * half + c]: column tile t of a group of 32 columns
  // holds the columns 4 n + t.
  __device__ int column(int j, int c) const { return j / 4 * 32 + (lane % 4 * 2 + c) * 4 + j % 4; }

  // Writes the lane's part of one output row to shared memory, in 16-byte chunks of ValueLayout.
  __device__ void stage_row(const Output& out, int i, int half, unsigned shared, int row) const {
#pragma unroll
    for (int group = 0; group < columns_v / 32; ++group) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        unsigned chunk[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          chunk[t] = __float_as_uint(out[i][4 * group + t][2 * half + c]);
        }
        ptx::st_shared_v4(shared + ValueLayout::offset(row, 8 * group + lane % 4 * 2 + c), chunk);
      }
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
