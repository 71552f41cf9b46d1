// Maps rows of packed sequences to sequences, and tiles of sequences to slots of per-tile arrays.
//
// Sequences are found by binary search over their starts. Whatever `starts` holds, the searches by
// row, by slot and by sequence agree, and each row belongs to at most one sequence. Otherwise a row
// could be written by two CTAs or by none, or a CTA could wait for another that does not exist.
#pragma once

#include "grid/sequences.cuh"

struct PackedPart {
  int sequence;
  int begin;
  int end;  // at most `begin` if the part is empty
};

// Returns the sequence that the search finds, and its part of [begin, end). `is_behind(i, first)`
// returns whether it is sequence i, whose part begins at `first`, or a later sequence.
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

// Returns the rows of a sequence.
__device__ inline PackedPart rows_of_sequence(const int* starts, int batch, int total,
                                              int sequence) {
  return find_rows(starts, batch, total, [=](int i, int) { return i <= sequence; });
}

// Returns the only sequence that may contain `row`, and the rows of that sequence.
__device__ inline PackedPart rows_around(const int* starts, int batch, int total, int row) {
  return find_rows(starts, batch, total, [=](int, int first) { return first <= row; });
}

// Returns the first tile slot of a sequence. n rows have at most n / Rows + 1 tiles, so the slot
// follows from the sequence's first row and index. Few of the total / Rows + batch slots stay
// empty.
template <int Rows>
__device__ int first_place(int first_row, int sequence) {
  return first_row / Rows + sequence;
}
template <int Rows>
__device__ int count_places(int total, int batch) {
  return total / Rows + batch;
}

// Returns the sequence that a tile slot belongs to, and the slots of that sequence.
template <int Rows>
__device__ PackedPart places_around(const int* starts, int batch, int total, int place) {
  return find_part(
      batch, 0, count_places<Rows>(total, batch),
      [=](int i) { return first_place<Rows>(clamp(starts[i], 0, total), i); },
      [=](int, int first) { return first <= place; });
}
