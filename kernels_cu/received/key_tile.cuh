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

// The query tiles of `Keys` keys, and the sums of the `LaneKeys` of them of which a lane holds
// weights.
template <class Config, int LaneKeys, int Keys = Config::Bc>
struct ReceivedKeys {
  static constexpr int Br = Config::Br;
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
  const int full_begin;  // tiles whose pairs are all visible, and whose queries all count
  const int full_end;
  float sums[LaneKeys] = {};

  // The keys begin at `tile.begin`.
  __device__ ReceivedKeys(const ReceivedParams& p, const KeyTile& tile)
      : p(p),
        tile(tile),
        sequence(sequence_of<Config>(p, tile.batch)),
        counted(CountedQueries::of<Config>(p, sequence, tile.batch)),
        mask(mask_of<Config>(p, sequence, tile.batch)),
        tiles(tile.begin < sequence.seqlen_k
                  ? query_tile_range<Br>(mask, tile.begin,
                                         min(tile.begin + Keys, sequence.seqlen_k),
                                         sequence.seqlen_q)
                  : QueryTileRange{}),
        first_tile(max(tiles.begin, counted.begin / Br)),
        last_tile(min(tiles.end, ceil_div(counted.end, Br))),
        full_begin(max(tiles.full_begin, ceil_div(counted.begin, Br))),
        full_end(tile.begin + Keys > sequence.seqlen_k ? 0
                                                       : min(tiles.full_end, counted.end / Br)) {}

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
    if (q_tile >= full_begin && q_tile < full_end) {
      add_weights<false>(head, q_tile, lse, first_key, score, step);
    } else {
      add_weights<true>(head, q_tile, lse, first_key, score, step);
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
  // Queries that count and attend to a key by its position, as distances from some query.
  struct VisibleQueries {
    int begin;
    int end;
    __device__ bool contain(int distance) const { return distance >= begin && distance < end; }
  };
  __device__ VisibleQueries visible_queries(int key, int from) const {
    if (key >= sequence.seqlen_k) return {};
    const int begin = max(mask.row_begin(key, sequence.seqlen_q), counted.begin);
    const int end = min(mask.row_end(key, sequence.seqlen_q), counted.end);
    return {begin - from, end - from};
  }

  template <bool Masked, class Score, class Step>
  __device__ void add_weights(int head, int q_tile, const float* lse, int first_key, Score score,
                              Step step) {
    const int lane_query = threadIdx.x % 4 * 2, first_query = q_tile * Br + lane_query;
    const auto distance = [](int r) { return r / 2 * 8 + r % 2; };
    float partial[LaneKeys] = {};
    VisibleQueries visible[LaneKeys];
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) {
      visible[n] = Masked ? visible_queries(first_key + step(n), first_query) : VisibleQueries{};
    }
    const Softmax softmax = {p,        mask,
                             sequence, tile.batch,
                             head,     float(signed_scale<Config, double>(p) *
                                         SoftmaxMath<double>::log2_e)};
    // Positions are compared here: one range per key takes fewer instructions than the softmax's
    // ranges, one per query.
    softmax.template for_each_pair<false, false>(
        [&](int r) { return first_query + distance(r); }, first_key,
        [&](int r) { return RowStats<float>{lse[lane_query + distance(r)], 0}; }, score, step,
        [&](int r, int n, bool is_visible, bool, float exponent, float) {
          if (Masked) is_visible = is_visible && visible[n].contain(distance(r));
          partial[n] += is_visible ? SoftmaxMath<float>::exp2(exponent) : 0;
        },
        0, lane_queries);
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) sums[n] += partial[n];
  }
};
