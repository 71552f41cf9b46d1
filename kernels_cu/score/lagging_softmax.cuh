// The online softmax of one query row for a kernel that never looks for maxima: the running
// maximum, here called the base, lags behind (the idea is FlashAttention-4's) until a sum of p says
// that it is too small. A floating-point p and sum lose no precision when p grows beyond 1, and
// most of the rescaling, and of the lanes' agreeing on a maximum, is saved. What becomes of a row
// depends on its own scores only.
#pragma once

#include "score/softmax.cuh"

// Of the four lanes that hold a row.
__device__ inline bool any_of_lanes(bool x) {
  return __ballot_sync(~0u, x) >> (threadIdx.x & 28) & 15;
}

template <class Element>
struct LaggingSoftmaxRow {
  using Math = SoftmaxMath<float>;
  // The exponent of a row's largest p lies between these two. float16 holds 2^15, but it has no
  // numbers below 1 to spare: many small p make up much of an output. bfloat16 has all exponents of
  // float32, and values with which p of 1 would overflow.
  static constexpr int highest = headroom<Element> ? -headroom<Element> : 15;
  static constexpr int lowest = highest - 15;
  // A row's first base where its scores allow it. Those of most inputs lie around zero: then a
  // lane's 32 p of a block sum up to about 2^12 of the 2^15 that are allowed, and one key is large
  // enough from 2^-1 on.
  static constexpr float first_base = -6 - lowest;

  float base;  // p = exp2(score * scale_log2 - base)
  float sum;   // of this lane's p

  __device__ void reset() {
    base = first_base;
    sum = 0;
  }

  // What a lane's p of a block sum up to: whether one of them may be larger than 2^highest, and
  // whether one of so many is at least 2^lowest. A NaN is neither.
  __device__ static bool is_too_large(float sum) { return sum > power_of_two(highest); }
  __device__ static bool is_large_enough(float sum, int count) {
    return sum >= count * power_of_two(lowest);
  }
  __device__ static constexpr float power_of_two(int exponent) {
    return exponent < 0 ? power_of_half(-exponent) : 1 / power_of_half(exponent);
  }

  // Whether the row, four lanes', has seen no score above -inf: the largest p is never 0.
  __device__ bool is_fresh() const { return !any_of_lanes(sum != 0); }

  // The base of a row that sees only this score, times the scale: p is a power of two to within
  // float32's rounding, and a 16-bit result exactly the value. The lanes that do not hold the score
  // need not know: they have no p to sum up, nor the log-sum-exp to write. A score of -inf is none.
  __device__ void see_only(float score) {
    if (score > -Math::infinity()) base = score - (highest - 1);
  }

  // Takes the maximum of a block, relative to the base. The base changes if p have outgrown it, or
  // if the first p are too small. Returns the change, and in `rescale` the factor for the output so
  // far. With HasLow, a low score never becomes the base: the change is subtracted from the scores of
  // this block afterwards, the new base from those of later blocks at once, and at this size the two
  // round differently.
  template <bool HasLow>
  __device__ float change_base(float max, bool outgrown, bool is_fresh, float& rescale) {
    const bool changes =
        outgrown || (is_fresh && max < lowest && max > (HasLow ? low_score<float> : -Math::infinity()));
    const float change = changes ? max - lowest : 0;
    rescale = changes && !is_fresh ? Math::exp2(-change) : 1;
    base += change;
    sum *= rescale;
    return change;
  }

  // Returns the sum of exp(scale * s) over all scores s. A NaN in the sum stays.
  __device__ ExponentSum<float> exponent_sum() const {
    if (sum == 0) return {-Math::infinity(), -Math::infinity()};
    return {base, Math::log2(sum)};
  }

  // Returns the natural logarithm of that sum.
  __device__ float log_sum_exp() const {
    return sum == 0 ? -Math::infinity() : (base + Math::log2(sum)) * Math::ln_2;
  }
};
