// Sums over queries of the attention weights of the keys of a KV tile. Scores are transposed,
// S^T = K Q^T, so that the weights of a key lie in one row of the accumulators, and each lane sums
// its part of the row.
#pragma once

#include "backward/softmax_backward.cuh"
#include "received/params.cuh"
#include "score/mask.cuh"
#include "scheduler/packed_tiles.cuh"
#include "scheduler/tile_coord.cuh"
#include "tile/fragments.cuh"

// The query tiles of a KV tile, and the sums of the `LaneKeys` keys of which a lane holds weights.
template <class Config, int LaneKeys>
struct ReceivedKeys {
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int lane_queries = Br / 4;  // number of queries that a lane holds pairs of
  using Softmax = SoftmaxBackward<Config, lane_queries, LaneKeys, ReceivedParams>;

  const ReceivedParams& p;
  const KeyTile tile;
  const Sequence sequence;
  const CountedQueries counted;
  const Mask<Config> mask;
  const QueryTileRange tiles;
  const int first_tile;  // tiles with queries that count
  const int last_tile;
  float sums[LaneKeys] = {};

  __device__ ReceivedKeys(const ReceivedParams& p, const KeyTile& tile)
      : p(p),
        tile(tile),
        sequence(sequence_of<Config>(p, tile.batch)),
        counted(CountedQueries::of<Config>(p, sequence, tile.batch)),
        mask(mask_of<Config>(p, sequence, tile.batch)),
        tiles(tile.begin < sequence.seqlen_k
                  ? query_tile_range<Br>(mask, tile.begin,
                                         min(tile.begin + Bc, sequence.seqlen_k),
                                         sequence.seqlen_q)
                  : QueryTileRange{}),
        first_tile(max(tiles.begin, counted.begin / Br)),
        last_tile(min(tiles.end, ceil_div(counted.end, Br))) {}

  __device__ bool has_queries() const { return first_tile < last_tile; }

  // Returns the log-sum-exp of a query row as an exponent of two, see counted_lse_log2().
  __device__ float lse_log2(int head, int row) const {
    return counted_lse_log2<Config>(p, sequence, counted, head, row);
  }

  // Adds the weights of a query tile. `lse` points to the log-sum-exp of its rows as exponents of
  // two, `score(r, n)` returns the score of the lane's r-th query and n-th key, and `step(n)` is
  // the distance of that key from `first_key`, the lane's first one.
  template <class Score, class Step>
  __device__ void add(int head, int q_tile, const float* lse, int first_key, Score score, Step step) {
    if (is_masked(q_tile)) {
      add_weights<true>(head, q_tile, lse, first_key, score, step);
    } else {
      add_weights<false>(head, q_tile, lse, first_key, score, step);
    }
  }

  template <class Step>
  __device__ void write(int first_key, Step step) {
    const auto target = received_sums<Config, float>(p, sequence, tile);
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) {
      const float sum = sum_of_lanes(sums[n]);
      const int key = first_key + step(n);
      if (threadIdx.x % 4 == 0 && key < target.count) target.begin[key] = sum;
    }
  }

 private:
  // Returns whether a tile may have masked pairs or queries that do not count.
  __device__ bool is_masked(int q_tile) const {
    return q_tile < tiles.full_begin || q_tile >= tiles.full_end ||
           tile.begin + Bc > sequence.seqlen_k || q_tile * Br < counted.begin ||
           (q_tile + 1) * Br > counted.end;
  }

  template <bool Masked, class Score, class Step>
  __device__ void add_weights(int head, int q_tile, const float* lse, int first_key, Score score,
                              Step step) {
    const int first_query = threadIdx.x % 4 * 2;
    const auto row_of = [&](int r) { return q_tile * Br + first_query + r / 2 * 8 + r % 2; };
    float partial[LaneKeys] = {};
    const Softmax softmax = {p,        mask,
                             sequence, tile.batch,
                             head,     float(signed_scale<Config, double>(p) *
                                         SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<Masked, false>(
        row_of, first_key,
        [&](int r) {
          return RowStats<float>{lse[first_query + r / 2 * 8 + r % 2], 0};
        },
        score, step,
        [&](int r, int n, bool is_visible, bool, float exponent, float) {
          if (Masked) is_visible = is_visible && counted.contain(row_of(r));
          partial[n] += is_visible ? SoftmaxMath<float>::exp2(exponent) : 0;
        },
        0, lane_queries);
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) sums[n] += partial[n];
  }
};
