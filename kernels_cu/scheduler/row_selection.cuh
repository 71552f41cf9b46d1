// Selection of the query tile that a CTA computes, and of the rows of the tile that it writes.
#pragma once

#include "ptx/base.cuh"

// By default, a CTA computes the tile at its own index and writes all rows of it. Specializations
// for a Config may select differently.
template <class Config>
struct RowSelection {
  __device__ static int tile() { return ptx::cta_index(); }
  __device__ static bool include(int) { return true; }
};
