// Steps of the software pipelines of the forward and the backward Hopper kernel: TMA loads of
// tiles, zeroing of rows past the end of a sequence, and arrivals at barriers.
#pragma once

#include "ptx/base.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

// Named barrier (PTX ISA, `barrier`) of `Threads` threads. __syncthreads() uses barrier 0.
template <int Threads>
struct NamedBarrier {
  int id;

  __device__ void sync() const { ptx::bar_sync(id, Threads); }
  __device__ void arrive() const { ptx::bar_arrive(id, Threads); }
};

// Arrives once for the warp, after all its lanes are done: for example with a stage that they read.
__device__ inline void arrive_warp(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Issues the TMA loads of a tile, one for each box. Called by one thread, which has added the bytes
// to the transaction count of `barrier`.
template <class Tile>
__device__ void load_boxes(unsigned target, const TensorMap* map, int first_column, int row,
                           int head, int batch, unsigned barrier, unsigned long long policy) {
#pragma unroll
  for (int box = 0; box < Tile::boxes; ++box) {
    ptx::cp_async_bulk_tensor_4d(target + box * Tile::box_bytes, map,
                                 first_column + box * Tile::box_columns, row, head, batch, barrier,
                                 policy);
  }
}

// Zeroes the rows of a loaded tile from `begin` on, so that wgmma reads zeros. Called by one warp.
template <class Tile>
__device__ void clear_tail(unsigned tile, int begin) {
  Tile::clear_rows(tile, begin);
  ptx::fence_proxy_async();
}

#endif  // __CUDA_ARCH__ == 900
