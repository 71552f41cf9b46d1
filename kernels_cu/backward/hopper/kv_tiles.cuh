// KV tiles of a CTA of the Hopper gradient kernel. A CTA has one KV tile or, with
// `Config::fetches_kv_tiles`, fetches one after another.
//
// A CTA takes about as long to start and to end as for one query tile. If a KV tile has few query
// tiles, each CTA therefore processes many KV tiles. The loader fetches them in advance, and loads
// the next k, v, q and dout while the consumers write dk and dv:
//
//   loader                                       row statistics warp, adders, consumers
//   ------------------------------------------   --------------------------------------
//   increments the counter in memory
//   waits until the place is free  <-----------  have read the last but one KV tile
//     (fetched_empty)
//   stores the KV tile of that number
//   arrives at fetched_full  ----------------->  read it, arrive at fetched_empty
//   waits until the stage is free  <-----------  consumers have written the dk and dv of the
//     (kv_empty)                                   last but one KV tile
//   loads k and v
//   loads q and dout as stages become free       process the KV tile
//
// No CTAs wait for each other forever (dq/semaphore.cuh). The order of the list is that of
// `blockIdx.x` if each KV tile has a CTA, and a CTA processes its KV tiles in this order. So the
// CTA that has fetched the first of all unfinished KV tiles is processing it, and waits for no
// other CTA. The first KV tile of a CTA is fetched, too: a CTA that does not run yet must own none.
#pragma once

#include "backward/hopper/listed_tiles.cuh"
#include "backward/kv_tile_list.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperKvTiles {
  using Cta = HopperCta<Config>;
  using BlockInfo = HopperGradientBlockInfo<Config>;

  const Cta& cta;
  BlockInfo& block_info;  // of the current KV tile
  typename Cta::KvRing& kv_ring;

  // Calls `role.run()` for each KV tile. All lanes of a warp call this function (`WholeWarp`), or
  // one.
  template <bool WholeWarp, class Role>
  __device__ void for_each(Role&& role) {
    if constexpr (!Cta::fetches_kv_tiles) {
      role.run();
    } else {
      for (;;) {
        ptx::mbarrier_wait(cta.fetched_full(), kv_ring.phase);
        const ListedKvTile tile = *cta.fetched();
        if constexpr (WholeWarp) {
          arrive_warp(cta.fetched_empty());
        } else {
          ptx::mbarrier_arrive(cta.fetched_empty());
        }
        if (!begin(tile)) return;
        role.run();
        kv_ring.advance();
      }
    }
  }

  // Fetches KV tiles until none is left, and calls `role.run()` for each. One lane of a CTA calls
  // this function.
  template <class Role>
  __device__ void fetch_each(Role&& role) {
    if constexpr (!Cta::fetches_kv_tiles) {
      role.run();
    } else {
      const KvTileList<Config> list(cta.p);
      for (;;) {
        const ListedKvTile tile = list.fetch();
        ptx::mbarrier_wait(cta.fetched_empty(), kv_ring.phase ^ 1);
        *cta.fetched() = tile;
        ptx::mbarrier_arrive(cta.fetched_full());
        if (!begin(tile)) return;
        role.run();
        kv_ring.advance();
      }
    }
  }

 private:
  // Begins a KV tile. Returns false if there is no such tile. Members that are equal for all KV
  // tiles are not written, because producer warps have few registers: they would spill 220 instead
  // of 28 bytes.
  __device__ bool begin(const ListedKvTile& tile) {
    if (tile.begin < 0) return false;
    block_info.coord.begin = block_info.order.begin = tile.begin;
    block_info.coord.batch = block_info.sequence.q_batch = block_info.sequence.k_batch = tile.batch;
    block_info.coord.head = tile.head;
    block_info.first_head = tile.first_head;
    return true;
  }
};

#endif  // __CUDA_ARCH__ == 900
