// P and H of the rows of which a lane of a tensor-core kernel holds accumulator fragments, and the
// results of these rows.
#pragma once

#include "backward/simt/products.cuh"
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "scheduler/packed_tiles.cuh"
#include "scheduler/tile_coord.cuh"
#include "tangents/row.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"

// `row_tiles` is the number of fragments of 16 rows, of which a lane holds two rows each.
template <class Config, int row_tiles>
struct TangentFragments {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int columns_v = round_up(Config::head_dim_v, 16);
  static constexpr bool moves_scores = Config::moves_q || Config::moves_k;
  static constexpr int lane_rows = 2 * row_tiles;  // number of rows that a lane holds pairs of
  static constexpr int lane_keys = Bc / 4;         // number of keys that a lane holds pairs of
  using Scores = float[row_tiles][Bc / 8][4];
  using Output = float[row_tiles][columns_v / 8][4];
  using Softmax = SoftmaxBackward<Config, lane_rows, lane_keys, TangentParams>;

  const TangentParams& p;
  const TileCoord coord;
  const Sequence sequence;
  const Mask<Config> mask;
  const KvTileRange tiles;
  const int first_row;  // the lane's first row
  const float scale;
  TangentRow<float, 4, scales_weights<Element>, Config::sinks> rows[lane_rows];

  // `warp_row` is the warp's first row in the query tile.
  __device__ TangentFragments(const TangentParams& p, const TileCoord& coord,
                              const Sequence& sequence, int warp_row)
      : p(p),
        coord(coord),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        tiles(kv_tile_range<Bc, false>(mask, coord.q_begin, q_end(), 0, 1)),
        first_row(coord.q_begin + warp_row + threadIdx.x % 32 / 4),
        scale(signed_scale<Config, float>(p)) {
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      rows[r].begin(lse_log2_of<Config>(p, sequence, coord.head, row_of(r)));
    }
  }

  // Completes the sums of the lane's rows. Returns whether one of them is inaccurate.
  __device__ bool sum_rows() {
    bool is_inaccurate = false;
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      rows[r].add_lanes();
      is_inaccurate |= rows[r].is_inaccurate();
    }
    return is_inaccurate;
  }

  // Clears the sums of the rows for another iteration over the keys.
  __device__ void restart() {
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) rows[r].restart();
  }

  // Replaces S and S. of a tile by P and H.
  __device__ void compute_weights(Scores& scores, Scores& tangents, int tile) {
    if (is_masked(tile)) {
      compute_weights<true>(scores, tangents, tile);
    } else {
      compute_weights<false>(scores, tangents, tile);
    }
  }

  // Packs the accumulators of 16 keys as a left operand.
  __device__ static void pack_operand(unsigned (&operand)[4], const float (*fragments)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      operand[i] = pack<Element>(fragments[i / 2][i % 2 * 2], fragments[i / 2][i % 2 * 2 + 1]);
    }
  }

  // Writes the tangents of the rows, given H V + P V.
  __device__ void write(const Output& out) const {
    const HeadRows<Element> primal = query_rows<Element>(p.out, sequence, coord.head);
    Element* target = p.out_tangent.head<Element>(sequence.q_batch, coord.head) +
                      sequence.q_first * p.out_tangent.row_stride;
    const float weight = kept_weight<Config, float>(p);
#pragma unroll
    for (int r = 0; r < lane_rows; ++r) {
      const int row = row_of(r);
      if (row >= sequence.seqlen_q) continue;
      const float distance = rows[r].distance();
      const bool has_key = rows[r].has_key;
      const float factor = weight / rows[r].one();
      if (p.lse_tangent != nullptr && threadIdx.x % 4 == 0) {
        static_cast<float*>(p.lse_tangent)[lse_index<Config>(p, sequence, coord.head, row)] =
            has_key ? rows[r].lse_tangent() : 0;
      }
      const Element* primal_row = primal.begin + row * primal.stride;
      Element* target_row = target + row * p.out_tangent.row_stride;
#pragma unroll
      for (int j = 0; j < columns_v / 8; ++j) {
        const int column = 8 * j + int(threadIdx.x % 4) * 2;
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

 private:
  // Returns one past the last row of the query tile.
  __device__ int q_end() const { return min(coord.q_begin + Br, sequence.seqlen_q); }

  // Returns the index of the lane's r-th row.
  __device__ int row_of(int r) const { return first_row + r / 2 * 16 + r % 2 * 8; }
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

  template <bool Masked>
  __device__ void compute_weights(Scores& scores, Scores& tangents, int tile) {
    const int first_key = tile * Bc + threadIdx.x % 4 * 2;
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
    if constexpr (Config::dropout) drop(scores, tangents, tile * Bc);
  }

  // Sets P and H of the pairs that dropout drops to 0.
  __device__ void drop(Scores& scores, Scores& tangents, int key_begin) {
    const DropoutNumbers numbers = dropout_numbers<Config>(p);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      KeptPairs<false, Bc> kept;
      kept.draw(numbers, coord.batch, coord.head, row_of(2 * i) - int(threadIdx.x % 32 / 4),
                key_begin);
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
        kept.drop(scores[i][j], j);
        kept.drop(tangents[i][j], j);
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
