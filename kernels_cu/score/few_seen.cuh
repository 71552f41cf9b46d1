// Rows that see one key or none, set right behind everything else, so that it costs the others
// nothing.
#pragma once

#include "tile/element.cuh"
#include "grid/pages.cuh"

// Whether p v / p is as exact as v: in 16 bits and 8 it is, as p of a row's only key is a power of
// two to within float32's rounding.
template <class Element>
constexpr bool quotient_is_exact = sizeof(Element) <= 2;

// Rows that see no more keys than this are settled.
template <class Element>
constexpr int few_keys = quotient_is_exact<Element> ? 0 : 1;

// What a row that sees so few keys is set to in one column. One that sees no key is 0: what was
// summed up for it, 0 times the values of others, is NaN if one of those is. One that sees one key
// is that key's value, and not p v / p; but where its score is no number, it is NaN and stays so.
template <class Element>
__device__ Element settled(int visible, Element result, const Row<Element>& first_value,
                           int column) {
  if (visible == 0) return Element{};
  if (visible > 1 || widen(result) != widen(result)) return result;
  return first_value.is_there ? first_value.begin[column] : Element{};
}

// By one warp, of the rows [first, end) whose results it has written, Dim columns each, and which
// see no fewer keys from row to row.
template <int Dim, class Element, class VisibleEnd, class OutRow>
__device__ void settle_few_seen(int first, int end, VisibleEnd visible_end, OutRow out_row,
                                const Row<Element>& first_value) {
  constexpr int few = few_keys<Element>;
  if (first >= end || visible_end(first) > few) return;
  // Each row was written by several lanes.
  __syncwarp();
#pragma unroll 1
  for (int row = first; row < end; ++row) {
    const int visible = visible_end(row);
    if (visible > few) return;
    Element* out = out_row(row);
    // Loads of several columns at once: the shortest query tile is the last to run, and everybody
    // waits for it.
#pragma unroll 4
    for (int column = threadIdx.x % 32; column < Dim; column += 32) {
      out[column] = settled(visible, out[column], first_value, column);
    }
  }
}
