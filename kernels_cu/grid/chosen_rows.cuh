// Which query tile a thread block computes, and which rows of the tile it writes.
#pragma once

#include "ptx/base.cuh"

// The tile of the block's index, and all of its rows. A specialization for a Config chooses others.
template <class Config>
struct ChosenRows {
  __device__ static int tile() { return ptx::block_index(); }
  __device__ static bool include(int) { return true; }
};
