// Order of packed sequences in the grid of a gradient kernel, with `Config::orders_sequences`: the
// longest sequences first, so that the CTAs at the end, when some SMs are idle, have little work.
//
// The preprocess kernel writes this order to the workspace: for each slot of a KV tile, in the
// order of the grid, the sequence and its rows. A CTA then reads one entry of 48 bytes. Otherwise
// it would search `cu_seqlens` three times, and each step of a search waits for memory.
#pragma once

#include "scheduler/packed_tiles.cuh"
#include "backward/params.cuh"

struct alignas(16) PackedTileSlot {
  Sequence rows;
  int sequence;
  int begin;  // range of the slots of the sequence, in the order of the grid
  int end;
};
static_assert(sizeof(PackedTileSlot) == 48, "as the host planned");

__device__ inline PackedTileSlot* packed_tile_slots(const GradientParams& p) {
  return static_cast<PackedTileSlot*>(p.packed_tiles);
}

// Writes the order. Each warp of the grid compares one sequence with all sequences. In a large
// batch this would take too long, so its sequences stay in the order of the batch.
template <class Config>
struct PackedOrder {
  static constexpr int Rows = Config::Bc;
  static constexpr int most_ordered = 1024;

  // Called by all threads of the grid.
  __device__ static void write(const GradientParams& p) {
    const int* const starts = p.cu_seqlens_k;
    const int lane = threadIdx.x % 32, step = gridDim.x * (blockDim.x / 32);
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < p.batch; i += step) {
      const PackedRange slots = tile_slots_of_sequence<Rows>(starts, p.batch, p.total_k, i);
      const int count = slots.end - slots.begin;
      int begin = slots.begin;
      if (p.batch <= most_ordered) {
        begin = 0;
        for (int j = lane; j < p.batch; j += 32) {
          begin += earlier_tile_slots<Rows>(starts, p.batch, p.total_k, i, count, j);
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) begin += __shfl_xor_sync(~0u, begin, bit);
      }
      const Sequence rows = sequence_of<Config>(p, i);
      for (int tile = lane; tile < count; tile += 32) {
        packed_tile_slots(p)[begin + tile] = {rows, i, begin, begin + count};
      }
    }
  }
};
