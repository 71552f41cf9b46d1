// Order of packed sequences in the grid of a gradient kernel, with `Config::orders_sequences`: the
// longest sequences first, so that the thread blocks of the last ones, which run while other SMs
// are idle, have little work.
//
// The preprocess kernel writes this order to the workspace: for each slot of a KV tile, in the order
// of the grid, the sequence and its rows. A CTA then reads one entry of 48 bytes. Otherwise it would
// search `cu_seqlens` three times, and each step of a search waits for global memory.
#pragma once

#include "backward/packed_tiles.cuh"
#include "backward/params.cuh"

struct alignas(16) PackedTileSlot {
  Sequence rows;
  int sequence;
  int begin;  // range of the slots of the sequence, in the order of the grid
  int end;
};

__device__ inline PackedTileSlot* packed_tile_slots(const GradientParams& p) {
  return static_cast<PackedTileSlot*>(p.packed_tiles);
}

// Writes the order. Sequences of equally many slots are in the order of the batch. Each warp of the
// grid compares one sequence with all sequences. A large batch would take too long, so its
// sequences are not reordered; it has a long tail only if its longest sequence exceeds all others.
template <class Config>
struct PackedOrder {
  static constexpr int Rows = Config::Bc;
  static constexpr int most_ordered = 1024;

  __device__ static void write(const GradientParams& p) {
    const int lane = threadIdx.x % 32, step = gridDim.x * (blockDim.x / 32);
    const auto slots_of = [&](int sequence) {
      return tile_slots_of_sequence<Rows>(p.cu_seqlens_k, p.batch, p.total_k, sequence);
    };
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < p.batch; i += step) {
      const PackedRange slots = slots_of(i);
      const int count = slots.end - slots.begin;
      int begin = slots.begin;
      if (p.batch <= most_ordered) {
        begin = 0;
        for (int j = lane; j < p.batch; j += 32) {
          const PackedRange other = slots_of(j);
          const int other_count = max(0, other.end - other.begin);
          if (other_count > count || (other_count == count && j < i)) begin += other_count;
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
