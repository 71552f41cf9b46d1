// Rows that see one key or none, set right behind everything else, so that it costs the others
// nothing.
#pragma once

#include "element.cuh"
#include "pages.cuh"

// By one warp, of the rows [first, end) whose results it has written, Dim columns each. They see no
// fewer keys from row to row, of which the keys before `begin` are others'.
//
// A row that sees no key is 0: what was summed up for it, 0 times the values of others, is NaN if
// one of those is. A row that sees one key is that key's value, `first_value`, exactly, and not
// p v / p; but where its score is no number, it is NaN and stays so.
template <int Dim, class Out, class Element, class VisibleEnd, class OutRow>
__device__ void settle_few_seen(int first, int end, int begin, VisibleEnd visible_end,
                                OutRow out_row, const Row<Element>& first_value) {
  if (first >= end || visible_end(first) > max(begin, 1)) return;
  // Each row was written by several lanes.
  __syncwarp();
#pragma unroll 1
  for (int row = first; row < end; ++row) {
    const int visible = visible_end(row);
    if (visible > max(begin, 1)) return;
    Out* out = out_row(row);
#pragma unroll 1
    for (int column = threadIdx.x % 32; column < Dim; column += 32) {
      if (visible <= begin) {
        out[column] = Out{};
      } else if (const auto result = widen(out[column]); result == result) {
        out[column] = narrow<Out>(first_value.is_there ? widen(first_value.begin[column]) : 0);
      }
    }
  }
}
