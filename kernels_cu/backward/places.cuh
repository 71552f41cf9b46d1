// Which rows of packed sequences are whose, and where the tiles of each have their places.
//
// The starts of sequences are searched in halves, always the same way down for a sequence. So
// whatever numbers are in `starts`, each row is one sequence's at most, and who looks for it from a
// row, a place or a sequence finds the same. Else two blocks would write a row, none would, or some
// would wait for turns of blocks that there are not.
#pragma once

#include "grid/sequences.cuh"

struct PackedPart {
  int sequence;
  int begin;
  int end;  // not behind the begin if it has nothing
};

// The sequence that `is_behind(i, first)` leads to, which says whether it is the i-th, whose part
// begins with `first`, or one behind it; and its part of what begins and ends so.
template <class First, class IsBehind>
__device__ PackedPart find_part(int batch, int begin, int end, First first, IsBehind is_behind) {
  PackedPart found = {0, begin, end};
  for (int behind = batch; behind - found.sequence > 1;) {
    const int middle = found.sequence + (behind - found.sequence) / 2;
    const int start = first(middle);
    if (is_behind(middle, start)) {
      found.sequence = middle;
      found.begin = max(found.begin, start);
    } else {
      behind = middle;
      found.end = min(found.end, start);
    }
  }
  return found;
}

template <class IsBehind>
__device__ PackedPart find_rows(const int* starts, int batch, int total, IsBehind is_behind) {
  const auto first = [=](int i) { return clamp(starts[i], 0, total); };
  return find_part(batch, first(0), first(batch), first, is_behind);
}

// The rows of a sequence.
__device__ inline PackedPart rows_of_sequence(const int* starts, int batch, int total,
                                              int sequence) {
  return find_rows(starts, batch, total, [=](int i, int) { return i <= sequence; });
}

// The sequence that a row is of, if it is of any, and its rows.
__device__ inline PackedPart rows_around(const int* starts, int batch, int total, int row) {
  return find_rows(starts, batch, total, [=](int, int first) { return first <= row; });
}

// A sequence of n rows has at most n / Rows + 1 tiles that are begun, so that without a look at the
// sequences before it is known where its places begin. Of total / Rows + batch places few are left
// empty.
template <int Rows>
__device__ int first_place(int first_row, int sequence) {
  return first_row / Rows + sequence;
}
template <int Rows>
__device__ int count_places(int total, int batch) {
  return total / Rows + batch;
}

// The sequence that a place is of, and its places.
template <int Rows>
__device__ PackedPart places_around(const int* starts, int batch, int total, int place) {
  return find_part(
      batch, 0, count_places<Rows>(total, batch),
      [=](int i) { return first_place<Rows>(clamp(starts[i], 0, total), i); },
      [=](int, int first) { return first <= place; });
}
