// Exchange of partial results of a query tile in global memory: where they are stored, which CTA
// merges them, and how they are copied to shared memory.
#pragma once

#include "forward/decode/cta.cuh"
#include "forward/decode/merge_slice.cuh"
#include "ptx/base.cuh"
#include "ptx/stream.cuh"
#include "scheduler/kv_partition.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeMemory {
  using Cta = DecodeCta<Config>;
  using Slice = MergeSlice<Config>;
  // Number of floats for one result, whole or in slices.
  static constexpr int slot_floats =
      Config::Br * (Cta::slices * Cta::slice_record > Cta::record ? Cta::slices * Cta::slice_record
                                                                  : Cta::record);

  const Cta& cta;

  // Returns the workspace address of a result of the query tile, or of a slice of it.
  __device__ float* result(int index, const Slice& slice) const {
    return static_cast<float*>(cta.p.workspace) +
           int64(cta.partial_tile.slot_of(index)) * slot_floats + slice.first_record();
  }

  // Returns the arrival counter of a merge group. Every slice has its own and is merged separately.
  __device__ int* counter(const MergeGroup& merge_group, const Slice& slice) const {
    return cta.p.counters + cta.partial_tile.slot_of(merge_group.counter()) * Cta::slices +
           slice.index;
  }

  // Prefetches the arrival counter to L2, since loading it takes as long as loading a KV tile.
  __device__ void prefetch_counter() const {
    const PartialTile& partial_tile = cta.partial_tile;
    if (partial_tile.results > 1) {
      ptx::prefetch_l2(counter(MergeGroup(partial_tile.result),
                               Slice::for_cta(partial_tile, partial_tile.index)));
    }
  }

  // Returns whether this CTA is the last of `count` to write its result. If so, clears the counter.
  __device__ bool is_last_to_arrive(const MergeGroup& merge_group, int count,
                                    const Slice& slice) const {
    int* arrived = counter(merge_group, slice);
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = ptx::atom_add_acq_rel(arrived, 1) == count - 1;
      if (is_last) *arrived = 0;
    }
    return __syncthreads_or(is_last);
  }

  // Copies the rows [first_row, first_row + rows) of a merge group's results to shared memory. The
  // copies bypass L1, which is not coherent with the writes of other SMs.
  __device__ void gather(const MergeGroup& merge_group, int count, int first_row, int rows,
                         const Slice& slice) const {
    const unsigned target = ptx::shared_address(Cta::shared_floats());
    const int chunks = rows * (slice.record() / 4);
#pragma unroll 1
    for (int r = cta.warp; r < count; r += Config::warps) {
      const float* source =
          result(merge_group.first + r * merge_group.step, slice) + first_row * slice.record();
#pragma unroll 4
      for (int i = cta.lane; i < chunks; i += 32) {
        ptx::cp_async<16>(target + (r * chunks + i) * 16, source + 4 * i, 16);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }
};

#endif  // __CUDA_ARCH__ >= 800
