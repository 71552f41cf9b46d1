// Tangents of attention on tensor cores, sm_80 and newer, for float16 and bfloat16. The forward
// pass has computed `out` and `lse`.
//
// A CTA holds Br query rows and iterates over the KV tiles of Bc keys, from the last to the first.
// A dot marks a tangent:
//
//   S = Q K^T,  S. = Q. K^T + Q K.^T,  P and H from these (row.cuh),  O. += H V + P V.
//
// Each warp owns 16 or 32 rows. As in the forward pass, P and H never leave the registers: the
// accumulator fragments of S and S. serve as operand fragments.
#pragma once

#include "backward/simt/products.cuh"
#include "ptx/base.cuh"
#include "scheduler/tile_coord.cuh"
#include "tangents/fragments.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MmaTangents {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int stages = Config::stages;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int warp_rows = Br / Config::warps;
  static constexpr int row_tiles = warp_rows / 16;
  static_assert(row_tiles * 16 * Config::warps == Br && Bc % 16 == 0, "whole fragments");
  static_assert(stages == 1 || stages == 2, "1 or 2 stages");

  using Fragments = TangentFragments<Config, row_tiles>;
  using Scores = typename Fragments::Scores;

  // Whether q, k and v have tangents. If q and k have none, the scores have none, and H is 0.
  static constexpr bool moves_q = Config::moves_q;
  static constexpr bool moves_k = Config::moves_k;
  static constexpr bool moves_v = Config::moves_v;
  static constexpr bool moves_scores = moves_q || moves_k;

  // The head dims are padded to the k and the n of an mma; padding is zero in shared memory.
  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int columns_v = Fragments::columns_v;
  static constexpr int k_steps = columns / 16;
  static constexpr int key_steps = Bc / 16;
  static constexpr int column_steps = columns_v / 16;
  using KeyLayout = SwizzledRows<Element, columns>;
  using ValueLayout = SwizzledRows<Element, columns_v>;

  // Shared memory: q and its tangent, then stages of k, v and their tangents.
  static constexpr int queries_bytes = Br * KeyLayout::row_bytes;
  static constexpr int keys_bytes = Bc * KeyLayout::row_bytes;
  static constexpr int values_bytes = Bc * ValueLayout::row_bytes;
  static constexpr int k_tangent_offset = keys_bytes;
  static constexpr int v_offset = k_tangent_offset + moves_k * keys_bytes;
  static constexpr int v_tangent_offset = v_offset + moves_scores * values_bytes;
  static constexpr int stage_bytes = v_tangent_offset + moves_v * values_bytes;
  static constexpr int stages_offset = (1 + moves_q) * queries_bytes;
  static_assert(stages_offset + stages * stage_bytes == Config::shared_memory,
                "as the host planned");

  Fragments fragments;
  const unsigned shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  Scores scores;    // S, then P
  Scores tangents;  // S., then H
  typename Fragments::Output out;

  __device__ MmaTangents(const TangentParams& p, const TileCoord& coord, const Sequence& sequence,
                         unsigned shared)
      : fragments(p, coord, sequence, threadIdx.x / 32 * warp_rows), shared(shared) {}

  __device__ void run() {
    load_queries();
    process_tiles();
    if (moves_scores && __syncthreads_or(fragments.sum_rows())) {
      fragments.restart();
      process_tiles();
      fragments.sum_rows();
    }
    fragments.write(out);
  }

 private:
  __device__ void process_tiles() {
    const KvTileRange& tiles = fragments.tiles;
    clear(out);
    load(0, tiles.end - 1);
    for (int tile = tiles.end - 1, stage = 0; tile >= tiles.begin; --tile) {
      ptx::cp_async_wait_group<0>();
      // All warps must have read the other stage, which the next load overwrites.
      __syncthreads();
      if (stages > 1) load(1 - stage, tile - 1);
      multiply_scores(stage);
      fragments.compute_weights(scores, tangents, tile);
      multiply_values(stage);
      if (stages > 1) {
        stage = 1 - stage;
      } else {
        __syncthreads();
        load(0, tile - 1);
      }
    }
    ptx::cp_async_wait_group<0>();
  }

  // Starts the loads of `Rows` rows from row `first` on. Rows past the end of `source` become 0.
  template <int Rows, int Dim, class Layout>
  __device__ void start(unsigned target, const HeadRows<Element>& source, int first) {
    using Copy = RowCopy<Layout, Element, Rows, Dim, threads, Config::alignment>;
    Copy::template start<true>(target,
                               Copy::source(source.begin + first * source.stride, source.stride),
                               source.stride, source.count - first);
  }

  __device__ void load_queries() {
    const auto start_rows = [&](unsigned target, const Tensor& tensor) {
      start<Br, Config::head_dim, KeyLayout>(
          target, query_rows<Element>(tensor, fragments.sequence, fragments.coord.head),
          fragments.coord.q_begin);
    };
    start_rows(shared, fragments.p.q);
    if constexpr (moves_q) start_rows(shared + queries_bytes, fragments.p.q_tangent);
  }

  // Starts the loads of a KV tile, if there is one.
  __device__ void load(int stage, int tile) {
    if (tile >= fragments.tiles.begin) {
      const unsigned target = shared + stages_offset + stage * stage_bytes;
      const auto rows = [&](const Tensor& tensor) {
        return key_rows<Element>(tensor, fragments.sequence, fragments.coord.head_kv);
      };
      const auto start_keys = [&](int offset, const Tensor& tensor) {
        start<Bc, Config::head_dim, KeyLayout>(target + offset, rows(tensor), tile * Bc);
      };
      const auto start_values = [&](int offset, const Tensor& tensor) {
        start<Bc, Config::head_dim_v, ValueLayout>(target + offset, rows(tensor), tile * Bc);
      };
      start_keys(0, fragments.p.k);
      if constexpr (moves_k) start_keys(k_tangent_offset, fragments.p.k_tangent);
      if constexpr (moves_scores) start_values(v_offset, fragments.p.v);
      if constexpr (moves_v) start_values(v_tangent_offset, fragments.p.v_tangent);
    }
    ptx::cp_async_commit_group();
  }

  // Computes S and S. of a tile. The products with K precede the products with its tangent, so that
  // few consecutive products add to the same accumulators. The next fragment is read from shared
  // memory during the current products.
  __device__ void multiply_scores(int stage) {
    clear(scores);
    clear(tangents);
    const unsigned keys = shared + stages_offset + stage * stage_bytes +
                          KeyLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const unsigned queries =
        shared + warp * warp_rows * KeyLayout::row_bytes + KeyLayout::offset(lane % 16, lane / 16);
    constexpr int parts = 1 + moves_k;  // K, and its tangent
    constexpr int of_step = parts * key_steps;
    unsigned k[2][4];
    const auto load_keys = [&](int number) {
      const int part = number % of_step / key_steps;
      ptx::ldmatrix_x4(k[number % 2],
                       KeyLayout::advance(keys + part * k_tangent_offset, number % key_steps * 16,
                                          number / of_step * 2));
    };
    load_keys(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      unsigned q[row_tiles][4], q_tangent[row_tiles][4];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        ptx::ldmatrix_x4(q[i], KeyLayout::advance(queries, 16 * i, 2 * step));
        if constexpr (moves_q) {
          ptx::ldmatrix_x4(q_tangent[i],
                           KeyLayout::advance(queries + queries_bytes, 16 * i, 2 * step));
        }
      }
#pragma unroll
      for (int index = 0; index < of_step; ++index) {
        const int current = step * of_step + index, j = index % key_steps * 2;
        if (current + 1 < k_steps * of_step) load_keys(current + 1);
        const unsigned(&right)[4] = k[current % 2];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          if (index < key_steps) {
            multiply_pair(scores[i] + j, q[i], right);
            if constexpr (moves_q) multiply_pair(tangents[i] + j, q_tangent[i], right);
          } else {
            multiply_pair(tangents[i] + j, q[i], right);
          }
        }
      }
    }
  }

  // Adds the products of a left operand and two adjacent right operands to two accumulators.
  __device__ static void multiply_pair(float (*sums)[4], const unsigned (&left)[4],
                                       const unsigned (&right)[4]) {
    mma<Element>(sums[0], left, right[0], right[1]);
    mma<Element>(sums[1], left, right[2], right[3]);
  }

  // Adds H V + P V. to the output.
  __device__ void multiply_values(int stage) {
    const unsigned values = shared + stages_offset + stage * stage_bytes +
                            ValueLayout::offset(lane % 16, lane / 16);
    constexpr int parts = moves_scores + moves_v;  // V, and its tangent
    constexpr int of_step = parts * column_steps;
    unsigned v[2][4];
    const auto load_values = [&](int number) {
      const bool is_value = moves_scores && number % of_step < column_steps;
      ptx::ldmatrix_x4_trans(
          v[number % 2],
          ValueLayout::advance(values + (is_value ? v_offset : v_tangent_offset),
                               number / of_step * 16, number % column_steps * 2));
    };
    load_values(0);
#pragma unroll
    for (int step = 0; step < key_steps; ++step) {
      unsigned probabilities[row_tiles][4], changes[row_tiles][4];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        Fragments::pack_operand(probabilities[i], scores[i] + 2 * step);
        Fragments::pack_operand(changes[i], tangents[i] + 2 * step);
      }
#pragma unroll
      for (int index = 0; index < of_step; ++index) {
        const int current = step * of_step + index, j = index % column_steps * 2;
        if (current + 1 < key_steps * of_step) load_values(current + 1);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          const bool is_value = moves_scores && index < column_steps;
          multiply_pair(out[i] + j, is_value ? changes[i] : probabilities[i], v[current % 2]);
        }
      }
    }
  }

};

template <class Config>
__device__ void mma_tangents(const TangentParams& p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const TileCoord coord = tile_coord<Config::Br>(p, blockIdx.x);
  const Sequence sequence = sequence_of<Config>(p, coord.batch);
  if (coord.q_begin >= sequence.seqlen_q) return;
  MmaTangents<Config>(p, coord, sequence, ptx::shared_address(shared_memory)).run();
}

#endif  // __CUDA_ARCH__ >= 800
