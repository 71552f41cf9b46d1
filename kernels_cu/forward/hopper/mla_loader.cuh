// TMA loads for MLA, where V is a prefix of K's columns: each tile of Q or K is loaded in two
// parts, which are this CTA's half of the first head_dim_v columns and of the other columns.
#pragma once

#include "forward/hopper/loader.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperLoader<Config, true> : HopperLoader<Config, false> {
  using Base = HopperLoader<Config, false>;
  using Cta = typename Base::Cta;
  using Base::cta, Base::ring, Base::q_ring, Base::tail;

  __device__ void load_queries(const typename Base::WorkTile& work_tile) const {
    const Sequence& sequence = work_tile.sequence(cta.p);
    load<typename Cta::QueryTile>(cta.shared + q_ring.index * Cta::q_stage_bytes, &maps().q,
                                  &maps().q_rest, sequence.q_first + work_tile.coord.q_begin,
                                  work_tile.coord.head, sequence.q_batch, cta.q_full(q_ring.index),
                                  ptx::l2_evict_first);
  }

  // Rows past the end of the sequence are zeroed as for V, see `load_tail`.
  __device__ void load_keys(const typename Base::KvTile& kv_tile) {
    const bool has_tail = Config::has_seqlens && kv_tile.rows() < Config::Bc;
    ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
    if (has_tail) *cta.tail(tail.index) = {ring.index, kv_tile.rows()};
    load<typename Cta::KeyTile>(cta.stage_address(ring.index), &maps().k, &maps().k_rest,
                                kv_tile.row(), kv_tile.head, kv_tile.batch,
                                has_tail ? cta.tail_loaded(tail.index) : cta.full(ring.index),
                                ptx::l2_evict_last);
    ring.advance();
    if (has_tail) tail.advance();
  }

 private:
  __device__ const MlaTensorMaps& maps() const {
    return static_cast<const MlaTensorMaps&>(cta.maps);
  }

  template <class Tile>
  __device__ void load(unsigned target, const TensorMap* map, const TensorMap* rest, int row,
                       int head, int batch, unsigned barrier, unsigned long long policy) const {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::bytes);
    load_boxes<typename Tile::First>(target, map, Cta::first_column_v(), row, head, batch, barrier,
                                     policy);
    load_boxes<typename Tile::Rest>(target + Tile::First::bytes, rest,
                                    Config::head_dim_v + Cta::cta_rank() * Cta::columns_rest, row,
                                    head, batch, barrier, policy);
  }
};

#endif  // __CUDA_ARCH__ == 900
