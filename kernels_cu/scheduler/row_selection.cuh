// Selection of the query tile that a CTA computes, and of the rows of the tile that it writes.
#pragma once

#include "ptx/base.cuh"

// Selects the tile of the CTA's index, and all of its rows; a Config may specialize this.
template <class Config>
struct RowSelection {
  __device__ static int tile() { return ptx::cta_index(); }
  __device__ static bool include(int) { return true; }
};
