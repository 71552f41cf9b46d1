// A consumer of the Hopper kernel: a warpgroup that owns 64 rows of a query tile and computes S, P
// and O in registers with wgmma. It issues two GEMMs together: S of the next KV tile and O of the
// current one. It computes the softmax of the next KV tile while the tensor cores compute O or, if
// it has too few registers for that, while they work for other consumers. The next KV tile may
// belong to another query tile, so that the tensor cores stay busy between query tiles, too.
#pragma once

#include "forward/hopper/bias.cuh"
#include "forward/hopper/cta.cuh"
#include "forward/hopper/dropout.cuh"
#include "forward/hopper/peer_exchange.cuh"
#include "forward/hopper/products.cuh"
#include "forward/hopper/epilogue.cuh"
#include "forward/hopper/softmax.cuh"
#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"

#if __CUDA_ARCH__ == 900

// `Transposed` selects the specialization for float8 (float8/consumer.cuh), whose V is transposed.
template <class Config, bool Transposed = HopperCta<Config>::transposes_values>
struct HopperConsumer {
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;
  using Products = HopperProducts<Config>;
  using Softmax = HopperSoftmax<Config>;
  using SoftmaxRow = typename Softmax::Row;
  static constexpr int Bc = Config::Bc;
  static constexpr int consumers = Cta::consumers;

  static_assert(!Config::pingpong || consumers > 1, "ping-pong scheduling needs several consumers");
  // Ping-pong scheduling: named barriers order the consumers, so that the softmax of one overlaps
  // the GEMMs of another. Scores bounded by tanh make the softmax longer than both GEMMs. With
  // bounded scores, the barriers therefore order the consumers within the softmax: one consumer
  // computes tanh while another computes exponentials. With a softcap of 50 that is 3% faster at
  // head_dim 64 and 128. Without modifications it was 3 to 20% slower, so only bounded scores use
  // this order.
  static constexpr bool pingpong_softmax =
      Config::pingpong && Config::bounded && !Config::skips_tiles;
  static constexpr bool pingpong_gemms = Config::pingpong && !pingpong_softmax;

  const Cta& cta;
  const int consumer;  // index of this consumer

  Products products;
  Softmax softmax;
  PeerExchange<Config> peer;
  HopperDropout<Config> dropout;
  int work_tile_slot = 0;  // index in the ring of work tiles

  // State of the query tile. Values that are cheap to recompute are not kept, to save registers.
  int first_row;              // first query row of this consumer
  int full_end;               // first_masked_tile() of these rows, if Config::has_seqlens
  int kv_tile;                // KV tile whose scores were computed last
  int begin;                  // `kv_tiles.begin`: the KV tile that is processed last
  typename Cta::KvTileInfo kv_tile_info;  // `KvTileInfo` of the KV tile, if Config::skips_tiles
  int visible_pairs_slot = -1;  // index in the ring of visible pairs, if Config::block_mask
  // Visible pairs of the KV tile, if the block mask stores them.
  typename Cta::TilePairs visible_pairs;
  PipelineState<Config::bias_stages> bias_ring;

  __device__ HopperConsumer(const Cta& cta, int consumer)
      : cta(cta),
        consumer(consumer),
        products(cta, consumer),
        softmax(cta.p),
        peer(cta, consumer),
        dropout(cta) {}

  __device__ void consume() {
    softmax.reset();
    if constexpr (Config::skips_tiles) {
      consume_needed();
    } else {
      consume_all();
    }
  }

  // Processes every KV tile of the CTA's work tiles.
  __device__ void consume_all() {
    if (!begin_query_tile()) return;
    if (Config::pingpong && consumer == consumers - 1) pingpong_arrive();
    products.load_query_fragments();
    products.start_scores();
    prepare_pairs();
    if (pingpong_softmax) pingpong_wait();
    ptx::wgmma_wait_group<0>();
    products.release_scores(1, true, kv_tile == begin);
    float rescale[2];
    compute_softmax(rescale);
    products.move_probabilities();

    bool accumulate = false;  // whether O holds the sum over earlier KV tiles of the query tile
    while (true) {
      const bool tile_ends = kv_tile == begin;
      if (tile_ends) {
        work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
        if (!begin_query_tile()) break;
        products.load_query_fragments();
      } else {
        --kv_tile;
      }
      multiply_both(tile_ends, accumulate, rescale);
      accumulate = !tile_ends;
    }

    if (pingpong_gemms) pingpong_wait();
    products.start_output(accumulate);
    if (pingpong_gemms && consumer < consumers - 1) pingpong_arrive();
    float normalizer[2];
    const bool is_special = epilogue().finish_softmax(softmax.rows, normalizer);
    products.wait_output();
    epilogue().write_output(normalizer, is_special);
    peer.finish();
    // Waits for the last arrival of the last consumer, so that no barrier is left half complete.
    if (pingpong_softmax && consumer == 0) pingpong_wait();
  }

  // Issues S of KV tile `kv_tile` and O of the KV tile before it. `tile_ends` says that the latter
  // was the last one of its query tile.
  __device__ void multiply_both(bool tile_ends, bool accumulate, float (&rescale)[2]) {
    if (pingpong_gemms) pingpong_wait();
    products.start_scores();
    products.start_output(accumulate, true);
    if (pingpong_gemms) pingpong_arrive();

    prepare_pairs();
    if (pingpong_softmax) pingpong_wait();
    ptx::wgmma_wait_group<1>();
    products.release_scores(2, tile_ends, !Config::skips_tiles && kv_tile == begin);
    const SoftmaxRow finished[2] = {softmax.rows[0], softmax.rows[1]};
    if (tile_ends) softmax.reset();
    // In MLA, each stage holds both K and V, so that few stages fit. A consumer then waits for O
    // while it waits for scores of the peer CTA, to release a stage early.
    constexpr bool releases_early = Cta::values_in_keys && !Config::overlaps_output;
    prepare_scores([&] {
      if (releases_early) products.wait_output(true);
    });
    const auto wait = [&] {
      if (!Config::overlaps_output && !releases_early) products.wait_output(true);
    };
    bool rescales =
        softmax.exponentiate(products.scores, products.next_probabilities, rescale, wait);
    dropout.apply(products.next_probabilities);
    float normalizer[2];
    bool is_special = false;
    if (tile_ends) is_special = epilogue().finish_softmax(finished, normalizer);
    if (Config::overlaps_output) products.wait_output(true);
    products.move_probabilities();
    if (tile_ends) {
      epilogue().write_output(normalizer, is_special);
    } else if (rescales) {
      products.scale_output(rescale);
    }
  }

  // Processes the KV tiles that this consumer needs. At other KV tiles, the tensor cores serve
  // other consumers; this one still passes the ping-pong barriers, so that all consumers pass them
  // equally often. Example of a consumer that skips KV tile 1:
  //
  //   ring       K0    K1 V0    K2 V1    K3 V2    end V3
  //   issued     S0    O0       S2       S3 O2    O3
  __device__ void consume_needed() {
    if (Config::pingpong && consumer == consumers - 1) pingpong_arrive();
    work_tile_slot = -1;
    bool is_first_kv_tile = true;
    bool accumulate = false;
    while (true) {
      for (next_kv_tile(); !kv_tile_info.is_needed_by(consumer); next_kv_tile()) {
        switch_query_tile(accumulate);
        if (Config::pingpong) pingpong_wait();
        products.skip_keys(kv_tile_info.is_end());
        if (!is_first_kv_tile) products.skip_values();
        is_first_kv_tile = false;
        pingpong_arrive_next();
        if (kv_tile_info.is_end()) return;
      }
      switch_query_tile(accumulate);
      if (!accumulate) {
        begin_query_tile();
        products.load_query_fragments();
      }
      if (Config::pingpong) pingpong_wait();
      products.start_scores();
      if (!is_first_kv_tile) products.skip_values();
      pingpong_arrive_next();
      prepare_pairs();
      ptx::wgmma_wait_group<0>();
      products.release_scores(is_first_kv_tile ? 1 : 2, !accumulate, false);
      is_first_kv_tile = false;
      float rescale[2];
      if (compute_softmax(rescale) && accumulate) products.scale_output(rescale);
      products.move_probabilities();

      for (next_kv_tile(); kv_tile_info.is_needed_by(consumer); next_kv_tile()) {
        const bool tile_ends = kv_tile_info.begins_query_tile();
        if (tile_ends) {
          work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
          begin_query_tile();
          products.load_query_fragments();
        }
        multiply_both(tile_ends, accumulate, rescale);
        accumulate = !tile_ends;
      }

      if (Config::pingpong) pingpong_wait();
      products.skip_keys(kv_tile_info.is_end());
      products.start_output(accumulate);
      pingpong_arrive_next();
      products.wait_output();
      accumulate = true;
      switch_query_tile(accumulate);
      if (kv_tile_info.is_end()) return;
    }
  }

  // Waits for the next KV tile. If it begins another query tile, the old queries are released at
  // once: a consumer that waits for the new ones may come before this one in the ping-pong order.
  __device__ void next_kv_tile() {
    products.wait_stage();
    kv_tile_info = *cta.kv_tile_info(products.ring.index);
    if (Config::block_mask && ++visible_pairs_slot == Cta::visible_pairs_slots) {
      visible_pairs_slot = 0;
    }
    kv_tile = kv_tile_info.kv_tile;
    if (!Products::keeps_all_queries && kv_tile_info.begins_query_tile() && work_tile_slot >= 0) {
      products.release_queries();
    }
  }

  // When the next query tile begins or the work ends, writes the output of the finished query tile
  // if O holds it (`accumulate`). Then advances to the next work tile, if any.
  __device__ void switch_query_tile(bool& accumulate) {
    if (!kv_tile_info.begins_query_tile() && !kv_tile_info.is_end()) return;
    if (accumulate) {
      const HopperEpilogue<Config> epilogue = {cta, products,
                                               Cta::next_work_tile_slot(work_tile_slot)};
      float normalizer[2];
      const bool is_special = epilogue.finish_softmax(softmax.rows, normalizer);
      epilogue.write_output(normalizer, is_special);
      softmax.reset();
      accumulate = false;
    }
    if (!kv_tile_info.is_end()) work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
  }

  // Lets the next consumer proceed. The last consumer skips its last arrival, for which no consumer
  // would wait.
  __device__ void pingpong_arrive_next() const {
    if (Config::pingpong && !(kv_tile_info.is_end() && consumer == consumers - 1)) {
      pingpong_arrive();
    }
  }

  // Returns the epilogue of the query tile before the one that was entered last.
  __device__ HopperEpilogue<Config> epilogue() { return {cta, products, work_tile_slot}; }

  // Waits for the next query tile. Returns false after the last one.
  __device__ bool begin_query_tile() {
    products.wait_queries();
    const WorkTile& next = *cta.work_tile_at(work_tile_slot);
    if (next.is_end_of_work()) return false;
    first_row = products.first_row_of(next.coord);
    if constexpr (Cta::transposes_values) softmax.enter(next, cta.p);
    if (Config::has_seqlens) {
      full_end = next.template mask<Config>(cta.p).template full_tiles<Bc>(first_row);
    }
    if constexpr (!Config::skips_tiles) {
      kv_tile = next.kv_tiles.end - 1;
      begin = next.kv_tiles.begin;
    }
    return true;
  }

  __device__ void pingpong_wait() const { NamedBarrier<256>{1 + consumer}.sync(); }
  __device__ void pingpong_arrive() const {
    NamedBarrier<256>{1 + (consumer + 1) % consumers}.arrive();
  }

  // Converts the scores of the KV tile to probabilities. Returns whether the base of any row of the
  // warp changed, so that O must be multiplied by `rescale`.
  __device__ bool compute_softmax(float (&rescale)[2]) {
    prepare_scores([] {});
    bool changes =
        softmax.exponentiate(products.scores, products.next_probabilities, rescale, [] {});
    dropout.apply(products.next_probabilities);
    return changes;
  }

  // Completes the scores of the KV tile: adds those of the peer CTA, modifies them and masks them.
  template <class WhileWaiting>
  __device__ void prepare_scores(WhileWaiting while_waiting) {
    peer.add_peer_scores(products.scores, while_waiting);
    Softmax::apply_factor(products.scores);
    modify_scores();
    if constexpr (pingpong_softmax) {
      // The pin keeps the compiler from moving the modification after the arrival.
      ptx::pin(products.scores);
      pingpong_arrive();
    }
    if (kv_tile >= first_masked_tile()) apply_mask();
    if constexpr (Config::window_left) {
      if (kv_tile < first_unmasked_tile()) mask_before_window();
    }
  }

  // Returns the first KV tile with keys at or after visible_end() of some row of this consumer.
  __device__ int first_masked_tile() const {
    return Config::has_seqlens ? full_end
                               : Mask<Config>(cta.p, batch()).template full_tiles<Bc>(first_row);
  }

  // Returns the first KV tile in which the window masks no key for any row of this consumer.
  __device__ int first_unmasked_tile() const {
    const WorkTile& current = *cta.work_tile_at(work_tile_slot);
    const int last = products.first_row_of(current.coord) + 63;
    return current.template mask<Config>(cta.p).template first_full_tile<Bc>(last);
  }

  __device__ void mask_before_window() {
    const WorkTile& current = *cta.work_tile_at(work_tile_slot);
    const int first = products.first_row_of(current.coord) + Products::lane_row();
    const Mask<Config> mask = current.template mask<Config>(cta.p);
    const int lane_begin = kv_tile * Bc + threadIdx.x % 4 * 2;
    Softmax::mask_before(products.scores, [&](int half) {
      return mask.visible_begin(first + 8 * half) - lane_begin;
    });
  }

  // Returns the batch index of the query tile if the mask depends on it, otherwise 0.
  __device__ int batch() const {
    return Config::prefix || Config::offsets ? cta.work_tile_at(work_tile_slot)->coord.batch : 0;
  }

  __device__ void modify_scores() {
    if constexpr (Config::modified) {
      const WorkTile& current = *cta.work_tile_at(work_tile_slot);
      const auto& sequence = current.sequence(cta.p);
      const int batch = current.coord.batch;
      const int q_offset = Config::has_seqlens
                               ? sequence.template q_offset<Config>(cta.p, batch)
                               : first_position<Config>(cta.p, batch, cta.p.q_offset);
      const int first = products.first_row_of(current.coord) + Products::lane_row();
      const bool masks = !Config::block_mask ||
                         !(kv_tile_info.is_full(consumer) || kv_tile_info.pairs_slot(consumer));
      const HopperBias<Config> bias(cta, consumer, bias_ring);
      modify_fragments<Config, 2, Bc / 8>(
          cta.p,
          [&](int half) {
            return ScoreRow{batch,    current.coord.head, first + 8 * half,
                            q_offset, sequence.q_first,   sequence.k_first};
          },
          kv_tile * Bc + threadIdx.x % 4 * 2, [&](int half) { return softmax.rows[half].base; },
          masks, [&](int half) { return products.scores + 2 * half; },
          [&](int half) { return bias.row(half); });
      if constexpr (Config::block_mask) {
        if (kv_tile_info.pairs_slot(consumer)) apply_visible_pairs();
      }
    }
  }

  // Loads the visible pairs that arrived with K, before the stage of K is released, and draws the
  // random numbers of dropout, both while the scores are computed.
  __device__ void prepare_pairs() {
    dropout.draw(work_tile_slot, first_row, kv_tile);
    if constexpr (Config::block_mask) {
      if (kv_tile_info.pairs_slot(consumer)) {
        visible_pairs = cta.visible_pairs(visible_pairs_slot, consumer);
        // TMA must not overwrite the pairs before they are read, see `HopperBias`.
        ptx::fence_proxy_async();
      }
    }
  }

  __device__ void apply_visible_pairs() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < Bc / 4; ++n) {
        const bool is_visible = visible_pairs.bits[half][n / 32] >> n % 32 & 1;
        if (!is_visible) {
          products.scores[2 * half + n / 2 * 4 + n % 2] = -SoftmaxMath<float>::infinity();
        }
      }
    }
  }

  __device__ void apply_mask() {
    const WorkTile& current = *cta.work_tile_at(work_tile_slot);
    const int first = Config::has_seqlens ? products.first_row_of(current.coord) : first_row;
    const Mask<Config> mask = current.template mask<Config>(cta.p);
    const auto tile_mask = mask.counted_from(kv_tile * Bc + threadIdx.x % 4 * 2);
    softmax.mask(products.scores, kv_tile == 0, [&](int half) {
      return tile_mask.visible_end(first + Products::lane_row() + 8 * half);
    });
  }
};

#endif  // __CUDA_ARCH__ == 900
