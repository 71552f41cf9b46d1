// The two matrix products of a warp for float16 and bfloat16: mma.m16n8k16, fragments by ldmatrix.
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

// Q (16 * row_tiles rows), K and V are SwizzledRows in shared memory. S and O live in accumulator
// fragments: element [i][j][2 * half + c] of a lane is row 16 i + 8 half + lane / 4, column
// 8 j + lane % 4 * 2 + c.
//
// Where `shares` warps that follow one another have the same rows, each multiplies the queries with
// a share of the keys, gets the others' scores by exchange(), and has a share of O: of the columns,
// every shares-th 16.
template <class Config, int row_tiles, int shares = 1>
struct Products16Bit {
  using Element = typename Config::Element;
  static constexpr int Bc = Config::Bc;
  // mma works in steps of 16 along head_dim; the columns between are zeros in shared memory.
  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int columns_v = round_up(Config::head_dim_v, 16 * shares) / shares;
  static constexpr int k_steps = columns / 16;
  static constexpr int key_steps = Bc / 16;
  static constexpr int shared_key_steps = key_steps / shares;
  static constexpr int column_steps = columns_v / 16;
  static_assert(key_steps % shares == 0, "each warp has whole steps of the keys");

  using KeyLayout = SwizzledRows<Element, columns>;
  using ValueLayout = SwizzledRows<Element, columns_v * shares>;
  using Scores = float[row_tiles][Bc / 8][4];
  using ScoreShare = float[row_tiles][Bc / shares / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];

  const int lane = threadIdx.x % 32;
  QueryFragments<KeyLayout, row_tiles, k_steps, Config::q_in_registers> queries;

  __device__ static int share() { return shares == 1 ? 0 : threadIdx.x / 32 % shares; }

  // scores += Q K^T of this warp's keys. The fragment of the next step is read from shared memory
  // while this one is multiplied.
  __device__ void multiply_queries_keys(ScoreShare& scores, unsigned q_shared, unsigned k_shared) {
    constexpr int key_steps = shared_key_steps;
    k_shared += share() * (16 * key_steps * KeyLayout::row_bytes);
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

  // Puts the scores of all warps that share these rows together. `shared` has room for those of the
  // whole tile, all rows of the block; `group` numbers the warps that share rows.
  //
  //   warp of share 0     [keys 0 to Bc / 2] --> shared \\  / barrier   both read all Bc keys
  //   warp of share 1     [keys Bc / 2 on]   --> shared  ><  of the two
  __device__ static void exchange(Scores& scores, const ScoreShare& own, unsigned shared,
                                  int group) {
    constexpr int of_share = Bc / shares / 8;
    constexpr int bytes = 32 * sizeof(own[0][0]);  // of eight keys, a warp's
    shared += group * (row_tiles * Bc / 8 * bytes) + threadIdx.x % 32 * sizeof(own[0][0]);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < of_share; ++j) {
        ptx::st_shared_v4(shared + (i * (Bc / 8) + share() * of_share + j) * bytes,
                          reinterpret_cast<const unsigned (&)[4]>(own[i][j]));
      }
    }
    ptx::barrier_sync_aligned(1 + group, 32 * shares);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        ptx::ld_shared_v4(reinterpret_cast<unsigned (&)[4]>(scores[i][j]),
                          shared + (i * (Bc / 8) + j) * bytes);
      }
    }
  }

  // out += P V of this warp's columns. exponentiate(i, j) makes probabilities of row tile i's scores
  // [j]; called for the next 16 keys while these are multiplied, it runs under the tensor cores.
  template <class Exponentiate>
  __device__ void multiply_probabilities_values(Output& out, const Scores& scores,
                                                unsigned v_shared, Exponentiate exponentiate) {
    const unsigned v_lane = v_shared + ValueLayout::offset(lane % 16, lane / 16 + 2 * share());
    unsigned v[2][4];
    auto load_v = [&](int number) {
      ptx::ldmatrix_x4_trans(v[number % 2],
                             ValueLayout::advance(v_lane, number / column_steps * 16,
                                                  number % column_steps * 2 * shares));
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

  // The output column of [.][j][2 * half + c].
  __device__ int column(int j, int c) const { return 8 * chunk(j) + lane % 4 * 2 + c; }

  // Writes the lane's part of one row of the output into a ValueLayout.
  __device__ void stage_row(const Output& out, int i, int half, unsigned shared, int row) const {
#pragma unroll
    for (int j = 0; j < columns_v / 8; ++j) {
      ptx::st_shared(shared + ValueLayout::offset(row, chunk(j)) + lane % 4 * 4,
                     pack<Element>(out[i][j][2 * half], out[i][j][2 * half + 1]));
    }
  }

 private:
  // Of the eight columns [.][j].
  __device__ static int chunk(int j) { return (j / 2 * shares + share()) * 2 + j % 2; }
};

#endif  // __CUDA_ARCH__ >= 800
