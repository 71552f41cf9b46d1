// Gradients of attention for float16 and bfloat16 on Hopper (sm_90a): five products in one pass.
//
// As in mma.cu, a CTA owns a KV tile, whose dk and dv it keeps in registers, and iterates over the
// query tiles of all query heads. If these are few, it then continues with other KV tiles
// (hopper/kv_tiles.cuh). The CTAs of a head add their dq of a query tile in a fixed order
// (dq/semaphore.cuh). Here query tiles go from the first to the last, and CTAs of later keys add
// first. With a causal mask, the last section of heads has the opposite order (dq/order.cuh).
// Either the last CTA of that order writes dq (`last_writes`), or another kernel does.
//
// Two consumer warpgroups issue wgmma: each has half of the keys (hopper/consumer.cuh) or, for wide
// heads, half of the products (hopper/split_consumers.cuh). Warps of the producer warpgroup load
// tiles and add dq (hopper/producer_warps.cuh). For wide heads, two CTAs may form a cluster, which
// counts as one CTA in the dq order (hopper/cta.cuh).
#include "backward/hopper/consumer.cuh"
#include "backward/hopper/kv_tiles.cuh"
#include "backward/hopper/listed_tiles.cuh"
#include "backward/hopper/producer_warps.cuh"
#include "backward/hopper/split_consumers.cuh"
#include "backward/params.cuh"
#include "backward/dq/accumulate.cuh"
#include "backward/preprocess/preprocess.cuh"
#include "backward/tile_coord.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
__device__ void hopper_gradients(const GradientMaps& maps, const GradientParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const GradientTileCoord coord =
      gradient_tile_coord<Config, Config::pair * Config::Bc, true, true>(p, blockIdx.x);
  const Sequence sequence = sequence_of_kv_block<Config>(p, blockIdx.x, coord.batch);
  if (coord.begin >= sequence.seqlen_k) return;
  using Cta = HopperCta<Config>;
  using BlockInfo = HopperGradientBlockInfo<Config>;
  BlockInfo local_info(p, coord, sequence);
  typename Cta::KvRing kv_ring;
  BlockInfo* const shared_info =
      reinterpret_cast<BlockInfo*>(shared_memory + Cta::block_info_offset);
  const Cta cta(p, maps, ptx::shared_address(shared_memory),
                BlockInfo::is_shared ? *shared_info : local_info, kv_ring);
  HopperKvTiles<Config> kv_tiles = {cta, local_info, kv_ring};
  if (threadIdx.x == 0) {
    if (BlockInfo::is_shared) *shared_info = local_info;
    cta.init_barriers();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
    ptx::prefetch_tensormap(&maps.dout);
    if constexpr (Cta::streams_bias) {
      ptx::prefetch_tensormap(&static_cast<const BiasGradientMaps&>(maps).bias);
    }
  }
  // A CTA must not send anything to its peer CTA before the peer has initialized its barriers.
  sync_start<Cta::ranks>();
  // The shuffle tells the compiler that `warp` is uniform within a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if (!cta.has_steps()) return;
    const bool is_first = threadIdx.x % 32 == 0;
    if (warp == 0 && is_first) kv_tiles.fetch_each(HopperGradientLoader<Config>{cta});
    if (warp == 1) kv_tiles.template for_each<true>(HopperRowStatsLoader<Config>{cta});
    if constexpr (Config::wants_q) {
      if (warp >= 2 && is_first) {
        if constexpr (Cta::buffers_dq) {
          kv_tiles.template for_each<false>(HopperGradientAdder<Config>{cta, warp - 2});
        } else {
          HopperSemaphoreWarp<Config>{cta, warp - 2}.run();
        }
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    if constexpr (!Config::wide) {
      if constexpr (Cta::dq_columns(0) == Cta::dq_columns(1)) {
        using Consumer = HopperGradientConsumer<Config, Cta::dq_columns(0)>;
        kv_tiles.template for_each<true>(Consumer(cta, warp / 4 - 1));
      } else if (warp / 4 == 1) {
        using Consumer = HopperGradientConsumer<Config, Cta::dq_columns(0)>;
        kv_tiles.template for_each<true>(Consumer(cta, 0));
      } else {
        using Consumer = HopperGradientConsumer<Config, Cta::dq_columns(1)>;
        kv_tiles.template for_each<true>(Consumer(cta, 1));
      }
    } else if (warp / 4 == 1) {
      HopperValueConsumer<Config>(cta, 0).run();
    } else {
      HopperKeyConsumer<Config>(cta, 1).run();
    }
  }
  // No CTA may exit while a copy of dS is in flight, so the CTAs of a pair wait for each other.
  // Warps that exchange scores need no wait here, because each waits for its peer warp.
  if constexpr (Cta::exchanges_ds) wait_for_cluster<Cta::ranks>();
}

// Kernel that writes dq if the consumers of the main kernel do not.
template <class Config>
__device__ void hopper_query_gradients(const GradientParams& p) {
  using Tile = DqTile<Config, TileFragments<HopperGradientCta<Config>>>;
  __shared__ typename Tile::Shared shared;
  Tile::write(p, shared);
}

#endif  // __CUDA_ARCH__ == 900
