// KV tiles of a CTA of the Hopper gradient kernel: one or, with `Config::fetches_kv_tiles`, as many
// as it fetches.
//
// A CTA takes about as long to start and to end as for one query tile. If a KV tile has few query
// tiles, each CTA therefore processes many KV tiles. The loader fetches their numbers in advance,
// and loads the next k, v, q and dout while the consumers write dk and dv:
//
//   loader                              row statistics warp, adders, consumers
//   ---------------------------------   --------------------------------------
//   increments the counter in memory
//   stores its number of a KV tile
//   arrives  ------ fetched_full ---->  read the number
//   loads the tiles                     arrive at fetched_empty
//   waits  <------- fetched_empty ----
//
//   waits  <---------- kv_empty ------  consumers have written dk and dv
//   loads the next k and v
//
// No CTAs wait for each other forever (dq/semaphore.cuh): the numbers are those that `blockIdx.x`
// would otherwise have, and a CTA processes its KV tiles in order. The CTA that has fetched the
// first of all unfinished KV tiles is processing it, and waits for no other CTA.
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
  PipelineState<Cta::fetched_stages> fetched_ring = {};

  // Calls `run` for each KV tile. All lanes of a warp call this function (`WholeWarp`), or one.
  template <bool WholeWarp, class Run>
  __device__ void for_each(Run run) {
    if constexpr (!Cta::fetches_kv_tiles) {
      run();
    } else {
      for (;;) {
        const int stage = fetched_ring.index;
        ptx::mbarrier_wait(cta.fetched_full(stage), fetched_ring.phase);
        const ListedKvTile tile = *cta.fetched(stage);
        if constexpr (WholeWarp) {
          arrive_warp(cta.fetched_empty(stage));
        } else {
          ptx::mbarrier_arrive(cta.fetched_empty(stage));
        }
        fetched_ring.advance();
        if (!begin(tile)) return;
        run();
        kv_ring.advance();
      }
    }
  }

  // Fetches KV tiles until none is left, and calls `run` for each. One lane of a CTA calls this
  // function.
  template <class Run>
  __device__ void fetch_each(Run run) {
    if constexpr (!Cta::fetches_kv_tiles) {
      run();
    } else {
      const KvTileList<Config> list(cta.p);
      ListedKvTile tile = list.tile(list.fetch());
      for (;;) {
        const int stage = fetched_ring.index;
        ptx::mbarrier_wait(cta.fetched_empty(stage), fetched_ring.phase ^ 1);
        *cta.fetched(stage) = tile;
        ptx::mbarrier_arrive(cta.fetched_full(stage));
        fetched_ring.advance();
        if (!begin(tile)) return;
        // The number arrives while `run` waits for stages of q.
        const int next = list.fetch();
        run();
        tile = list.tile(next);
        kv_ring.advance();
      }
    }
  }

 private:
  // Begins a KV tile. Returns false if there is no such tile.
  __device__ bool begin(const ListedKvTile& tile) {
    if (tile.begin < 0) return false;
    block_info = BlockInfo(cta.p, tile.coord(), sequence_of<Config>(cta.p, tile.batch));
    block_info.first_head = tile.first_head;
    return true;
  }
};

#endif  // __CUDA_ARCH__ == 900
