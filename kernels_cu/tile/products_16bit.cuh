// The two GEMMs of a warp for float16 and bfloat16: mma.m16n8k16, with operands from ldmatrix.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "tile/queries.cuh"

#if __CUDA_ARCH__ >= 800

template <class Element>
__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ inline void mma<half_t>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                   unsigned b1) {
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
}
template <>
__device__ inline void mma<bfloat16_t>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}

// Q (16 * row_tiles rows), K and V are `SwizzledRows` in shared memory. S and O are accumulator
// fragments: element [i][j][2 * half + c] of a lane is row 16 i + 8 half + lane / 4, column
// 8 j + lane % 4 * 2 + c.
//
// If `column_warps` > 1, that many consecutive warps process the same query rows. Each warp
// computes S for a slice of the keys, receives the other warps' scores through `exchange`, and
// accumulates a slice of O: of every 16 * `column_warps` columns, the 16 at index `column_warp()`.
template <class Config, int row_tiles, int column_warps = 1>
struct Products16Bit {
  using Element = typename Config::Element;
  static constexpr int Bc = Config::Bc;
  // head_dim is padded to a multiple of 16, the k of an mma; padding is zero in shared memory.
  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int columns_v = round_up(Config::head_dim_v, 16 * column_warps) / column_warps;
  static constexpr int k_steps = columns / 16;
  static constexpr int key_steps = Bc / 16;
  static constexpr int warp_key_steps = key_steps / column_warps;
  static constexpr int column_steps = columns_v / 16;
  static_assert(key_steps % column_warps == 0, "each column warp processes whole k steps");

  using KeyLayout = SwizzledRows<Element, columns>;
  using ValueLayout = SwizzledRows<Element, columns_v * column_warps>;
  using Scores = float[row_tiles][Bc / 8][4];
  using PartialScores = float[row_tiles][Bc / column_warps / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];

  const int lane = threadIdx.x % 32;
  QueryFragments<KeyLayout, row_tiles, k_steps, Config::q_in_registers> queries;

  __device__ static int column_warp() {
    return column_warps == 1 ? 0 : threadIdx.x / 32 % column_warps;
  }

  // Adds Q K^T for this warp's keys to `scores`. The fragment of the next step is read from shared
  // memory during the mma of the current step.
  __device__ void multiply_queries_keys(PartialScores& scores, unsigned q_shared,
                                        unsigned k_shared) {
    constexpr int key_steps = warp_key_steps;
    k_shared += column_warp() * (16 * key_steps * KeyLayout::row_bytes);
    const unsigned k_lane = k_shared + KeyLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);

    unsigned q[row_tiles][4];
    unsigned k[2][4];
    auto load_k = [&](int number) {
      ptx::ldmatrix_x4(k[number % 2],
                       KeyLayout::advance(k_lane, number % key_steps * 16, number / key_steps * 2));
    };
    load_k(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      queries.load(q, q_shared, step);
#pragma unroll
      for (int pair = 0; pair < key_steps; ++pair) {
        const int current = step * key_steps + pair;
        if (current + 1 < k_steps * key_steps) load_k(current + 1);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<Element>(scores[i][2 * pair], q[i], k[current % 2][0], k[current % 2][1]);
          mma<Element>(scores[i][2 * pair + 1], q[i], k[current % 2][2], k[current % 2][3]);
        }
      }
    }
  }

  // Gathers S for all Bc keys in each of the warps that process the same query rows. `shared` is a
  // buffer for S of the CTA's whole query tile; `group` is the index of this group of warps. With
  // two column warps:
  //   `column_warp()` 0: S of keys [0, Bc / 2)  --> shared, named barrier --> S of keys [0, Bc)
  //   `column_warp()` 1: S of keys [Bc / 2, Bc) --> shared, named barrier --> S of keys [0, Bc)
  __device__ static void exchange(Scores& scores, const PartialScores& partial_scores,
                                  unsigned shared, int group) {
    constexpr int tiles_per_warp = Bc / column_warps / 8;
    constexpr int bytes = 32 * sizeof(partial_scores[0][0]);  // size of S for 16 rows and 8 keys
    shared +=
        group * (row_tiles * Bc / 8 * bytes) + threadIdx.x % 32 * sizeof(partial_scores[0][0]);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < tiles_per_warp; ++j) {
        ptx::st_shared_v4(shared + (i * (Bc / 8) + column_warp() * tiles_per_warp + j) * bytes,
                          reinterpret_cast<const unsigned (&)[4]>(partial_scores[i][j]));
      }
    }
    ptx::barrier_sync_aligned(1 + group, 32 * column_warps);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        ptx::ld_shared_v4(reinterpret_cast<unsigned (&)[4]>(scores[i][j]),
                          shared + (i * (Bc / 8) + j) * bytes);
      }
    }
  }

  // Adds P V for this warp's columns to `out`. exponentiate(i, j) converts scores[i][j] to P. It is
  // called for the next 16 keys before the mma of the current 16 keys, which hide its latency.
  template <class Exponentiate>
  __device__ void multiply_probabilities_values(Output& out, const Scores& scores,
                                                unsigned v_shared, Exponentiate exponentiate) {
    const unsigned v_lane =
        v_shared + ValueLayout::offset(lane % 16, lane / 16 + 2 * column_warp());
    unsigned v[2][4];
    auto load_v = [&](int number) {
      ptx::ldmatrix_x4_trans(v[number % 2],
                             ValueLayout::advance(v_lane, number / column_steps * 16,
                                                  number % column_steps * 2 * column_warps));
    };
    load_v(0);
    auto exponentiate_step = [&](int step) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        exponentiate(i, 2 * step);
        exponentiate(i, 2 * step + 1);
      }
    };
    exponentiate_step(0);
#pragma unroll
    for (int step = 0; step < key_steps; ++step) {
      unsigned probabilities[row_tiles][4];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        const float (&left)[4] = scores[i][2 * step];
        const float (&right)[4] = scores[i][2 * step + 1];
        probabilities[i][0] = pack<Element>(left[0], left[1]);
        probabilities[i][1] = pack<Element>(left[2], left[3]);
        probabilities[i][2] = pack<Element>(right[0], right[1]);
        probabilities[i][3] = pack<Element>(right[2], right[3]);
      }
      if (step + 1 < key_steps) exponentiate_step(step + 1);
#pragma unroll
      for (int pair = 0; pair < column_steps; ++pair) {
        const int current = step * column_steps + pair;
        if (current + 1 < key_steps * column_steps) load_v(current + 1);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<Element>(out[i][2 * pair], probabilities[i], v[current % 2][0], v[current % 2][1]);
          mma<Element>(out[i][2 * pair + 1], probabilities[i], v[current % 2][2],
                       v[current % 2][3]);
        }
      }
    }
  }

  // Returns the output column of out[.][j][2 * half + c].
  __device__ int column(int j, int c) const { return 8 * chunk(j) + lane % 4 * 2 + c; }

  // Writes the lane's part of one output row to shared memory, in ValueLayout.
  __device__ void stage_row(const Output& out, int i, int half, unsigned shared, int row) const {
#pragma unroll
    for (int j = 0; j < columns_v / 8; ++j) {
      ptx::st_shared(shared + ValueLayout::offset(row, chunk(j)) + lane % 4 * 4,
                     pack<Element>(out[i][j][2 * half], out[i][j][2 * half + 1]));
    }
  }

 private:
  // Returns the index of the 16-byte chunk of an output row that holds the eight columns out[.][j].
  __device__ static int chunk(int j) { return (j / 2 * column_warps + column_warp()) * 2 + j % 2; }
};

#endif  // __CUDA_ARCH__ >= 800
