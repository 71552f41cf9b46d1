// Degenerate rows, which attend to no key or to one. They are corrected after all other work, so
// that the loop over KV tiles needs no code for them.
#pragma once

#include "tile/element.cuh"
#include "scheduler/pages.cuh"

// Whether p v / p rounds to v if p is the only nonzero probability of its row. True for 16-bit and
// 8-bit types, if p is then a power of two to within float32's rounding. Each kernel must provide
// for that: its base follows from the exact maximum, or from `LazySoftmaxRow::set_only_key()`.
template <class Element>
constexpr bool quotient_is_exact = sizeof(Element) <= 2;

// Maximum number of visible keys of a row that is corrected.
template <class Element>
constexpr int max_degenerate_keys = quotient_is_exact<Element> ? 0 : 1;

// Returns the corrected `result` in one column of a row with `visible` visible keys. Without
// visible keys, it is 0: the accumulated output, 0 times masked values, is NaN if one of these
// values is NaN or infinite. With one visible key, it is that key's value instead of p v / p,
// unless a NaN score made `result` NaN.
template <class Element>
__device__ Element degenerate_value(int visible, Element result, const Row<Element>& first_value,
                                    int column) {
  if (visible == 0) return Element{};
  if (visible > 1 || widen(result) != widen(result)) return result;
  return first_value.exists ? first_value.begin[column] : Element{};
}

// Called by one warp: corrects the degenerate rows among the rows [first, end), whose `Dim` columns
// this warp has written. The number of visible keys must not decrease from row to row.
template <int Dim, class Element, class VisibleEnd, class OutRow>
__device__ void fix_degenerate_rows(int first, int end, VisibleEnd visible_end, OutRow out_row,
                                    const Row<Element>& first_value) {
  constexpr int max_keys = max_degenerate_keys<Element>;
  if (first >= end || visible_end(first) > max_keys) return;
  // Several lanes have written each row.
  __syncwarp();
#pragma unroll 1
  for (int row = first; row < end; ++row) {
    const int visible = visible_end(row);
    if (visible > max_keys) return;
    Element* out = out_row(row);
    // Unrolled, so that several loads overlap: the shortest query tile runs last, and delays the
    // end of the grid.
#pragma unroll 4
    for (int column = threadIdx.x % 32; column < Dim; column += 32) {
      out[column] = degenerate_value(visible, out[column], first_value, column);
    }
  }
}
