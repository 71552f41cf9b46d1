// Exchange of columns between lanes, so that a lane writes four consecutive elements of a gradient.
#pragma once

#include "ptx/base.cuh"
#include "tile/element.cuh"

// Exchanges columns of 16-bit elements with the neighbouring lane. Before, each lane holds two
// columns of each of two groups of eight columns (`first` and `second`). Afterwards, each lane
// holds four consecutive columns of one group: even lanes of the first group, and odd lanes of the
// second group.
template <class Element>
__device__ Vector<Element, 4> exchange_columns(unsigned first, unsigned second) {
  const bool is_odd = threadIdx.x % 2;
  const unsigned received = __shfl_xor_sync(~0u, is_odd ? first : second, 1);
  const unsigned pairs[2] = {is_odd ? received : first, is_odd ? second : received};
  return reinterpret_cast<const Vector<Element, 4>&>(pairs);
}
