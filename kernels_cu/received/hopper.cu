// Sum over queries of the attention weights of each key on Hopper (sm_90a), for float16 and
// bfloat16. The forward pass has computed `lse`.
//
// A work item is a KV tile of Bc keys, which is the left operand of the score pipeline, with 64 keys
// for each consumer. Its right tiles are the query tiles of Br rows, whose numbers are their
// log-sum-exp. With Config::grouped, a work item goes through all query heads of its KV head.
#pragma once

#include "received/hopper/score_pipeline.cuh"
#include "received/key_tile.cuh"
#include "received/params.cuh"

#if __CUDA_ARCH__ == 900

template <class Config_>
struct HopperReceived {
  using Config = Config_;
  using Pipeline = ScorePipeline<Config, Config::Bc, Config::Br, true>;

  struct Item {
    ReceivedKeys<Config, 2> keys;

    __device__ ScoreWork work() const {
      const KeyTile& tile = keys.tile;
      return {tile.batch,     tile.head_kv,    tile.begin,    tile.first_head,
              tile.last_head, keys.first_tile, keys.last_tile};
    }
    __device__ float number(int head, int row) const { return keys.lse_log2(head, row); }
    __device__ void consume(Pipeline& pipeline, int consumer) const {
      KeyTile tile = keys.tile;
      tile.begin += 64 * consumer;
      ReceivedKeys<Config, 2, 64> own = {keys.p, tile};
      const int first_key = tile.begin + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      const auto step = [](int n) { return 8 * n; };
      if (keys.has_queries()) {
        pipeline.multiply(
            work(), consumer, own.first_tile, own.last_tile,
            [&](const typename Pipeline::Scores& scores, const ScoreTile& tile, const float* lse) {
              own.add(
                  tile.head, tile.tile, lse, first_key,
                  [&](int r, int n) { return scores[r / 2 * 4 + 2 * n + r % 2]; }, step);
            });
      }
      own.write(first_key, step);
    }
  };

  const ReceivedParams& p;
  const TensorMap* left_map;
  const TensorMap* right_map;

  __device__ int heads() const { return Config::grouped ? p.heads_kv : p.heads_q; }
  __device__ unsigned items() const {
    return ceil_div(p.seqlen_k, Config::Bc) * p.batch * heads();
  }

  // Heads are taken in sections. Within a section, KV tiles are in order: with a causal mask, most
  // queries attend to the first one.
  __device__ Item item(unsigned index) const {
    const int tiles = ceil_div(p.seqlen_k, Config::Bc), all = p.batch * heads();
    const int most = Config::grouped ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads;
    const int section = index / (most * tiles);
    const int in_section = index - section * most * tiles, count = min(most, all - section * most);
    const int head = section * most + in_section % count;
    return {{p, KeyTile::at<Config>(p, head, in_section / count)}};
  }
};

template <class Config>
__device__ void hopper_received(const ScoreMaps& maps, const ReceivedParams& p) {
  run_score_kernel(HopperReceived<Config>{p, &maps.k, &maps.q});
}

#endif  // __CUDA_ARCH__ == 900
