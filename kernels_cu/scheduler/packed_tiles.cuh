// Maps rows of packed sequences to sequences, and tiles of sequences to slots of per-tile arrays.
//
// Sequences are found by binary search over their starts. Whatever `starts` holds, the searches by
// row, by slot and by sequence agree, and each row belongs to at most one sequence. Otherwise a row
// could be written by two CTAs or by none, or a CTA could wait for another that does not exist.
#pragma once

#include "scheduler/sequences.cuh"

struct PackedRange {
  int sequence;
  int begin;
  int end;  // at most `begin` if the range is empty
};

// Finds a sequence by binary search, and returns it with its part of [begin, end). The part of
// sequence i starts at `first(i)`. `is_at_or_after(i, first(i))` returns whether the sequence to be
// found is sequence i or a later one.
template <class First, class IsAtOrAfter>
__device__ PackedRange search(int batch, int begin, int end, First first,
                              IsAtOrAfter is_at_or_after) {
  PackedRange range = {0, begin, end};
  for (int high = batch; high - range.sequence > 1;) {
    const int middle = range.sequence + (high - range.sequence) / 2;
    const int start = first(middle);
    if (is_at_or_after(middle, start)) {
      range.sequence = middle;
      range.begin = max(range.begin, start);
    } else {
      high = middle;
      range.end = min(range.end, start);
    }
  }
  return range;
}

template <class IsAtOrAfter>
__device__ PackedRange search_rows(const int* starts, int batch, int total,
                                   IsAtOrAfter is_at_or_after) {
  const auto first = [=](int i) { return clamp(starts[i], 0, total); };
  return search(batch, first(0), first(batch), first, is_at_or_after);
}

// Returns the rows of a sequence.
__device__ inline PackedRange rows_of_sequence(const int* starts, int batch, int total,
                                               int sequence) {
  return search_rows(starts, batch, total, [=](int i, int) { return i <= sequence; });
}

// Returns the rows that a sequence occupies in q and k. No packed row may belong to two sequences,
// even if `cu_seqlens` or `seqused_k` say so, because two CTAs would then write its gradient.
template <class Config>
__device__ Sequence sequence_of(const Params& p, int batch) {
  if constexpr (Config::has_seqlens) {
    Sequence sequence = find_sequence<0>(p, batch);
    if constexpr (Config::packed) {
      const PackedRange q = rows_of_sequence(p.cu_seqlens_q, p.batch, p.total_q, batch);
      const PackedRange k = rows_of_sequence(p.cu_seqlens_k, p.batch, p.total_k, batch);
      sequence.q_first = q.begin;
      sequence.seqlen_q = clamp(q.end - q.begin, 0, sequence.seqlen_q);
      sequence.k_first = k.begin;
      sequence.seqlen_k = clamp(k.end - k.begin, 0, sequence.seqlen_k);
    }
    return sequence;
  } else {
    return {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
  }
}

// Returns the only sequence that may contain `row`, and the rows of that sequence.
__device__ inline PackedRange find_sequence_rows(const int* starts, int batch, int total, int row) {
  return search_rows(starts, batch, total, [=](int, int first) { return first <= row; });
}

// Returns the first tile slot of a sequence. A sequence of n rows has at most n / Rows + 1 tiles,
// so one slot more per sequence than full tiles suffices. Few of the total / Rows + batch slots
// stay unused.
template <int Rows>
__device__ int first_tile_slot(int first_row, int sequence) {
  return first_row / Rows + sequence;
}
template <int Rows>
__device__ int count_tile_slots(int total, int batch) {
  return total / Rows + batch;
}

// Returns the tile slots of a sequence. They are those for which find_tile_slots() finds the
// sequence, so the ranges of all sequences partition the slots.
template <int Rows>
__device__ PackedRange tile_slots_of_sequence(const int* starts, int batch, int total,
                                              int sequence) {
  return search(
      batch, 0, count_tile_slots<Rows>(total, batch),
      [=](int i) { return first_tile_slot<Rows>(clamp(starts[i], 0, total), i); },
      [=](int i, int) { return i <= sequence; });
}

// Returns the number of tile slots of sequence `other` if they precede those of `sequence`, which
// has `count` slots, in the order of lengths: longer sequences first, equally long ones in the
// order of the batch. Otherwise returns 0.
template <int Rows>
__device__ int earlier_tile_slots(const int* starts, int batch, int total, int sequence, int count,
                                  int other) {
  const PackedRange slots = tile_slots_of_sequence<Rows>(starts, batch, total, other);
  const int other_count = slots.end - slots.begin;
  const bool precedes = other_count > count || (other_count == count && other < sequence);
  return precedes ? max(0, other_count) : 0;
}

// Returns the sequence that a tile slot belongs to, and the slots of that sequence.
template <int Rows>
__device__ PackedRange find_tile_slots(const int* starts, int batch, int total, int slot) {
  return search(
      batch, 0, count_tile_slots<Rows>(total, batch),
      [=](int i) { return first_tile_slot<Rows>(clamp(starts[i], 0, total), i); },
      [=](int, int first) { return first <= slot; });
}
