// Rows of packed queries that belong to no sequence: those before the first sequence, those after
// the last, and those of a sequence past max_seqlen_q. No query tile covers them. Their output is 0
// and their log-sum-exp -inf, so that whoever reads whole arrays never reads uninitialized memory.
#pragma once

#include "params.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"
#include "score/softmax.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"

// Gap i lies before sequence i, and gap `batch` after the last sequence. Every row that belongs to
// no sequence lies in a gap, whatever cu_seqlens_q holds: the gaps and the sequences, one after the
// other, lead from row 0 to row total_q. Where the numbers decrease, a gap may also hold rows of
// sequences, which are left out.
struct Gaps {
  const Params& p;

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

  __device__ Rows at(int i) const {
    return {i == 0 ? 0 : rows_of(i - 1).end, i == p.batch ? p.total_q : start(i)};
  }

  // Calls visit(row) for the rows of gap i that belong to no sequence, of every `parts` consecutive
  // ones the row with number `part`. All lanes of a warp call it together.
  template <class Visit>
  __device__ void visit(int i, unsigned part, unsigned parts, Visit visit) const {
    const Rows gap = at(i);
    int begin = gap.first;
#pragma unroll 1
    while (begin < gap.end) {
      const Rows owned = first_owned_from(begin);
      const int end = min(gap.end, owned.first);
#pragma unroll 1
      for (unsigned row = begin + part; row < unsigned(end); row += parts) visit(row);
      begin = owned.end;
    }
  }

 private:
  // The first rows from `row` on that belong to a sequence.
  __device__ Rows first_owned_from(int row) const {
    Rows found = {p.total_q, p.total_q};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.batch; i += 32) {
      const Rows rows = rows_of(i);
      if (rows.end > row) found = first_of(found, {max(rows.first, row), rows.end});
    }
#pragma unroll 1
    for (int bit = 1; bit < 32; bit *= 2) {
      const Rows other = {__shfl_xor_sync(~0u, found.first, bit),
                          __shfl_xor_sync(~0u, found.end, bit)};
      found = first_of(found, other);
    }
    return found;
  }

  __device__ static Rows first_of(const Rows& a, const Rows& b) {
    if (a.first == b.first) return {a.first, max(a.end, b.end)};
    return a.first < b.first ? a : b;
  }
};

template <class Config>
struct UnownedRows {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;

  const Params& p;

  // Shares the rows of all gaps out among `blocks` warps, of which this is the one with number
  // `block`. Gaps between sequences are rare, and have a warp each.
  __device__ void clear_all(unsigned block, unsigned blocks) const {
    if (p.cu_seqlens_q == nullptr) return;
    // One call in a loop, as registers are few where this runs.
    const unsigned last = p.batch;
    unsigned gap = min(block + 1, last);
#pragma unroll 1
    while (true) {
      const bool is_outer = gap == 0 || gap == last;
      clear(gap, is_outer ? block : 0, is_outer ? blocks : 1, 0, p.heads_q);
      if (gap == 0) return;
      gap = gap == last ? 0 : min(gap + blocks, last);
    }
  }

  // Clears the gap after a sequence, and before the first, for some heads: a warp's part of them.
  __device__ void clear_around(int sequence, unsigned part, unsigned parts, int head, int heads) const {
    if (p.cu_seqlens_q == nullptr) return;
#pragma unroll 1
    for (int gap = sequence == 0 ? 0 : sequence + 1; gap <= sequence + 1; ++gap) {
      clear(gap, part, parts, head, heads);
    }
  }

 private:
  __device__ void clear(int gap, unsigned part, unsigned parts, int head, int heads) const {
    Gaps{p}.visit(gap, part, parts, [&](int row) { clear_row(row, head, heads); });
  }

  __device__ void clear_row(int row, int first_head, int heads) const {
    constexpr int elements = 16 / int(sizeof(Element));
    constexpr int chunks = ceil_div(Config::head_dim_v, elements);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
      const int head = first_head + i / chunks;
      const int column = i % chunks * elements;
      Element* target = p.out.template head<Element>(0, head) + row * p.out.row_stride + column;
      store_chunk<Element, Config::out_alignment>(target, {}, Config::head_dim_v - column);
      if (column == 0 && p.lse != nullptr) {
        static_cast<T*>(p.lse)[int64(head) * p.total_q + row] = -SoftmaxMath<T>::infinity();
      }
    }
  }
};
