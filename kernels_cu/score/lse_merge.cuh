// Merging normalized results over parts of the keys: out = sum_s exp(lse_s - lse) out_s with
// lse = log sum_s exp(lse_s).
#pragma once

#include "score/softmax.cuh"

// With Pairs, the lse of a part is an `ExponentSum`.
template <class T, bool Pairs = false>
struct LseMerge {
  using Math = SoftmaxMath<T>;

  // The largest lse; with Pairs the largest base, in exponents of two. 0 where that is of no use.
  T base;
  T sum{};  // of the parts' shares

  // Relative to the base.
  __device__ T share_of(T lse) const { return Math::exp2((lse - base) * Math::log2_e); }
  // The difference of two bases that are near each other is exact, whatever their size.
  __device__ T share_of(const ExponentSum<T>& lse) const {
    return Math::exp2((lse.base - base) + lse.log_sum);
  }
  // Nothing was seen where the sum is 0.
  __device__ T normalizer() const { return sum == T(0) ? T(0) : T(1) / sum; }
  __device__ T lse() const {
    if constexpr (Pairs) return ExponentSum<T>{base, Math::log2(sum)}.lse();
    return sum == T(0) ? -Math::infinity() : base + Math::log2(sum) * Math::ln_2;
  }
};
