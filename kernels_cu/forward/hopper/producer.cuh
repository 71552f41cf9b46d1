// The producer of a CTA of the Hopper kernel: one thread that issues TMA loads of Q, K and V tiles.
// If consumers skip KV tiles, the whole warp of this thread runs every step, because its lanes
// together determine which KV tiles each consumer needs.
#pragma once

#include "forward/hopper/bias.cuh"
#include "forward/hopper/cta.cuh"
#include "forward/hopper/kv_tile_iterator.cuh"
#include "forward/hopper/loader.cuh"
#include "forward/hopper/mla_loader.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperProducer : HopperLoader<Config> {
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;
  using Loader = HopperLoader<Config>;
  using KvTile = typename Loader::KvTile;

  using Loader::cta, Loader::ring, Loader::q_ring, Loader::work_tile_slot, Loader::work_tile_state;
  using Loader::is_elected;

  PipelineState<Config::bias_stages> bias_ring = {};
  PipelineState<Cta::visible_pairs_slots> visible_pairs_ring = {};
  KvTileIterator<Config> kv_tiles;  // used if Config::skips_tiles

  // Returns whether this thread runs produce(). Only the thread for which is_elected() is true
  // issues loads and arrives at barriers.
  __device__ static bool is_producer_thread() {
    return Config::skips_tiles ? threadIdx.x < 32 : threadIdx.x == 0;
  }

  // Loads the tiles of all query tiles of this CTA. K is one KV tile ahead of V, the order in which
  // consumers need them.
  __device__ void produce() {
    KvTile values = {-1};  // KV tile whose V comes next
    for (unsigned round = 0;; ++round) {
      const WorkTile& next = next_work_tile(round);
      if (next.is_end_of_work()) break;
      if (!next.has_keys()) continue;
      // Load the next queries first if a query stage is free. Otherwise K, and V of the previous
      // query tile, come first, so that they do not wait for a query stage. If consumers skip KV
      // tiles, they release the queries only when that K has arrived, see next_kv_tile(). Causal
      // calls always load keys first: loading queries first is 4% slower there, but 3% faster in
      // other calls (512 keys, head_dim 128).
      bool published =
          !Config::causal && ptx::mbarrier_test_wait(cta.q_empty(q_ring.index), q_ring.phase ^ 1);
      if constexpr (Config::skips_tiles) {
        published = __shfl_sync(~0u, published, 0);
        kv_tiles.enter(cta.p, next);
      }
      if (published) publish_work_tile(next);
      // `key` is the index of a KV tile.
      for (int key = next.kv_tiles.end - 1; key >= next.kv_tiles.begin;
           key = Config::skips_tiles ? kv_tiles.next_tile(cta.p, next, key) : key - 1) {
        const Sequence& sequence = next.sequence(cta.p);
        KvTile keys = {key, next.coord.head_kv, sequence.k_batch, sequence.k_first,
                       sequence.seqlen_k};
        if constexpr (Config::page_size > 0) look_up_page(next.coord.batch, keys);
        if constexpr (Config::skips_tiles) publish_kv_tile(kv_tiles.info(next, key), next.coord);
        this->load_keys(keys);
        if constexpr (Cta::streams_bias) load_bias(*this, bias_ring, next.coord, key);
        if (!Cta::values_in_keys && values.index >= 0) this->load_values(values);
        if (!published) publish_work_tile(next);
        published = true;
        values = keys;
        // The scheduler warp waits for this request, so the KV tile must not be skipped. Only block
        // masks skip KV tiles between the first and the last, and only in dense batches.
        if (Config::has_seqlens &&
            key == next.kv_tiles.begin + min(Cta::work_tile_prefetch, next.kv_tile_count() - 1)) {
          if (is_elected()) ptx::mbarrier_arrive(cta.work_tile_empty());
        }
      }
    }
    if constexpr (Config::skips_tiles) publish_end();
    if (!Cta::values_in_keys && values.index >= 0) this->load_values(values);
    if constexpr (!Config::skips_tiles) publish_work_tile(WorkTile::end_of_work());
    if constexpr (Config::has_seqlens) this->publish_end_of_tails();
  }

  __device__ decltype(auto) next_work_tile(unsigned round) {
    if constexpr (Config::has_seqlens) {
      return wait_work_tile();
    } else {
      return cta.work_tile_of(round);
    }
  }

  // Waits for the next work tile from the scheduler warp.
  __device__ const WorkTile& wait_work_tile() {
    ptx::mbarrier_wait(cta.work_tile_full(), work_tile_state.phase);
    work_tile_state.advance();
    return *cta.work_tile_at(work_tile_slot);
  }

  // Publishes a work tile to the consumers, and loads its queries unless it is the end marker.
  __device__ void publish_work_tile(const WorkTile& next) {
    ptx::mbarrier_wait(cta.q_empty(q_ring.index), q_ring.phase ^ 1);
    // In variable-length batches, the scheduler warp has written it already.
    if (!Config::has_seqlens && is_elected()) *cta.work_tile_at(work_tile_slot) = next;
    if (!next.is_end_of_work()) {
      this->load_queries(next);
    } else if (is_elected()) {
      ptx::mbarrier_arrive(cta.q_full(q_ring.index));
    }
    q_ring.advance();
    work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
  }

  // Publishes the `KvTileInfo` of the KV tile whose K comes next.
  __device__ void publish_kv_tile(const typename Cta::KvTileInfo& kv_tile_info,
                                  const TileCoord& coord) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    if (!is_elected()) return;
    *cta.kv_tile_info(ring.index) = kv_tile_info;
    if constexpr (Config::block_mask) load_visible_pairs(cta.p, kv_tile_info, coord);
  }

  // Loads the visible pairs that the block mask stores. They arrive at the same barrier as K.
  template <class AnyParams>
  __device__ void load_visible_pairs(const AnyParams& p,
                                     const typename Cta::KvTileInfo& kv_tile_info,
                                     const TileCoord& coord) {
    // Few KV tiles have stored pairs. The loop is not unrolled, to save the producer's registers.
#pragma unroll 1
    for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
      const int pairs_slot = kv_tile_info.pairs_slot(consumer);
      if (pairs_slot == 0) continue;
      const int64 tile =
          p.block_mask.query_tile_index(coord.batch, coord.head, coord.q_begin / Config::Br);
      ptx::mbarrier_expect_tx(cta.full(ring.index), Cta::visible_pairs_bytes);
      ptx::cp_async_bulk(cta.visible_pairs_address(visible_pairs_ring.index, consumer),
                         p.block_mask.template visible_pairs<typename Cta::TilePairs>(
                             tile * Cta::consumers + consumer, pairs_slot - 1),
                         Cta::visible_pairs_bytes, cta.full(ring.index));
    }
    visible_pairs_ring.advance();
  }

  __device__ void publish_end() {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    if (is_elected()) {
      *cta.kv_tile_info(ring.index) = Cta::KvTileInfo::end_of_work();
      ptx::mbarrier_arrive(cta.full(ring.index));
    }
    ring.advance();
  }

  // Sets the page that holds a KV tile. The block table is not validated: for a page number outside
  // the cache, TMA fills the tile with zeros.
  __device__ void look_up_page(int batch, KvTile& keys) const {
    // Number of the first key of the tile in its sequence.
    const int key = keys.row();
    keys.batch = cta.p.block_table[batch * cta.p.block_table_stride + key / Config::page_size];
    keys.first = key % Config::page_size - key;
  }
};

#endif  // __CUDA_ARCH__ == 900
