// Online softmax of one query row with lazy rescaling (an idea of FlashAttention-4): as a rule, no
// row maximum is computed. P uses the previous base, which follows from a possibly stale maximum,
// until the sum of P shows that the base is too small. This saves most rescaling and most
// reductions over lanes, and a floating-point P loses no precision when it exceeds 1. A row's
// result depends on its own scores only.
#pragma once

#include "score/softmax.cuh"

// Returns whether x is true in any of the four lanes that hold a row.
__device__ inline bool any_of_lanes(bool x) {
  return __ballot_sync(~0u, x) >> (threadIdx.x & 28) & 15;
}

template <class Element, class Statistics = RowStatistics<float>>
struct LazySoftmaxRow : Statistics {
  using Math = SoftmaxMath<float>;
  // Range of the exponent of a row's largest p. For float16 it is 0 to 15: values below 1 are left
  // for small p, many of which may make up most of an output. For bfloat16 it is -31 to -16: with
  // p = 1, an output that sums the largest bfloat16 values would overflow float32. float32 needs
  // exponents near 0: float32 rounds an exponent near -16 by up to 2^-20, and p by as much. So its
  // range is -6 to 9 before exp2, and p is multiplied by 2^-p_shift afterwards, which is exact.
  static constexpr bool shifts_p = sizeof(Element) == 4;
  static constexpr int highest = shifts_p ? 9 : headroom<Element> ? -headroom<Element> : 15;
  static constexpr int lowest = highest - 15;
  static constexpr int p_shift = shifts_p ? headroom<Element> + highest : 0;
  // Base of a row before its first KV tile. It stays as long as the row's largest p is within the
  // range above. Scores are mostly near 0, where p is about 2^(lowest + 6). In a tile of 128 keys,
  // the sum of a lane's 32 p is then about 2^(lowest + 11), below its limit 2^highest. A single key
  // is large enough if its score, as an exponent of two, is at least -1.
  static constexpr float first_base = -6 - lowest;

  float base;  // p = exp2(score * scale_log2 - base) * 2^-p_shift
  float sum;   // sum of this lane's p

  __device__ void reset() {
    base = first_base;
    sum = 0;
    static_cast<Statistics&>(*this) = {};
  }

  // Returns p, given the score as an exponent of two relative to the base.
  __device__ static float probability(float exponent) {
    const float p = ptx::ex2_approx(exponent);
    if constexpr (shifts_p) return p * power_of_half(p_shift);
    return p;
  }

  // Both functions take the sum of a lane's `count` p of a KV tile. The first returns whether the
  // exponent of a p may exceed `highest`, the second whether that of some p is at least `lowest`.
  // Both are false for NaN.
  __device__ static bool is_too_large(float sum) { return sum > power_of_two(highest - p_shift); }
  __device__ static bool is_large_enough(float sum, int count) {
    return sum >= count * power_of_two(lowest - p_shift);
  }
  __device__ static constexpr float power_of_two(int exponent) {
    return exponent < 0 ? power_of_half(-exponent) : 1 / power_of_half(exponent);
  }

  // Returns whether all scores of the row so far are -inf. (Otherwise its largest p is not 0.)
  __device__ bool is_empty() const { return !any_of_lanes(sum != 0); }

  // Sets the base of a row with one visible key, given its score times the scale. P is then a power
  // of two to within float32's rounding, and a 16-bit result is exactly the key's value. Only the
  // lane that holds the key needs the base: the others neither sum p nor write the log-sum-exp.
  __device__ void set_only_key(float score) {
    if (score > -Math::infinity()) base = score - (highest - 1);
  }

  // Updates the base from `max`, the maximum of a KV tile relative to the base. The base changes if
  // p has outgrown it, or if the first p are too small. Returns the change, and sets `rescale` to
  // the factor for the output so far. With `HasLow`, a low score (`low_score`) never becomes the
  // base: the caller subtracts the change from this tile's scores, but the new base from later
  // scores, and at that magnitude the two round differently.
  template <bool HasLow>
  __device__ float change_base(float max, bool outgrown, bool is_empty, float& rescale) {
    const bool changes = outgrown || (is_empty && max < lowest &&
                                      max > (HasLow ? low_score<float> : -Math::infinity()));
    const float change = changes ? max - lowest : 0;
    rescale = changes && !is_empty ? Math::exp2(-change) : 1;
    base += change;
    this->shift_base(change, sum, rescale);
    sum *= rescale;
    return change;
  }

  // Returns the sum of exp(scale * s) over all scores s. A NaN in the sum stays.
  __device__ ExponentSum<float> exponent_sum() const {
    if (sum == 0) return {-Math::infinity(), -Math::infinity()};
    return {base, log2_of_sum()};
  }

  // Returns the natural logarithm of the sum that `exponent_sum()` returns.
  __device__ float log_sum_exp() const {
    return sum == 0 ? -Math::infinity() : (base + log2_of_sum()) * Math::ln_2;
  }

  // Returns the row's statistics. `unit` is the factor that converts a score to natural units.
  __device__ RowSummary<float> summary(float unit) const {
    if (sum == 0) return {};
    return RowSummary<float>::of(*this, sum, log2_of_sum(), unit);
  }

 private:
  __device__ float log2_of_sum() const { return Math::log2(sum / power_of_half(p_shift)); }
};
