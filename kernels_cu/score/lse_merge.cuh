// Merging of normalized outputs over KV splits: out = sum_s exp(lse_s - lse) out_s with
// lse = log sum_s exp(lse_s).
#pragma once

#include "score/softmax.cuh"

// With `Pairs`, the lse of a split is an `ExponentSum`.
template <class T, bool Pairs = false>
struct LseMerge {
  using Math = SoftmaxMath<T>;

  // Largest lse of all splits or, with `Pairs`, largest `base` of their `ExponentSum`s; 0 if -inf.
  T base;
  T sum{};  // sum of the splits' weights

  // Returns the weight of a split with this lse, relative to `base`.
  __device__ T weight_of(T lse) const { return Math::exp2((lse - base) * Math::log2_e); }
  // The difference of two close bases is exact, however large they are.
  __device__ T weight_of(const ExponentSum<T>& lse) const {
    return Math::exp2((lse.base - base) + lse.log_sum);
  }
  // The sum is 0 if no split has a visible key.
  __device__ T normalizer() const { return sum == T(0) ? T(0) : T(1) / sum; }
  __device__ T lse() const {
    if constexpr (Pairs) return ExponentSum<T>{base, Math::log2(sum)}.lse();
    return sum == T(0) ? -Math::infinity() : base + Math::log2(sum) * Math::ln_2;
  }
};
