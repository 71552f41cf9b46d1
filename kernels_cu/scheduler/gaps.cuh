// Rows of packed queries that belong to no sequence: those before the first sequence, those after
// the last, and those of a sequence past max_seqlen_q. No query tile covers them.
#pragma once

#include "params.cuh"
#include "scheduler/sequences.cuh"

// Gap i is before sequence i, and gap `batch` after the last sequence. Every row that belongs to no
// sequence is in a gap, whatever cu_seqlens_q holds, because gaps and sequences together cover all
// rows from 0 to total_q. If cu_seqlens_q decreases, a gap may contain rows of sequences; the
// functions skip these rows.
//
// All lanes of a warp call the functions together. They call `function(row)` for this warp's part
// of the rows that belong to no sequence.
struct Gaps {
  const Params& p;

  // Handles the rows of all gaps, distributed over `warps` warps, of which this is number `warp`.
  // Gaps between sequences are rare, so one warp handles each of these.
  template <class Function>
  __device__ void for_each_row(unsigned warp, unsigned warps, Function function) const {
    if (p.cu_seqlens_q == nullptr) return;
    // The loop calls `for_each_row_of_gap()` at one place only, so that it is inlined once. This
    // saves registers, which the calling kernels need.
    const unsigned last = p.batch;
    unsigned gap = min(warp + 1, last);
#pragma unroll 1
    while (true) {
      const bool is_outer = gap == 0 || gap == last;
      for_each_row_of_gap(gap, is_outer ? warp : 0, is_outer ? warps : 1, function);
      if (gap == 0) return;
      gap = gap == last ? 0 : min(gap + warps, last);
    }
  }

  // Handles the rows of the gap after a sequence and, for the first sequence, of the gap before it.
  template <class Function>
  __device__ void for_each_adjacent_row(int sequence, unsigned warp, unsigned warps,
                                        Function function) const {
    if (p.cu_seqlens_q == nullptr) return;
#pragma unroll 1
    for (int gap = sequence == 0 ? 0 : sequence + 1; gap <= sequence + 1; ++gap) {
      for_each_row_of_gap(gap, warp, warps, function);
    }
  }

 private:
  // Rows [first, end) of packed queries.
  struct Rows {
    int first;
    int end;
  };

  __device__ int start(int sequence) const { return clamp(p.cu_seqlens_q[sequence], 0, p.total_q); }
  __device__ Rows rows_of(int sequence) const {
    const int first = start(sequence);
    return {first, first + clamp(start(sequence + 1) - first, 0, p.seqlen_q)};
  }

  // Handles part number `part` of `parts` of the rows in the gap that belong to no sequence: every
  // `parts`-th row of each run of such rows.
  template <class Function>
  __device__ void for_each_row_of_gap(int gap, unsigned part, unsigned parts,
                                      Function function) const {
    int begin = gap == 0 ? 0 : rows_of(gap - 1).end;
    const int gap_end = gap == p.batch ? p.total_q : start(gap);
#pragma unroll 1
    while (begin < gap_end) {
      const Rows next = next_sequence_rows(begin);
      const unsigned end = min(gap_end, next.first);
#pragma unroll 1
      for (unsigned row = begin + part; row < end; row += parts) function(row);
      begin = next.end;
    }
  }

  // Returns the first range of rows, at or after `row`, that belongs to a sequence.
  __device__ Rows next_sequence_rows(int row) const {
    Rows nearest = {p.total_q, p.total_q};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.batch; i += 32) {
      const Rows rows = rows_of(i);
      if (rows.end > row) nearest = first_range(nearest, {max(rows.first, row), rows.end});
    }
#pragma unroll 1
    for (int bit = 1; bit < 32; bit *= 2) {
      const Rows other = {__shfl_xor_sync(~0u, nearest.first, bit),
                          __shfl_xor_sync(~0u, nearest.end, bit)};
      nearest = first_range(nearest, other);
    }
    return nearest;
  }

  __device__ static Rows first_range(const Rows& a, const Rows& b) {
    if (a.first == b.first) return {a.first, max(a.end, b.end)};
    return a.first < b.first ? a : b;
  }
};
