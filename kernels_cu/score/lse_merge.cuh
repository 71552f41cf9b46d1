// Merging normalized results over parts of the keys: out = sum_s exp(lse_s - lse) out_s with
// lse = log sum_s exp(lse_s).
#pragma once

#include "score/softmax.cuh"

template <class T>
struct LseMerge {
  using Math = SoftmaxMath<T>;

  T base;   // the largest lse, or 0 where that is of no use
  T sum{};  // of the parts' shares

  // Relative to the base.
  __device__ T share_of(T lse) const { return Math::exp2((lse - base) * Math::log2_e); }
  // Nothing was seen where the sum is 0.
  __device__ T normalizer() const { return sum == T(0) ? T(0) : T(1) / sum; }
  __device__ T lse() const {
    return sum == T(0) ? -Math::infinity() : base + Math::log2(sum) * Math::ln_2;
  }
};
