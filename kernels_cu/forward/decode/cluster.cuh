// Merging of partial results within a cluster whose CTAs have partial tiles of one query tile.
//
// CTAs take keys in order. CTA A has the first partial tile of the query tile as the last of its
// work range. CTAs B, C, ... have theirs as the first of their ranges. They send their results to
// A, which merges. A query tile is spread if all CTAs of the cluster have a partial tile of it,
// each as the last of its range. Then every CTA merges one slice of the columns (columns.cuh) and
// receives only that slice. To receive 16 rows from seven CTAs would take one CTA a microsecond.
//
//   a CTA that merges              its mbarrier             the other CTAs of the query tile
//   ---------------------------    ---------------------    ----------------------------------
//   init its mbarrier          --> phase 0: 1 arrival       init their own mbarriers   announce()
//   cluster_arrive                                          cluster_arrive
//   issue loads of first keys
//   arrive, expect the bytes   --> 1 arrival, all bytes                             expect_sent()
//   compute its partial tile                                compute their partial tiles
//   cluster_wait  <----------- all mbarriers are initialized -------->  cluster_wait       meet()
//   store own result in buffer
//                                  bytes are counted    <-- st_async results to the
//                                                           buffers of the merging CTA     send()
//   wait for phase 0           <-- phase 0 ends                                   wait_for_sent()
//   merge buffers 0, 1, ...
//
// Bytes may arrive before they are expected: the phase does not end without the CTA's own arrival.
// A CTA merges at most one query tile, that of its last partial tile, so the mbarrier has one
// phase. It may have sent the result of its first partial tile to another CTA before. A CTA that
// merges nothing may exit early; a CTA that merges stays until all bytes have arrived.
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

  // Initializes the mbarrier of this CTA, so that other CTAs may send to it. An otherwise idle warp
  // does so and arrives with release semantics.
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

  // Waits until all mbarriers of the cluster are initialized. Only the first call waits.
  __device__ void meet() {
    if (!has_met) ptx::cluster_wait();
    has_met = true;
  }

  // Sends a chunk of a row of the partial result to the CTA that merges it. The first chunk of a
  // slice comes with the state of the row.
  __device__ void send(const PartialTile& partial_tile, int row, int chunk, const Vector<float, 4>& values,
                       const Vector<float, 4>& state) const {
    const Columns columns = Columns::of_chunk(partial_tile, chunk);
    const int in_record = chunk - columns.first_chunk();
    float* kept = Block::kept_results() + partial_tile.index * Block::kept_floats + row * columns.record();
    send_to(partial_tile, columns.piece, kept + 4 * in_record, values);
    if (in_record == 0) send_to(partial_tile, columns.piece, kept + columns.state(), state);
  }

  // Returns whether this CTA merges columns of the current query tile.
  __device__ bool is_merged_here() const {
    const PartialTile& partial_tile = block.partial_tile;
    return partial_tile.count > 1 && (partial_tile.index == 0 || partial_tile.is_sliced) &&
           Columns::of_block(partial_tile, partial_tile.index).chunks_there() > 0;
  }

  // Arrives at the mbarrier with the number of bytes to expect, while keys are being loaded.
  __device__ void expect_sent() const {
    if (!is_merged_here()) return;
    const PartialTile& partial_tile = block.partial_tile;
    const int chunks = Columns::of_block(partial_tile, partial_tile.index).chunks_there();
    const int bytes = block.tile_rows() * (chunks + 1) * 16;
    ptx::mbarrier_arrive_expect_tx(Block::results_barrier(), (partial_tile.count - 1) * bytes);
  }
  // Waits until the results of the other CTAs have arrived.
  __device__ void wait_for_sent() const {
    ptx::mbarrier_wait_for_cluster(Block::results_barrier(), 0);
  }

 private:
  // Sends `values` to the CTA with partial tile `number` of the query tile, at the same address.
  __device__ static void send_to(const PartialTile& partial_tile, int number, float* kept,
                                 const Vector<float, 4>& values) {
    if (number == partial_tile.index) {
      *reinterpret_cast<Vector<float, 4>*>(kept) = values;
    } else {
      const int place = partial_tile.first_cta_rank + number;
      ptx::st_async(ptx::map_to_block(ptx::shared_address(kept), place), values.at,
                    ptx::map_to_block(Block::results_barrier(), place));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
