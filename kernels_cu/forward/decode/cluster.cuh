// How the blocks of a cluster merge an item that several of them have parts of.
//
// Blocks take the keys in order: A, with the item's first part, has it as the last of its share,
// and B, C, ... have theirs as the first of their own. They send their results to A, which merges.
//
//   A (part number 0)              A's barrier              B, C, ... (part numbers 1, 2, ...)
//   ---------------------------    ---------------------    ----------------------------------
//   init its barrier           --> phase 0: 1 arrival       init their own barriers    announce()
//   cluster_arrive                                          cluster_arrive
//   attend to its share                                     attend to their part
//   cluster_wait  <------------- all barriers are there ------------->  cluster_wait       meet()
//   result to kept place 0
//                                  bytes are counted    <-- st_async results to A's kept
//                                                           places 1, 2, ...               send()
//   arrive, expect the bytes   --> 1 arrival, all bytes     go on, and wait for nobody
//   wait for phase 0           <-- phase 0 ends                                   wait_for_sent()
//   merge kept places 0, 1, ...
//
// Bytes may come before they are expected: the phase does not end without A's arrival. Every block
// may be A for one item, of its last part, so a barrier has no second phase; and it may have sent
// for another, of its first part, before. Who has sent may end; A stays until all bytes are there.
#pragma once

#include "forward/decode/block.cuh"
#include "ptx/cluster.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeCluster {
  using Block = DecodeBlock<Config>;

  const Block& block;
  bool has_met = !Block::in_cluster;

  // Nothing may be sent to a block of the cluster before its barrier is there: one warp that has
  // nothing else to do makes it and says so.
  __device__ void announce() const {
    if (block.warp != Config::warps - 1) {
      ptx::cluster_arrive_relaxed();
      return;
    }
    if (block.lane == 0) {
      ptx::mbarrier_init(Block::results_barrier(), 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
  }

  // Once, as soon as there is something to wait for anyway.
  __device__ void meet() {
    if (!has_met) ptx::cluster_wait();
    has_met = true;
  }

  // Four floats of the part's result, to the block that has the first part.
  __device__ void send(int index, const Vector<float, 4>& values) const {
    const Part& part = block.part;
    float* kept = Block::kept_results() + part.number * Block::kept_floats + index;
    if (part.number == 0) {
      *reinterpret_cast<Vector<float, 4>*>(kept) = values;
    } else {
      ptx::st_async(ptx::map_to_block(ptx::shared_address(kept), part.place), values.at,
                    ptx::map_to_block(Block::results_barrier(), part.place));
    }
  }

  // The part is the first of its item, and the others' results are there on return.
  __device__ void wait_for_sent() const {
    if (threadIdx.x == 0) {
      const int bytes = block.tile_rows() * (Block::output_chunks + 1) * 16;
      ptx::mbarrier_arrive_expect_tx(Block::results_barrier(), (block.part.count - 1) * bytes);
    }
    ptx::mbarrier_wait_for_cluster(Block::results_barrier(), 0);
  }
};

#endif  // __CUDA_ARCH__ >= 800
