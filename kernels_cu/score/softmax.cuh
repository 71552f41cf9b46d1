// The online softmax of one query row (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2,
// section 3.1): scores arrive a tile at a time, the sum and the output are kept relative to a
// running maximum, and the division by the sum waits until the end.
#pragma once

#include "tile/element.cuh"
#include "ptx/base.cuh"

template <class T>
struct SoftmaxMath;

template <>
struct SoftmaxMath<float> {
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr float ln_2 = 0.6931471805599453f;
  static __device__ float infinity() { return __int_as_float(0x7f800000); }
  // Never fused into a multiply-add, so that the same maximum always gives the same base.
  static __device__ float multiply(float x, float y) { return __fmul_rn(x, y); }
  static __device__ float exp2(float x) { return ptx::ex2_approx(x); }
  static __device__ float log2(float x) { return ::log2f(x); }
};

template <>
struct SoftmaxMath<double> {
  static constexpr double log2_e = 1.4426950408889634;
  static constexpr double ln_2 = 0.6931471805599453;
  static __device__ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
  static __device__ double multiply(double x, double y) { return __dmul_rn(x, y); }
  static __device__ double exp2(double x) { return ::exp2(x); }
  static __device__ double log2(double x) { return ::log2(x); }
};

// Scores below this, as exponents of two, count as low. A bias of -1e9 or of the lowest number makes
// them. From this size on, at most three bits follow the binary point.
template <class T>
constexpr T low_score = T(-0x1p20);
template <>
constexpr double low_score<double> = -0x1p49;

// softmax_scale with the change of base folded in, so that exp(scale * s) is one exp2.
template <class T>
__device__ T scale_to_log2(double softmax_scale) {
  return T(softmax_scale * SoftmaxMath<double>::log2_e);
}

// A probability of 1 counts as 2^-headroom until the division by the sum, which goes by the same
// measure: so 2^16 values as large as their type has them may be summed up and stay finite. float16
// has neither such values nor such small numbers, and float64 the range for both.
template <class Element>
constexpr int headroom = 16;
template <>
constexpr int headroom<half_t> = 0;
template <>
constexpr int headroom<double> = 0;

// 2^-exponent, of exponents that a float can hold.
constexpr float power_of_half(int exponent) {
  return exponent == 0 ? 1.0f : power_of_half(exponent - 1) / 2;
}

// What scores are multiplied by ahead of the mask: the scale's sign, or 0, which makes NaN of what
// is no number, as in the formula; and of a tiny scale a part, since the rest must be a normal
// number for -inf of a masked score to stay that.
template <class Config>
constexpr float score_factor = Config::score_sign * power_of_half(Config::score_shift);

// A sum of powers of two: 2^base * 2^log_sum. Both are -inf if there is nothing to sum up.
template <class T>
struct ExponentSum {
  using Math = SoftmaxMath<T>;

  T base;
  T log_sum;

  // Its natural logarithm.
  __device__ T lse() const {
    return log_sum == -Math::infinity() ? log_sum : (base + log_sum) * Math::ln_2;
  }
};

template <class T>
struct SoftmaxRow {
  using Math = SoftmaxMath<T>;

  T max;  // of the scores, as they come from Q.K^T
  T sum;  // of p = exp2(score * scale_log2 - base)

  __device__ void reset() {
    max = -Math::infinity();
    sum = 0;
  }

  // Computed for each tile anew: kept, it would take a register for each row all the time.
  __device__ T base(T scale_log2) const {
    return max == -Math::infinity() ? T(0) : Math::multiply(max, scale_log2);
  }

  // Whether a tile's maximum passes the running one by more than a factor of 2^slack in p. The
  // maximum may lag behind that much: a floating-point p and sum lose no precision, and most of the
  // rescaling is saved (the idea is FlashAttention-4's). False for -inf - -inf: a row that has seen
  // no key yet.
  __device__ bool outgrown_by(T tile_max, T scale_log2, T slack) const {
    return (tile_max - max) * scale_log2 > slack;
  }

  // Takes a tile's maximum in; returns what the sum and the output so far must be multiplied by.
  __device__ T update_max(T tile_max, T scale_log2, T slack = 0) {
    // Selects rather than branches: lanes of a warp hold different rows.
    const bool grows = outgrown_by(tile_max, scale_log2, slack);
    const T shrink =
        Math::exp2(Math::multiply(max, scale_log2) - Math::multiply(tile_max, scale_log2));
    const T rescale = grows ? shrink : T(1);
    max = grows ? tile_max : max;
    sum *= rescale;
    return rescale;
  }

  // Returns p of a score. With Exact, p of the largest score is exactly 1, so that the output of a
  // row with one key is its value; this takes one more instruction.
  template <bool Exact = false>
  static __device__ T probability(T score, T scale_log2, T base) {
    if constexpr (Exact) return Math::exp2(Math::multiply(score, scale_log2) - base);
    return Math::exp2(fma(score, scale_log2, -base));
  }

  // No key, or none of a score above -inf. A NaN is something.
  __device__ bool saw_nothing() const { return sum == T(0) && max == -Math::infinity(); }

  // What the output is to be multiplied by. Where a score times the scale is beyond T, the sum is
  // 0 although there was something, and 0 / 0 the NaN that the formula gives.
  __device__ T normalizer() const { return saw_nothing() ? T(0) : T(1) / sum; }

  // Returns the sum of exp(scale * s) over all scores s; `sum` is in units of 2^-Headroom.
  template <int Headroom = 0>
  __device__ ExponentSum<T> exponent_sum(T scale_log2) const {
    if (saw_nothing()) return {-Math::infinity(), -Math::infinity()};
    return {base(scale_log2), Math::log2(sum / power_of_half(Headroom))};
  }

  // log(sum(exp(scale * s))), natural, of a sum in units of 2^-Headroom.
  template <int Headroom = 0>
  __device__ T log_sum_exp(T scale_log2) const {
    if (saw_nothing()) return -Math::infinity();
    return (base(scale_log2) + Math::log2(sum / power_of_half(Headroom))) * Math::ln_2;
  }
};
