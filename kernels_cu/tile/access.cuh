// Loads and stores of a few elements of a row, in accesses as wide as the row's alignment allows.
#pragma once

#include "tile/element.cuh"

// Loads the first `elements` of N elements and sets the others to 0. The address is a multiple of
// `Alignment` bytes.
template <int N, int Alignment, class Element>
__device__ Vector<Element, N> load_elements(const Element* global, int elements) {
  constexpr int aligned = Alignment / int(sizeof(Element));
  constexpr int width = aligned < N ? aligned : N;
  static_assert(width > 0 && N % width == 0, "whole accesses of whole elements");
  using Access = Vector<Element, width>;
  Vector<Element, N> result = {};
#pragma unroll
  for (int begin = 0; begin < N; begin += width) {
    if (begin + width <= elements) {
      const Access access = *reinterpret_cast<const Access*>(global + begin);
#pragma unroll
      for (int e = 0; e < width; ++e) result.data[begin + e] = access.data[e];
    } else {
#pragma unroll
      for (int e = 0; e < width; ++e) {
        if (begin + e < elements) result.data[begin + e] = global[begin + e];
      }
    }
  }
  return result;
}

// Writes the first `elements` elements of a 16-byte chunk of an output row, in accesses of
// `Alignment` bytes.
template <class Element, int Alignment>
__device__ void store_chunk(Element* global, const Vector<Element, 16 / sizeof(Element)>& chunk,
                            int elements) {
  constexpr int width = Alignment / int(sizeof(Element));
  using Access = Vector<Element, width>;
#pragma unroll
  for (int begin = 0; begin < 16 / int(sizeof(Element)); begin += width) {
    if (begin + width <= elements) {
      Access access;
#pragma unroll
      for (int e = 0; e < width; ++e) access.data[e] = chunk.data[begin + e];
      *reinterpret_cast<Access*>(global + begin) = access;
    } else {
#pragma unroll
      for (int e = 0; e < width; ++e) {
        if (begin + e < elements) global[begin + e] = chunk.data[begin + e];
      }
    }
  }
}

// Writes four columns of an output row of `Dim` columns, in one access if its alignment allows.
// `columns_left` counts the columns from the first of the four to the end of the row.
template <int Dim, int Alignment, class Element>
__device__ void store_columns(Element* global, const Vector<Element, 4>& columns,
                              int columns_left) {
  if (Alignment >= 8 && (Dim % 16 == 0 || columns_left >= 4)) {
    *reinterpret_cast<Vector<Element, 4>*>(global) = columns;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < columns_left) global[c] = columns.data[c];
    }
  }
}
