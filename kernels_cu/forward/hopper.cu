// Fused attention forward on Hopper (sm_90a) for float16, bfloat16, float32 and float8:
// FlashAttention-3 (Shah et al. 2024), with one software pipeline over all query tiles of a CTA.
//
// One thread of the producer warpgroup issues the TMA loads. One to three consumer warpgroups
// compute the matrix products and the softmax.
//
// Variable-length batches (packed sequences and KV caches) use the same pipeline and all warps of
// the producer warpgroup. Warp 1 fetches work tiles, warp 2 zeroes rows of V past the end of a
// sequence, and warp 3 (warp 4 in CTA pairs) clears output rows that belong to no sequence. In
// dense batches, warp 1 only sets output rows that attend to no key or, in float32, to at most one.
// Separate kernels split float32 into components and transpose V of float8.
#pragma once

#include "forward/hopper/consumer.cuh"
#include "forward/hopper/cta.cuh"
#include "forward/hopper/float8/consumer.cuh"
#include "forward/hopper/scheduler.cuh"
#include "forward/hopper/float32_bf16x3.cuh"
#include "forward/hopper/producer.cuh"
#include "forward/hopper/float8/transpose_values.cuh"
#include "scheduler/varlen_order.cuh"
#include "scheduler/unowned_rows.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

// Sorts the sequences for the tile scheduler. Runs as one CTA before the attention kernel.
template <class Config>
__device__ void hopper_prepare(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  HopperCta<Config>::order_of(params).template build<Config::Br, VarlenOrder::CtaThreads>(
      params, reinterpret_cast<int*>(shared_memory));
}

// Clears output rows that belong to no sequence. Called by one warp of each CTA; does nothing
// unless `CtaRanks` CTAs split head_dim. If one CTA has the whole head_dim, an idle warp of the
// producer warpgroup calls this while the consumers work. In CTA pairs, that would make consumers
// spill registers, so a consumer warp calls this when its other work is done.
template <class Config, int CtaRanks>
__device__ void clear_unowned_rows(const Params& params) {
  using Cta = HopperCta<Config>;
  if constexpr (Config::has_seqlens && !Config::split_keys && Cta::cta_ranks == CtaRanks) {
    UnownedRows<Config>{params}.clear_all(ptx::cta_index() * CtaRanks + Cta::cta_rank(),
                                          gridDim.x * CtaRanks);
  }
}

template <class Config>
__device__ void hopper_forward(const TensorMaps& maps, const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  // The shuffle tells the compiler that the value is uniform within a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const HopperCta<Config> cta = {params, maps, ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    cta.init_barriers();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
  }
  if constexpr (HopperCta<Config>::cta_ranks > 1) {
    // Nothing may be sent to a CTA before its barriers are initialized.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if constexpr (HopperCta<Config>::builds_order) cta.build_order();
    if (HopperProducer<Config>::is_producer_thread()) HopperProducer<Config>{cta}.produce();
    if constexpr (Config::has_seqlens) {
      if (threadIdx.x / 32 == 1) HopperScheduler<Config>{cta}.schedule_tiles();
      if (threadIdx.x / 32 == 2) HopperTailClearer<Config>{cta}.clear_tails();
      if (threadIdx.x / 32 == 3) clear_unowned_rows<Config, 1>(params);
    } else {
      constexpr bool may_be_fully_masked = Config::causal || Config::split_keys || Config::modified;
      if (may_be_fully_masked && threadIdx.x / 32 == 1) {
        HopperScheduler<Config> scheduler{cta};
        scheduler.write_masked_tiles();
        if (cta.scheduler_writes_rows()) scheduler.overwrite_degenerate_rows();
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    HopperConsumer<Config>(cta, warpgroup - 1).consume();
    if (cta.scheduler_writes_rows()) HopperCta<Config>::consumers_done.arrive();
    if (threadIdx.x / 32 == 4) clear_unowned_rows<Config, 2>(params);
  }
}

#endif  // __CUDA_ARCH__ == 900
