// Merging of partial results within a cluster whose CTAs have partial tiles of one query tile.
//
// Consecutive CTAs have consecutive ranges of keys. The first partial tile of a query tile is the
// last one in the work range of a CTA A. The other partial tiles are the first ones in the work
// ranges of CTAs B, C, ..., which send their results to A, and A merges. A query tile is sliced if
// all CTAs of the cluster have a partial tile of it, each as the last one of its range. Then every
// CTA merges one slice of the columns (merge_slice.cuh) and receives only that slice: one CTA alone
// would take a microsecond to receive 16 rows from seven CTAs.
//
//   a CTA that merges              its mbarrier             the other CTAs of the query tile
//   ---------------------------    ---------------------    ----------------------------------
//   init_receive_barrier()     --> phase 0: 1 arrival       init_receive_barrier()
//     cluster_arrive                                          cluster_arrive
//   issue loads of first keys
//   expect_results()           --> 1 arrival, all bytes
//   compute its partial tile                                compute their partial tiles
//   sync_cluster()  <---------- all mbarriers are initialized ------->  sync_cluster()
//   store own result in buffer
//                                  bytes are counted    <-- send() results with st_async to
//                                                           the buffers of the merging CTA
//   wait_results()             <-- phase 0 ends
//   merge buffers 0, 1, ...
//
// Bytes may arrive before expect_results(): the phase does not end before the merging CTA arrives.
// A CTA merges at most one query tile, that of its last partial tile, so the mbarrier has one
// phase. Before, the CTA may have sent the result of its first partial tile to another CTA. A CTA
// that merges nothing may exit early; a CTA that merges stays until all bytes have arrived.
#pragma once

#include "forward/decode/cta.cuh"
#include "forward/decode/merge_slice.cuh"
#include "ptx/cluster.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeCluster {
  using Cta = DecodeCta<Config>;
  using Slice = MergeSlice<Config>;

  const Cta& cta;
  bool has_synced = !Cta::in_cluster;

  // Initializes the mbarrier of this CTA, so that other CTAs may send to it. An otherwise idle warp
  // does so and arrives with release semantics.
  __device__ void init_receive_barrier() const {
    if (cta.warp != Config::warps - 1) {
      ptx::cluster_arrive_relaxed();
      return;
    }
    if (cta.lane == 0) {
      ptx::mbarrier_init(Cta::results_barrier(), 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
  }

  // Waits until all mbarriers of the cluster are initialized. Only the first call waits.
  __device__ void sync_cluster() {
    if (!has_synced) ptx::cluster_wait();
    has_synced = true;
  }

  // Sends a chunk of a row of the partial result to the CTA that merges it, and with the first
  // chunk of a slice the row's base and sum.
  __device__ void send(const PartialTile& partial_tile, int row, int chunk,
                       const Vector<float, 4>& values, const Vector<float, 4>& state) const {
    const Slice slice = Slice::for_chunk(partial_tile, chunk);
    const int chunk_in_record = chunk - slice.first_chunk();
    float* target =
        Cta::receive_buffer() + partial_tile.index * Cta::receive_floats + row * slice.record();
    send_to(partial_tile, slice.index, target + 4 * chunk_in_record, values);
    if (chunk_in_record == 0) send_to(partial_tile, slice.index, target + slice.state(), state);
  }

  // Returns whether this CTA merges columns of the current query tile.
  __device__ bool merges_here() const {
    const PartialTile& partial_tile = cta.partial_tile;
    return partial_tile.count > 1 && (partial_tile.index == 0 || partial_tile.is_sliced) &&
           Slice::for_cta(partial_tile, partial_tile.index).valid_chunks() > 0;
  }

  // Arrives at the mbarrier with the number of bytes to expect, while keys are being loaded.
  __device__ void expect_results() const {
    if (!merges_here()) return;
    const PartialTile& partial_tile = cta.partial_tile;
    const int chunks = Slice::for_cta(partial_tile, partial_tile.index).valid_chunks();
    const int bytes = cta.tile_rows() * (chunks + 1) * 16;
    ptx::mbarrier_arrive_expect_tx(Cta::results_barrier(), (partial_tile.count - 1) * bytes);
  }
  // Waits until the results of the other CTAs have arrived.
  __device__ void wait_results() const {
    ptx::mbarrier_wait_for_cluster(Cta::results_barrier(), 0);
  }

 private:
  // Writes `values` to `target` in shared memory of the CTA with partial tile `index` of the tile.
  __device__ static void send_to(const PartialTile& partial_tile, int index, float* target,
                                 const Vector<float, 4>& values) {
    if (index == partial_tile.index) {
      *reinterpret_cast<Vector<float, 4>*>(target) = values;
    } else {
      const int rank = partial_tile.first_cta_rank + index;
      ptx::st_async(ptx::map_to_cta(ptx::shared_address(target), rank), values.data,
                    ptx::map_to_cta(Cta::results_barrier(), rank));
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
