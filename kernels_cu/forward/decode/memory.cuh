// The results of an item that meet in device memory: where they lie, who merges them, and how they
// come to shared memory.
#pragma once

#include "forward/decode/block.cuh"
#include "ptx/base.cuh"
#include "ptx/stream.cuh"
#include "grid/shares.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeMemory {
  using Block = DecodeBlock<Config>;

  const Block& block;

  // The place in the workspace of one of the item's results.
  __device__ float* result(int number) const {
    return static_cast<float*>(block.p.workspace) +
           int64(block.part.slot_of(number)) * (Config::Br * Block::record);
  }

  __device__ int* counter(const Meeting& meeting) const {
    return block.p.counters + block.part.slot_of(meeting.counter());
  }

  // A counter takes as long to come as a tile of keys.
  __device__ void prefetch_counter() const {
    if (block.part.results > 1 && threadIdx.x == 0) {
      ptx::prefetch_l2(counter(Meeting(block.part.result)));
    }
  }

  // Whether all others of `count` have left their results. The counter is zero again then.
  __device__ bool is_last_to_arrive(const Meeting& meeting, int count) const {
    int* arrived = counter(meeting);
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = ptx::atom_add_acq_rel(arrived, 1) == count - 1;
      if (is_last) *arrived = 0;
    }
    return __syncthreads_or(is_last);
  }

  // Brings the rows [first_row, first_row + rows) of a group's results to shared memory, around L1,
  // which knows nothing of other SMs' writes.
  __device__ void gather(const Meeting& meeting, int count, int first_row, int rows) const {
    const unsigned target = ptx::shared_address(Block::shared_floats());
    const int chunks = rows * (Block::record / 4);
#pragma unroll 1
    for (int r = block.warp; r < count; r += Config::warps) {
      const float* source = result(meeting.first + r * meeting.step) + first_row * Block::record;
#pragma unroll 4
      for (int i = block.lane; i < chunks; i += 32) {
        ptx::cp_async<16>(target + (r * chunks + i) * 16, source + 4 * i, 16);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }
};

#endif  // __CUDA_ARCH__ >= 800
