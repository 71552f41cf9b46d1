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

// The query tiles of a KV tile of Bc keys from `begin` on, and the sums of the `LaneKeys` keys of
// which a lane holds weights. `head` is a query head or, with Config::grouped, a KV head, whose
// query heads are summed together.
template <class Config, int LaneKeys>
struct ReceivedKeys {
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int lane_queries = Br / 4;  // number of queries that a lane holds pairs of
  using Softmax = SoftmaxBackward<Config, lane_queries, LaneKeys, ReceivedParams>;

  const ReceivedParams& p;
  const int batch;
  const int head_kv;
  const int first_head;
  const int last_head;
  const int begin;
  const Sequence sequence;
  const Mask<Config> mask;
  const QueryTileRange tiles;
  const int first_tile;  // tiles with queries that count
  const int last_tile;
  float sums[LaneKeys] = {};

  __device__ ReceivedKeys(const ReceivedParams& p, int batch, int head, int begin)
      : p(p),
        batch(batch),
        head_kv(Config::grouped ? head : head / (p.heads_q / p.heads_kv)),
        first_head(Config::grouped ? head * (p.heads_q / p.heads_kv) : head),
        last_head(Config::grouped ? first_head + p.heads_q / p.heads_kv : head + 1),
        begin(begin),
        sequence(sequence_of<Config>(p, batch)),
        mask(mask_of<Config>(p, sequence, batch)),
        tiles(begin < sequence.seqlen_k
                  ? query_tile_range<Br>(mask, begin, min(begin + Bc, sequence.seqlen_k),
                                         sequence.seqlen_q)
                  : QueryTileRange{}),
        first_tile(max(tiles.begin, p.first_query / Br)),
        last_tile(min(tiles.end, ceil_div(p.last_query, Br))) {}

  __device__ bool has_queries() const { return first_tile < last_tile; }

  // Adds the weights of a query tile. `lse` points to the log-sum-exp of its rows as exponents of
  // two, `score(r, n)` returns the score of the lane's r-th query and n-th key, and `step(n)` is
  // the distance of that key from `first_key`, the lane's first one.
  template <class Score, class Step>
  __device__ void add(int head, int tile, const float* lse, int first_key, Score score, Step step) {
    if (is_masked(tile)) {
      add_weights<true>(head, tile, lse, first_key, score, step);
    } else {
      add_weights<false>(head, tile, lse, first_key, score, step);
    }
  }

  template <class Step>
  __device__ void write(int first_key, Step step) {
    const int heads = Config::grouped ? p.heads_kv : p.heads_q;
    const int head = Config::grouped ? head_kv : first_head;
    float* target = static_cast<float*>(p.received) + (int64(batch) * heads + head) * p.seqlen_k;
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) {
      const float sum = sum_of_lanes(sums[n]);
      const int key = first_key + step(n);
      if (threadIdx.x % 4 == 0 && key < p.seqlen_k) target[key] = sum;
    }
  }

 private:
  // Returns whether a tile may have masked pairs or queries that do not count.
  __device__ bool is_masked(int tile) const {
    return tile < tiles.full_begin || tile >= tiles.full_end ||
           begin + Bc > sequence.seqlen_k || tile * Br < p.first_query ||
           (tile + 1) * Br > min(p.last_query, sequence.seqlen_q);
  }

  template <bool Masked, class Score, class Step>
  __device__ void add_weights(int head, int tile, const float* lse, int first_key, Score score,
                              Step step) {
    const int first_query = threadIdx.x % 4 * 2;
    const auto row_of = [&](int r) { return tile * Br + first_query + r / 2 * 8 + r % 2; };
    float partial[LaneKeys] = {};
    const Softmax softmax = {p,        mask,
                             sequence, batch,
                             head,     float(signed_scale<Config, double>(p) *
                                         SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<Masked, false>(
        row_of, first_key,
        [&](int r) {
          return RowStats<float>{lse[first_query + r / 2 * 8 + r % 2], 0};
        },
        score, step,
        [&](int r, int n, bool is_visible, bool, float exponent, float) {
          if (Masked) is_visible = is_visible && counts(row_of(r));
          partial[n] += is_visible ? SoftmaxMath<float>::exp2(exponent) : 0;
        },
        0, lane_queries);
#pragma unroll
    for (int n = 0; n < LaneKeys; ++n) sums[n] += partial[n];
  }

  __device__ bool counts(int row) const { return row >= p.first_query && row < p.last_query; }
};
