// Places of the tiles of packed sequences, one sequence behind the other: a sequence of n rows has
// at most n / Rows + 1 tiles that are begun, so that without a look at the sequences before it is
// known where its places begin. Of total / Rows + batch places few are left empty.
#pragma once

#include "grid/sequences.cuh"

struct PackedPlaces {
  int sequence;
  int begin;
  int end;
};

// Whose place this is, and which others are that sequence's.
//
// A search in halves: whatever numbers are in `starts`, each place is one sequence's, the places of
// a sequence follow one another, and who looks at any of them finds the same ones. Else blocks
// would wait for turns of blocks that there are not.
template <int Rows>
__device__ PackedPlaces find_places(const int* starts, int batch, int total, int place) {
  PackedPlaces found = {0, 0, total / Rows + batch};
  int behind = batch;
  while (behind - found.sequence > 1) {
    const int middle = found.sequence + (behind - found.sequence) / 2;
    const int first = clamp(starts[middle], 0, total) / Rows + middle;
    if (first <= place) {
      found.sequence = middle;
      found.begin = max(found.begin, first);
    } else {
      behind = middle;
      found.end = min(found.end, first);
    }
  }
  return found;
}
