// How the blocks of a cluster merge an item that several of them have parts of.
//
// Blocks take the keys in order: A, with the item's first part, has it as the last of its share,
// and B, C, ... have theirs as the first of their own. They send their results to A, which merges.
// An item that all blocks have parts of, each as the last of its share, is spread: every block
// merges a piece of the columns (columns.cuh) and is sent that. Into one block alone, what seven
// others have of 16 rows takes a microsecond.
//
//   a block that merges            its barrier              the others with parts of the item
//   ---------------------------    ---------------------    ----------------------------------
//   init its barrier           --> phase 0: 1 arrival       init their own barriers    announce()
//   cluster_arrive                                          cluster_arrive
//   ask for the first keys
//   arrive, expect the bytes   --> 1 arrival, all bytes                             expect_sent()
//   attend to its part                                      attend to their part
//   cluster_wait  <------------- all barriers are there ------------->  cluster_wait       meet()
//   own result to its kept place
//                                  bytes are counted    <-- st_async results to their
//                                                           kept places                    send()
//   wait for phase 0           <-- phase 0 ends                                   wait_for_sent()
//   merge kept places 0, 1, ...
//
// Bytes may come before they are expected: the phase does not end without the block's arrival. A
// block merges columns of one item at most, that of its last part, so a barrier has no second
// phase; and it may have sent for another, of its first part, before. Who merges none may end; who
// does stays until all bytes are there.
#pragma once

#include "forward/decode/block.cuh"
#include "forward/decode/columns.cuh"
#include "ptx/cluster.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeCluster {
  using Block = DecodeBlock<Config>;
  using Columns = MergedColumns<Config>;

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

  // A chunk of a row of the part's result, to the block that merges it, and with the first of its
  // chunks the row's state.
  __device__ void send(const Part& part, int row, int chunk, const Vector<float, 4>& values,
                       const Vector<float, 4>& state) const {
    const Columns columns = Columns::of_chunk(part, chunk);
    const int in_record = chunk - columns.first_chunk();
    float* kept = Block::kept_results() + part.number * Block::kept_floats + row * columns.record();
    send_to(part, columns.piece, kept + 4 * in_record, values);
    if (in_record == 0) send_to(part, columns.piece, kept + columns.state(), state);
  }

  // Whether the part is the block's last, and of an item of which it merges columns.
  __device__ bool is_merged_here() const {
    const Part& part = block.part;
    return part.count > 1 && (part.number == 0 || part.is_spread) &&
           Columns::of_block(part, part.number).chunks_there() > 0;
  }

  // One thread says what is to come, while keys are.
  __device__ void expect_sent() const {
    if (!is_merged_here()) return;
    const Part& part = block.part;
    const int chunks = Columns::of_block(part, part.number).chunks_there();
    const int bytes = block.tile_rows() * (chunks + 1) * 16;
    ptx::mbarrier_arrive_expect_tx(Block::results_barrier(), (part.count - 1) * bytes);
  }
  // It is there on return.
  __device__ void wait_for_sent() const {
    ptx::mbarrier_wait_for_cluster(Block::results_barrier(), 0);
  }

 private:
  // To the block that has part `number` of the item, at the same address.
  __device__ static void send_to(const Part& part, int number, float* kept,
                                 const Vector<float, 4>& values) {
    if (number == part.number) {
      *reinterpret_cast<Vector<float, 4>*>(kept) = values;
    } else {
      const int place = part.place + number;
      ptx::st_async(ptx::map_to_block(ptx::shared_address(kept), place), values.at,
                    ptx::map_to_block(Block::results_barrier(), place));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
