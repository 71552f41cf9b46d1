// How the blocks of a cluster merge an item that several of them have parts of.
//
// Blocks take the keys in order, so that A, with the item's first part, has it as the last of its
// share, and B, C, ... have theirs as the first. They send their results to A, which merges. The
// barrier of a block is for the one item that it may merge: it completes one phase, number 0.
//
//   A                                  B, C, ...
//   --------------------------------   -----------------------------------
//   init the barrier: 1 arrival        init the barrier: 1 arrival           announce()
//   cluster_arrive                     cluster_arrive
//         |                                  |
//   all of its share                   their parts of the item
//         |                                  |
//   cluster_wait  <--- all barriers are there --->  cluster_wait             meet()
//         |                                  |
//   its result to kept place 0         their results to A's kept places      send()
//         |                 <--- bytes ---   1, 2, ..., st_async counts
//         |                                  the bytes on A's barrier
//   arrive, and expect their bytes           |
//         |                            what else they have: they wait
//   wait for phase 0                   for nobody
//         |
//   merge kept places 0, 1, 2, ...                                           wait_for_sent()
//
// Bytes may be there before A expects them: the phase cannot end without A's arrival. What A sends
// others of an item before, of which it has the last part, goes the same way. A block stays until
// all bytes for it have come, and needs nothing of others after it has sent.
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
      const int bytes = block.tile_rows() * (Block::columns / 4 + 1) * 16;
      ptx::mbarrier_arrive_expect_tx(Block::results_barrier(), (block.part.count - 1) * bytes);
    }
    ptx::mbarrier_wait_for_cluster(Block::results_barrier(), 0);
  }
};

#endif  // __CUDA_ARCH__ >= 800
