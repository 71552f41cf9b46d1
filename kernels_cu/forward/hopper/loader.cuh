// TMA loads of the producer thread of the Hopper kernel: query tiles, and K and V tiles in the
// order in which they take the stages of the ring. `mla_loader.cuh` specializes it for MLA, and
// load_bias() in `bias.cuh` loads the bias.
#pragma once

#include "forward/hopper/cta.cuh"
#include "tile/tma_pipeline.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool IsMla = Config::values_in_keys>
struct HopperLoader {
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;
  using ValueTile = typename Cta::ValueTile;

  // A KV tile of a sequence.
  struct KvTile {
    int index;
    int head;
    int batch;
    int first;   // row of the array with the sequence's first key
    int seqlen;  // number of keys of the sequence

    __device__ int row() const { return first + index * Config::Bc; }
    __device__ int rows() const { return seqlen - index * Config::Bc; }
  };

  const Cta& cta;
  // Positions of the producer in its rings, those of work tiles included: if they were members of
  // `HopperProducer` or in another order, the compiler would allocate other registers to consumers.
  PipelineState<Config::stages> ring = {};
  PipelineState<Config::q_stages> q_ring = {};
  int work_tile_slot = 0;  // index in the ring of work tiles
  PipelineState<1> work_tile_state = {};
  PipelineState<Cta::tails> tail = {};

  // Returns whether this thread is the one that issues copies and arrives at barriers.
  __device__ static bool is_elected() { return !Config::skips_tiles || threadIdx.x == 0; }

  __device__ void load_queries(const WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence(cta.p);
    load<typename Cta::QueryTile>(cta.shared + q_ring.index * Cta::q_stage_bytes, &cta.maps.q,
                                  sequence.q_first + work_tile.coord.q_begin, work_tile.coord.head,
                                  sequence.q_batch, cta.q_full(q_ring.index), ptx::l2_evict_first,
                                  Cta::cta_rank() * Cta::columns);
  }

  __device__ void load_keys(const KvTile& kv_tile) {
    load_kv_tile<typename Cta::KeyTile>(&cta.maps.k, kv_tile, Cta::cta_rank() * Cta::columns);
  }

  __device__ void load_values(const KvTile& kv_tile) {
    if (Config::has_seqlens && kv_tile.rows() < Config::Bc) {
      load_tail(kv_tile);
    } else if constexpr (Cta::transposes_values) {
      load_transposed(kv_tile);
    } else {
      load_kv_tile<ValueTile>(&cta.maps.v, kv_tile, Cta::first_column_v());
    }
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
      load_boxes<Tile>(target + component * Tile::bytes, map, first_column, row, head,
                       component * cta.p.batch + batch, barrier, policy);
    }
  }

  __device__ void publish_end_of_tails() const {
    if (!is_elected()) return;
    *cta.tail(tail.index) = {-1, 0};
    ptx::mbarrier_arrive(cta.tail_loaded(tail.index));
  }

 protected:
  template <class Tile>
  __device__ void load_kv_tile(const TensorMap* map, const KvTile& kv_tile, int first_column) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    load<Tile>(cta.stage_address(ring.index), map, kv_tile.row(), kv_tile.head, kv_tile.batch,
               cta.full(ring.index), ptx::l2_evict_last, first_column);
    ring.advance();
  }

  // Loads a tile of transposed V, whose columns are keys.
  __device__ void load_transposed(const KvTile& kv_tile) {
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    load<ValueTile>(cta.stage_address(ring.index), &cta.maps.v, 0, kv_tile.head, kv_tile.batch,
                    cta.full(ring.index), ptx::l2_evict_last, kv_tile.row());
    ring.advance();
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
};

#endif  // __CUDA_ARCH__ == 900
