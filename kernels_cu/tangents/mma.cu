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
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "scheduler/tile_coord.cuh"
#include "tangents/row.cuh"
#include "tile/access.cuh"
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

  // Whether q, k and v have tangents. If q and k have none, the scores have none, and H is 0.
  static constexpr bool moves_q = Config::moves_q;
  static constexpr bool moves_k = Config::moves_k;
  static constexpr bool moves_v = Config::moves_v;
  static constexpr bool moves_scores = moves_q || moves_k;

  // The head dims are padded to the k and the n of an mma; padding is zero in shared memory.
  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int columns_v = round_up(Config::head_dim_v, 16);
  static constexpr int k_steps = columns / 16;
  static constexpr int key_steps = Bc / 16;
  static constexpr int column_steps = columns_v / 16;
  using KeyLayout = SwizzledRows<Element, columns>;
  using ValueLayout = SwizzledRows<Element, columns_v>;
  using Scores = float[row_tiles][Bc / 8][4];

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

  static constexpr int lane_rows = 2 * row_tiles;  // number of rows that a lane holds pairs of
  static constexpr int lane_keys = Bc / 4;         // number of keys that a lane holds pairs of
  using Softmax = SoftmaxBackward<Config, lane_rows, lane_keys, TangentParams>;

  const TangentParams& p;
  const TileCoord coord;
  const Sequence sequence;
  const Mask<Config> mask;
  const KvTileRange tiles;
  const unsigned shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const float scale;

  Scores scores;    // S, then P
  Scores tangents;  // S., then H
  float out[row_tiles][columns_v / 8][4];
  TangentRow<float, 4, scales_weights<Element>> rows[lane_rows];

  __device__ MmaTangents(const TangentParams& p, const TileCoord& coord, const Sequence& sequence,
                         unsigned shared)
      : p(p),
        coord(coord),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        tiles(kv_tile_range<Bc, false>(mask, coord.q_begin, q_end(), 0, 1)),
        shared(shared),
        scale(signed_scale<Config, float>(p)) {}

  __device__ void run() {
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      rows[r].begin(lse_log2_of<Config>(p, sequence, coord.head, row_of(r)));
    }
    load_queries();
    process_tiles();
    if (moves_scores && __syncthreads_or(sum_rows())) {
#pragma unroll
      for (int r = 0; r < lane_rows; ++r) rows[r].template restart<Config>(p, coord.head);
      process_tiles();
      sum_rows();
    }
    finish();
  }

 private:
  __device__ void process_tiles() {
    clear(out);
    load(0, tiles.end - 1);
    for (int tile = tiles.end - 1, stage = 0; tile >= tiles.begin; --tile) {
      ptx::cp_async_wait_group<0>();
      // All warps must have read the other stage, which the next load overwrites.
      __syncthreads();
      if (stages > 1) load(1 - stage, tile - 1);
      multiply_scores(stage);
      if (is_masked(tile)) {
        compute_weights<true>(tile);
      } else {
        compute_weights<false>(tile);
      }
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

  // Completes the sums of the lane's rows. Returns whether one of them is inaccurate.
  __device__ bool sum_rows() {
    bool is_inaccurate = false;
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      rows[r].add_lanes();
      is_inaccurate |= rows[r].template is_inaccurate<Config>(p, coord.head);
    }
    return is_inaccurate;
  }

  // Returns one past the last row of the query tile.
  __device__ int q_end() const { return min(coord.q_begin + Br, sequence.seqlen_q); }

  // Returns the index of the lane's r-th row.
  __device__ int row_of(int r) const {
    return coord.q_begin + warp * warp_rows + lane / 4 + r / 2 * 16 + r % 2 * 8;
  }
  __device__ static float& element(Scores& values, int r, int n) {
    return values[r / 2][n / 2][r % 2 * 2 + n % 2];
  }

  // Returns whether a tile may have masked pairs. Modifications must not be evaluated for rows past
  // the last one, so a partial query tile is masked, too.
  __device__ bool is_masked(int tile) const {
    if (tile >= tiles.full_end) return true;
    if (Config::modified && q_end() < coord.q_begin + Br) return true;
    if constexpr (Config::window_left) return tile < mask.template first_full_tile<Bc>(q_end() - 1);
    return false;
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
          target, query_rows<Element>(tensor, sequence, coord.head), coord.q_begin);
    };
    start_rows(shared, p.q);
    if constexpr (moves_q) start_rows(shared + queries_bytes, p.q_tangent);
  }

  // Starts the loads of a KV tile, if there is one.
  __device__ void load(int stage, int tile) {
    if (tile >= tiles.begin) {
      const unsigned target = shared + stages_offset + stage * stage_bytes;
      const auto rows = [&](const Tensor& tensor) {
        return key_rows<Element>(tensor, sequence, coord.head_kv);
      };
      const auto start_keys = [&](int offset, const Tensor& tensor) {
        start<Bc, Config::head_dim, KeyLayout>(target + offset, rows(tensor), tile * Bc);
      };
      const auto start_values = [&](int offset, const Tensor& tensor) {
        start<Bc, Config::head_dim_v, ValueLayout>(target + offset, rows(tensor), tile * Bc);
      };
      start_keys(0, p.k);
      if constexpr (moves_k) start_keys(k_tangent_offset, p.k_tangent);
      if constexpr (moves_scores) start_values(v_offset, p.v);
      if constexpr (moves_v) start_values(v_tangent_offset, p.v_tangent);
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

  // Replaces S and S. of a tile by P and H.
  template <bool Masked>
  __device__ void compute_weights(int tile) {
    const int first_key = tile * Bc + lane % 4 * 2;
    const Softmax softmax = {p,          mask,
                             sequence,   coord.batch,
                             coord.head, scale * SoftmaxMath<float>::log2_e};
    softmax.template for_each_pair<Masked, true>(
        [&](int r) { return row_of(r); }, first_key,
        [&](int r) {
          return RowStats<float>{rows[r].lse_log2, 0};
        },
        [&](int r, int n) -> float& { return element(scores, r, n); },
        [](int n) { return n / 2 * 8 + n % 2; },
        [&](int r, int n, bool is_visible, bool has_one_key, float exponent, float slope) {
          float probability = is_visible ? SoftmaxMath<float>::exp2(exponent) : 0;
          if (has_one_key && probability != 0) probability = rows[r].one();
          element(scores, r, n) = probability;
          // A score of -inf also masks its pair, whose tangent may be NaN.
          float& tangent = element(tangents, r, n);
          tangent = probability != 0 ? tangent * (scale * slope) : 0;
        },
        0, lane_rows);
    bool all_have_keys = true;
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) all_have_keys &= rows[r].has_key;
    if (!__all_sync(~0u, all_have_keys)) {
#pragma unroll
      for (int r = 0; r < lane_rows; ++r) {
        rows[r].template find_center<lane_keys>([&](int n) { return element(scores, r, n); },
                                                [&](int n) { return element(tangents, r, n); });
      }
    }
    if constexpr (moves_scores) {
#pragma unroll
      for (int r = 0; r < lane_rows; ++r) {
#pragma unroll
        for (int n = 0; n < lane_keys; ++n) {
          float& tangent = element(tangents, r, n);
          tangent = rows[r].add(element(scores, r, n), tangent);
        }
      }
    }
    if constexpr (Config::dropout) drop(tile * Bc);
  }

  // Sets P and H of the pairs that dropout drops to 0.
  __device__ void drop(int key_begin) {
    const DropoutNumbers numbers = dropout_numbers<Config>(p);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      KeptPairs<false, Bc> kept;
      kept.draw(numbers, coord.batch, coord.head, row_of(2 * i) - lane / 4, key_begin);
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        kept.drop(scores[i][j], j);
        kept.drop(tangents[i][j], j);
      }
    }
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
        pack_operand(probabilities[i], scores[i] + 2 * step);
        pack_operand(changes[i], tangents[i] + 2 * step);
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

  // Packs the accumulators of 16 keys as a left operand.
  __device__ static void pack_operand(unsigned (&operand)[4], const float (*fragments)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      operand[i] = pack<Element>(fragments[i / 2][i % 2 * 2], fragments[i / 2][i % 2 * 2 + 1]);
    }
  }

  __device__ void finish() {
    const HeadRows<Element> primal = query_rows<Element>(p.out, sequence, coord.head);
    Element* target = p.out_tangent.head<Element>(sequence.q_batch, coord.head) +
                      sequence.q_first * p.out_tangent.row_stride;
    const float weight = kept_weight<Config, float>(p);
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      const int row = row_of(r);
      if (row >= sequence.seqlen_q) continue;
      const float distance = rows[r].template distance<Config>(p, coord.head);
      const bool has_key = rows[r].has_key;
      const float factor = weight / rows[r].one();
      if (p.lse_tangent != nullptr && lane % 4 == 0) {
        static_cast<float*>(p.lse_tangent)[lse_index<Config>(p, sequence, coord.head, row)] =
            has_key ? rows[r].center + distance : 0;
      }
      const Element* primal_row = primal.begin + row * primal.stride;
      Element* target_row = target + row * p.out_tangent.row_stride;
#pragma unroll
      for (int j = 0; j < columns_v / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        const int left = min(2, Config::head_dim_v - column);
        Vector<Element, 2> result;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float product = out[r / 2][j][r % 2 * 2 + c] * factor;
          const float its_out = c < left ? widen(primal_row[column + c]) : 0;
          result.data[c] = narrow<Element>(has_key ? fma(-distance, its_out, product) : 0);
        }
        store_pair(target_row + column, result, left);
      }
    }
  }

  // Writes the first `count` of two adjacent elements of a row.
  __device__ static void store_pair(Element* target, const Vector<Element, 2>& pair, int count) {
    if (Config::out_alignment >= 4 && count == 2) {
      *reinterpret_cast<Vector<Element, 2>*>(target) = pair;
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c < count) target[c] = pair.data[c];
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
