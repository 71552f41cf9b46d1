// Fused attention forward for float16, bfloat16 and float32 on Hopper (sm_90a): FlashAttention-3
// (Shah et al. 2024) with the blocks of all query tiles in one stream.
//
// One warpgroup is the producer, of which one thread loads; one to three others are the consumers,
// which multiply.
//
// Sequences that are packed or in a cache are the same stream. A second warp beside the producer
// then finds their query tiles, a third clears the rows after their last values, and a fourth
// clears the rows of the output that belong to no sequence. A kernel of its own splits float32 into
// pieces, and another transposes the values of float8.
#pragma once

#include "forward/hopper/consumer.cuh"
#include "forward/hopper/cta.cuh"
#include "forward/hopper/float8_consumer.cuh"
#include "forward/hopper/helpers.cuh"
#include "forward/hopper/pieces.cuh"
#include "forward/hopper/producer.cuh"
#include "forward/hopper/values.cuh"
#include "grid/order.cuh"
#include "grid/unowned_rows.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

// One thread block, before the others start: in what order the sequences come.
template <class Config>
__device__ void hopper_prepare(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  HopperCta<Config>::order_of(params).template make<Config::Br, SequenceOrder::WholeBlock>(
      params, reinterpret_cast<int*>(shared_memory));
}

// Called by one warp of each thread block, in kernels where `Ranks` thread blocks split the columns
// of a query tile. A spare warp of the producer warpgroup runs this next to the consumers. In pairs
// of thread blocks that makes consumers spill, so a consumer warp runs it at its end.
template <class Config, int Ranks>
__device__ void clear_unowned_rows(const Params& params) {
  using Cta = HopperCta<Config>;
  if constexpr (Config::sequences && !Config::split_keys && Cta::ranks == Ranks) {
    UnownedRows<Config>{params}.clear_all(ptx::block_index() * Ranks + Cta::rank(),
                                          gridDim.x * Ranks);
  }
}

template <class Config>
__device__ void hopper_forward(const TensorMaps& maps, const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  // By a shuffle, so that the compiler knows a warp is of one mind.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const HopperCta<Config> cta = {params, maps, ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    cta.init_barriers();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
  }
  if constexpr (HopperCta<Config>::ranks > 1) {
    // Nothing may be sent to a block whose barriers are not there yet.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if constexpr (HopperCta<Config>::makes_order) cta.make_order();
    if (HopperProducer<Config>::is_one()) HopperProducer<Config>{cta}.produce();
    if constexpr (Config::sequences) {
      if (threadIdx.x / 32 == 1) HopperFinder<Config>{cta}.find_visits();
      if (threadIdx.x / 32 == 2) HopperTailClearer<Config>{cta}.clear_tails();
      if (threadIdx.x / 32 == 3) clear_unowned_rows<Config, 1>(params);
    } else {
      constexpr bool may_see_nothing = Config::causal || Config::split_keys || Config::modified;
      if (may_see_nothing && threadIdx.x / 32 == 1) {
        HopperFinder<Config> finder{cta};
        finder.write_unseeing_tiles();
        if (cta.helper_sets_rows()) finder.set_rows_of_few_keys();
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    HopperConsumer<Config>(cta, warpgroup - 1).consume();
    if (cta.helper_sets_rows()) cta.consumers_have_written();
    if (threadIdx.x / 32 == 4) clear_unowned_rows<Config, 2>(params);
  }
}

#endif  // __CUDA_ARCH__ == 900
