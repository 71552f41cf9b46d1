// Splitting the keys of one query tile over several thread blocks, and merging their results. The
// workspace holds, for each split, a normalized partial output (batch, heads_q, seqlen_q,
// head_dim_v) and then, for each split, a log-sum-exp (batch, heads_q, seqlen_q), in the
// accumulator's type. Of packed queries these are (heads_q, total_q, ...), as their lse is.
#pragma once

#include "element.cuh"
#include "params.cuh"
#include "sequences.cuh"
#include "softmax.cuh"

template <class T, int HeadDimV>
struct Partials {
  T* out;
  T* lse;
  int64 rows;  // of one split

  __device__ explicit Partials(const Params& p)
      : out(static_cast<T*>(p.workspace)), rows(int64(p.batch) * p.heads_q * p.seqlen_q) {
    lse = out + p.num_splits * rows * HeadDimV;
  }

  __device__ Partials(const Params& p, const Sequences& s)
      : out(static_cast<T*>(p.workspace)), rows(row_count(p, s)) {
    lse = out + p.num_splits * rows * HeadDimV;
  }

  // Where a query row stands in lse, and among the rows of a split.
  __device__ static int64 row_index(const Params& p, int batch, int head, int row) {
    return (int64(batch) * p.heads_q + head) * p.seqlen_q + row;
  }
  __device__ static int64 row_index(const Params& p, const Sequences& s, const Sequence& at,
                                    int batch, int head, int row) {
    if (s.cu_seqlens_q == nullptr) return row_index(p, batch, head, row);
    return int64(head) * s.total_q + at.q_first + row;
  }
  __device__ T* out_row(int split, int64 row) const {
    return out + (split * rows + row) * HeadDimV;
  }
  __device__ T* lse_row(int split, int64 row) const { return lse + split * rows + row; }

 private:
  __device__ static int64 row_count(const Params& p, const Sequences& s) {
    const int64 packed = s.total_q;
    return p.heads_q * (s.cu_seqlens_q != nullptr ? packed : int64(p.batch) * p.seqlen_q);
  }
};

// The query row that this warp merges, counted through (batch, heads_q, seqlen_q).
__device__ inline int64 row_of_warp() {
  return (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}

// One warp merges one query row: out = sum_s w_s out_s with w_s = exp(lse_s - lse). find_out() is
// where it goes; not asked sooner, so that the first reads need not wait for it.
template <class Config, class T, class FindOut>
__device__ void combine_row(const Params& p, const Partials<T, Config::head_dim_v>& partials,
                            int64 index, FindOut find_out) {
  using Math = SoftmaxMath<T>;
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 32;
  T max = -Math::infinity();
  for (int s = 0; s < p.num_splits; ++s) max = fmax(max, *partials.lse_row(s, index));
  const T base = max == -Math::infinity() ? T(0) : max;
  T sum = 0;
  for (int s = 0; s < p.num_splits; ++s) {
    sum += Math::exp2((*partials.lse_row(s, index) - base) * Math::log2_e);
  }
  const T normalizer = sum == T(0) ? T(0) : T(1) / sum;

  Element* out = find_out();
  for (int column = lane; column < Config::head_dim_v; column += 32) {
    T value = 0;
    for (int s = 0; s < p.num_splits; ++s) {
      const T weight = Math::exp2((*partials.lse_row(s, index) - base) * Math::log2_e) * normalizer;
      value = fma(weight, partials.out_row(s, index)[column], value);
    }
    out[column] = narrow<Element>(value);
  }
  if (lane == 0 && p.lse != nullptr) {
    static_cast<T*>(p.lse)[index] =
        sum == T(0) ? -Math::infinity() : base + Math::log2(sum) * Math::ln_2;
  }
}

template <class Config>
__device__ void combine(const Params& p) {
  using Element = typename Config::Element;
  const Partials<Accumulator<Element>, Config::head_dim_v> partials(p);
  const int64 index = row_of_warp();
  if (index >= partials.rows) return;
  combine_row<Config>(p, partials, index, [&] {
    const int row = index % p.seqlen_q;
    const int batch_head = index / p.seqlen_q;
    return p.out.head<Element>(batch_head / p.heads_q, batch_head % p.heads_q) +
           row * p.out.row_stride;
  });
}

// Rows that belong to no sequence are left alone.
template <class Config>
__device__ void combine(const Params& p, const Sequences& s) {
  using Element = typename Config::Element;
  const Partials<Accumulator<Element>, Config::head_dim_v> partials(p, s);
  const int64 warp = row_of_warp();
  if (warp >= int64(p.batch) * p.heads_q * p.seqlen_q) return;
  const int row = warp % p.seqlen_q;
  const int batch_head = warp / p.seqlen_q;
  const int batch = batch_head / p.heads_q;
  const int head = batch_head % p.heads_q;
  const Sequence at = find_sequence<Config::page_size>(p, s, batch);
  if (row >= at.seqlen_q) return;
  combine_row<Config>(p, partials, partials.row_index(p, s, at, batch, head, row), [&] {
    return p.out.head<Element>(at.q_batch, head) + (at.q_first + row) * p.out.row_stride;
  });
}
