// Reading a few elements of a row, in accesses as wide as its alignment allows. The writing is
// store_chunk, in copy.cuh.
#pragma once

#include "tile/element.cuh"

// N elements, of which the first `elements` are in memory and the others 0. Alignment is what their
// address is a multiple of, in bytes.
template <int N, int Alignment, class Element>
__device__ Vector<Element, N> load_elements(const Element* global, int elements) {
  constexpr int aligned = Alignment / int(sizeof(Element));
  constexpr int width = aligned < N ? aligned : N;
  static_assert(width > 0 && N % width == 0, "whole accesses of whole elements");
  using Piece = Vector<Element, width>;
  Vector<Element, N> result = {};
#pragma unroll
  for (int begin = 0; begin < N; begin += width) {
    if (begin + width <= elements) {
      const Piece piece = *reinterpret_cast<const Piece*>(global + begin);
#pragma unroll
      for (int e = 0; e < width; ++e) result.at[begin + e] = piece.at[e];
    } else {
#pragma unroll
      for (int e = 0; e < width; ++e) {
        if (begin + e < elements) result.at[begin + e] = global[begin + e];
      }
    }
  }
  return result;
}
