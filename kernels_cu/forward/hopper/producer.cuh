// The producer of a CTA of the Hopper kernel: one thread that issues TMA loads of Q, K and V tiles.
// If consumers skip KV tiles, the whole warp of this thread runs every step, because its lanes
// together determine which KV tiles each consumer needs.
#pragma once

#include "forward/hopper/cta.cuh"
#include "forward/hopper/kv_tile_iterator.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperProducer {
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;
  using QueryTile = typename Cta::QueryTile;
  using KeyTile = typename Cta::KeyTile;
  using ValueTile = typename Cta::ValueTile;
  static constexpr int Bc = Config::Bc;

  const Cta& cta;
  PipelineState<Config::stages> ring = {};
  PipelineState<Config::q_stages> q_ring = {};
  int work_tile_slot = 0;  // index in the ring of work tiles
  PipelineState<1> work_tile_state = {};
  PipelineState<Cta::tails> tail = {};
  PipelineState<Config::bias_stages> bias_ring = {};
  PipelineState<Cta::visible_pairs_slots> visible_pairs_ring = {};
  KvTileIterator<Config> kv_tiles;  // used if Config::skips_tiles

  // Returns whether this thread runs produce(). is_elected() returns whether it is the one that
  // issues copies and arrives at barriers.
  __device__ static bool is_producer_thread() {
    return Config::skips_tiles ? threadIdx.x < 32 : threadIdx.x == 0;
  }
  __device__ static bool is_elected() { return !Config::skips_tiles || threadIdx.x == 0; }

  // A KV tile of a sequence.
  struct KvTile {
    int index;
    int head;
    int batch;
    int first;   // row of the array with the sequence's first key
    int seqlen;  // number of keys of the sequence

    __device__ int row() const { return first + index * Bc; }
    __device__ int rows() const { return seqlen - index * Bc; }
  };

  // Loads the tiles of all query tiles of this CTA. K is one KV tile ahead of V, the order in which
  // consumers need them.
  __device__ void produce() {
    KvTile values = {-1};  // KV tile whose V comes next
    for (unsigned round = 0;; ++round) {
      const WorkTile& next = next_work_tile(round);
      if (next.is_end_of_work()) break;
      if (!next.has_keys()) continue;
      // Load the next queries first if a query stage is free; otherwise after the tiles that the
      // consumers need before they can release one. Causal calls always load keys first: loading
      // queries first is 4% slower there, but 3% faster in other calls (512 keys, head_dim 128).
      bool published =
          !Config::causal && ptx::mbarrier_test_wait(cta.q_empty(q_ring.index), q_ring.phase ^ 1);
      if constexpr (Config::skips_tiles) {
        published = __shfl_sync(~0u, published, 0);
        kv_tiles.enter(cta.p, next);
      }
      if (published) publish_work_tile(next);
      for (int key = next.kv_tiles.end - 1; key >= next.kv_tiles.begin;
           key = Config::skips_tiles ? kv_tiles.next_tile(cta.p, next, key) : key - 1) {
        const Sequence& sequence = next.sequence(cta.p);
        KvTile keys = {key, next.coord.head_kv, sequence.k_batch, sequence.k_first,
                       sequence.seqlen_k};
        if constexpr (Config::page_size > 0) look_up_page(next.coord.batch, keys);
        if constexpr (Config::skips_tiles) publish_kv_tile(kv_tiles.info(next, key), next.coord);
        load_keys(keys);
        if constexpr (Cta::streams_bias) load_bias(next.coord, key);
        if (!Cta::values_in_keys && values.index >= 0) load_values(values);
        if (!published) publish_work_tile(next);
        published = true;
        values = keys;
        if (Config::has_seqlens &&
            key == next.kv_tiles.begin + min(Cta::work_tile_prefetch, next.kv_tile_count() - 1)) {
          if (is_elected()) ptx::mbarrier_arrive(cta.work_tile_empty());
        }
      }
    }
    if constexpr (Config::skips_tiles) publish_end();
    if (!Cta::values_in_keys && values.index >= 0) load_values(values);
    if constexpr (!Config::skips_tiles) publish_work_tile(WorkTile::end_of_work());
    if constexpr (Config::has_seqlens) publish_end_of_tails();
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
    const unsigned barrier = cta.q_full(q_ring.index);
    if (!next.is_end_of_work()) {
      const Sequence& sequence = next.sequence(cta.p);
      if constexpr (Cta::values_in_keys) {
        load_mla<QueryTile>(cta.shared + q_ring.index * Cta::q_stage_bytes, &maps().q,
                            &maps().q_rest, sequence.q_first + next.coord.q_begin, next.coord.head,
                            sequence.q_batch, barrier, ptx::l2_evict_first);
      } else {
        load<QueryTile>(cta.shared + q_ring.index * Cta::q_stage_bytes, &cta.maps.q,
                        sequence.q_first + next.coord.q_begin, next.coord.head, sequence.q_batch,
                        barrier, ptx::l2_evict_first, Cta::cta_rank() * Cta::columns);
      }
    } else if (is_elected()) {
      ptx::mbarrier_arrive(barrier);
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
    const int key = keys.row();
    keys.batch = cta.p.block_table[batch * cta.p.block_table_stride + key / Config::page_size];
    keys.first = key % Config::page_size - key;
  }

  __device__ void load_keys(const KvTile& kv_tile) {
    if constexpr (Cta::values_in_keys) {
      load_mla_keys(kv_tile);
    } else {
      load_kv_tile<KeyTile>(&cta.maps.k, kv_tile, Cta::cta_rank() * Cta::columns);
    }
  }

  // Loads K of MLA, which is also V. Rows past the sequence's end are zeroed, as in `load_tail`.
  __device__ void load_mla_keys(const KvTile& kv_tile) {
    const bool has_tail = Config::has_seqlens && kv_tile.rows() < Bc;
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    if (has_tail) *cta.tail(tail.index) = {ring.index, kv_tile.rows()};
    load_mla<KeyTile>(cta.stage_address(ring.index), &maps().k, &maps().k_rest, kv_tile.row(),
                      kv_tile.head, kv_tile.batch,
                      has_tail ? cta.tail_loaded(tail.index) : cta.full(ring.index),
                      ptx::l2_evict_last);
    ring.advance();
    if (has_tail) tail.advance();
  }

  __device__ const MlaTensorMaps& maps() const {
    return static_cast<const MlaTensorMaps&>(cta.maps);
  }

  // Loads this CTA's half of the first head_dim_v columns, then its half of the other columns.
  template <class Tile>
  __device__ void load_mla(unsigned target, const TensorMap* map, const TensorMap* rest, int row,
                           int head, int batch, unsigned barrier, unsigned long long policy) const {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::bytes);
    copy<typename Tile::First>(target, map, row, head, batch, barrier, policy,
                               Cta::first_column_v());
    copy<typename Tile::Rest>(target + Tile::First::bytes, rest, row, head, batch, barrier, policy,
                              Config::head_dim_v + Cta::cta_rank() * Cta::columns_rest);
  }

  template <class Tile>
  __device__ void copy(unsigned target, const TensorMap* map, int row, int head, int batch,
                       unsigned barrier, unsigned long long policy, int first_column) const {
#pragma unroll
    for (int box = 0; box < Tile::boxes; ++box) {
      ptx::cp_async_bulk_tensor_4d(target + box * Tile::box_bytes, map,
                                   first_column + box * Tile::box_columns, row, head, batch,
                                   barrier, policy);
    }
  }

  template <class Tile>
  __device__ void load_kv_tile(const TensorMap* map, const KvTile& kv_tile, int first_column) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    load<Tile>(cta.stage_address(ring.index), map, kv_tile.row(), kv_tile.head, kv_tile.batch,
               cta.full(ring.index), ptx::l2_evict_last, first_column);
    ring.advance();
  }

  __device__ void load_bias(const TileCoord& coord, int key) {
    ptx::mbarrier_wait(cta.bias_empty(bias_ring.index), bias_ring.phase ^ 1);
    load<typename Cta::BiasTile>(cta.bias_address(bias_ring.index),
                                 &static_cast<const BiasedTensorMaps&>(cta.maps).bias,
                                 coord.q_begin, coord.head, coord.batch,
                                 cta.bias_full(bias_ring.index), ptx::l2_evict_normal, key * Bc);
    bias_ring.advance();
  }

  __device__ void load_values(const KvTile& kv_tile) {
    if (Config::has_seqlens && kv_tile.rows() < Bc) {
      load_tail(kv_tile);
    } else if constexpr (Cta::transposes_values) {
      load_transposed(kv_tile);
    } else {
      load_kv_tile<ValueTile>(&cta.maps.v, kv_tile, Cta::first_column_v());
    }
  }

  // Loads a tile of transposed V, whose columns are keys.
  __device__ void load_transposed(const KvTile& kv_tile) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    load<ValueTile>(cta.stage_address(ring.index), &cta.maps.v, 0, kv_tile.head, kv_tile.batch,
                    cta.full(ring.index), ptx::l2_evict_last, kv_tile.row());
    ring.advance();
  }

  // Loads all component tiles of a tile. The array holds the components consecutively: component c
  // of batch b is at batch index c * p.batch + b.
  template <class Tile>
  __device__ void load(unsigned target, const TensorMap* map, int row, int head, int batch,
                       unsigned barrier, unsigned long long policy, int first_column) const {
    if (!is_elected()) return;
    ptx::mbarrier_arrive_expect_tx(barrier, Cta::components * Tile::bytes);
#pragma unroll
    for (int component = 0; component < Cta::components; ++component) {
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box) {
        ptx::cp_async_bulk_tensor_4d(target + component * Tile::bytes + box * Tile::box_bytes, map,
                                     first_column + box * Tile::box_columns, row, head,
                                     component * cta.p.batch + batch, barrier, policy);
      }
    }
  }

  // Loads V with rows past the end of the sequence. Its stage becomes full when those rows have
  // been zeroed. An entry in the ring of tails is always free, since a tail in use occupies a
  // stage, and there are more entries than stages.
  __device__ void load_tail(const KvTile& kv_tile) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    if (is_elected()) *cta.tail(tail.index) = {ring.index, kv_tile.rows()};
    load<ValueTile>(cta.stage_address(ring.index), &cta.maps.v, kv_tile.row(), kv_tile.head,
                    kv_tile.batch, cta.tail_loaded(tail.index), ptx::l2_evict_last,
                    Cta::first_column_v());
    ring.advance();
    tail.advance();
  }

  __device__ void publish_end_of_tails() const {
    if (!is_elected()) return;
    *cta.tail(tail.index) = {-1, 0};
    ptx::mbarrier_arrive(cta.tail_loaded(tail.index));
  }
};

#endif  // __CUDA_ARCH__ == 900
