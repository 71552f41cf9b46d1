// Splitting the keys of one query tile over several thread blocks, and merging their results. The
// workspace holds, for each split, a normalized partial output (batch, heads_q, seqlen_q,
// head_dim_v) and then, for each split, a log-sum-exp (batch, heads_q, seqlen_q), in the
// accumulator's type.
#pragma once

#include "element.cuh"
#include "params.cuh"
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

  __device__ static int64 row_index(const Params& p, int batch, int head, int row) {
    return (int64(batch) * p.heads_q + head) * p.seqlen_q + row;
  }
  __device__ T* out_row(int split, int64 row) const {
    return out + (split * rows + row) * HeadDimV;
  }
  __device__ T* lse_row(int split, int64 row) const { return lse + split * rows + row; }
};

// One warp merges one query row: out = sum_s w_s out_s with w_s = exp(lse_s - lse).
template <class Config>
__device__ void combine(const Params& p) {
  using T = Accumulator<typename Config::Element>;
  using Math = SoftmaxMath<T>;
  const Partials<T, Config::head_dim_v> partials(p);
  const int64 index = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (index >= partials.rows) return;

  T max = -Math::infinity();
  for (int s = 0; s < p.num_splits; ++s) max = fmax(max, *partials.lse_row(s, index));
  const T base = max == -Math::infinity() ? T(0) : max;
  T sum = 0;
  for (int s = 0; s < p.num_splits; ++s) {
    sum += Math::exp2((*partials.lse_row(s, index) - base) * Math::log2_e);
  }
  const T normalizer = sum == T(0) ? T(0) : T(1) / sum;

  const int row = index % p.seqlen_q;
  const int batch_head = index / p.seqlen_q;
  using Element = typename Config::Element;
  Element* out =
      p.out.head<Element>(batch_head / p.heads_q, batch_head % p.heads_q) + row * p.out.row_stride;
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
