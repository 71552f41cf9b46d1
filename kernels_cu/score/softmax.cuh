// Online softmax of one query row (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2, section
// 3.1): scores arrive one KV tile at a time, the sum and the output are relative to a running
// maximum, and the output is divided by the sum at the end.
#pragma once

#include "score/statistics.cuh"
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

// Scores below this bound, as exponents of two, count as low. Biases of -1e9 or of the lowest
// finite number yield such scores. At this magnitude, at most three bits follow the binary point.
template <class T>
constexpr T low_score = T(-0x1p20);
template <>
constexpr double low_score<double> = -0x1p49;

// Returns softmax_scale * log2(e), so that exp(scale * s) is one exp2.
template <class T>
__device__ T scale_to_log2(double softmax_scale) {
  return T(softmax_scale * SoftmaxMath<double>::log2_e);
}

// P and its row sum are scaled by 2^-headroom until the division by the sum. The accumulated output
// then stays finite for 2^16 values, each the largest of its type. float16 values are too small to
// overflow float32, and float16 could not hold such small p. float64 has range enough.
template <class Element>
constexpr int headroom = 16;
template <>
constexpr int headroom<half_t> = 0;
template <>
constexpr int headroom<double> = 0;

// Returns 2^-exponent, which must be representable as a float.
constexpr float power_of_half(int exponent) {
  return exponent == 0 ? 1.0f : power_of_half(exponent - 1) / 2;
}

// Factor of scores before the mask: the sign of the scale times, for a tiny scale, a power of two.
// The rest of the scale is then a normal number: a subnormal one would become 0, and 0 times the
// -inf of a masked score is NaN. If the scale is 0, the factor is 0: inf and NaN scores become NaN.
template <class Config>
constexpr float score_factor = Config::score_sign * power_of_half(Config::score_shift);

// A sum of powers of two: 2^base * 2^log_sum. Both are -inf if the sum is empty.
template <class T>
struct ExponentSum {
  using Math = SoftmaxMath<T>;

  T base;
  T log_sum;

  // Returns the natural logarithm of the sum.
  __device__ T lse() const {
    return log_sum == -Math::infinity() ? log_sum : (base + log_sum) * Math::ln_2;
  }
};

template <class T, class Statistics = RowStatistics<T>>
struct SoftmaxRow : Statistics {
  using Math = SoftmaxMath<T>;

  T max;  // running maximum of the scores Q K^T, without the scale
  T sum;  // running sum of p = exp2(score * scale_log2 - base)

  __device__ void reset() {
    max = -Math::infinity();
    sum = 0;
    static_cast<Statistics&>(*this) = {};
  }

  // Recomputed for each KV tile: keeping it would cost one register per row.
  __device__ T base(T scale_log2) const {
    return max == -Math::infinity() ? T(0) : Math::multiply(max, scale_log2);
  }

  // Returns whether a KV tile's maximum exceeds the running maximum by more than a factor of
  // 2^slack in p. The running maximum may be stale by that much: p and its sum lose no precision,
  // and most rescaling is saved (an idea of FlashAttention-4). False if both maxima are -inf.
  __device__ bool outgrown_by(T tile_max, T scale_log2, T slack) const {
    return (tile_max - max) * scale_log2 > slack;
  }

  // Updates the running maximum; returns the factor for the sum and the output so far.
  __device__ T update_max(T tile_max, T scale_log2, T slack = 0) {
    // Selects rather than branches: lanes of a warp hold different rows.
    const bool grows = outgrown_by(tile_max, scale_log2, slack);
    const T shrink =
        Math::exp2(Math::multiply(max, scale_log2) - Math::multiply(tile_max, scale_log2));
    const T rescale = grows ? shrink : T(1);
    const T previous_base = base(scale_log2);
    max = grows ? tile_max : max;
    this->shift_base(base(scale_log2) - previous_base, sum, rescale);
    sum *= rescale;
    return rescale;
  }

  // Returns log2(p) of a score. With `Exact`, p of the largest score is exactly 1. The output of a
  // row with one visible key is then that key's value. This takes one more instruction.
  template <bool Exact = false>
  static __device__ T exponent(T score, T scale_log2, T base) {
    if constexpr (Exact) return Math::multiply(score, scale_log2) - base;
    return fma(score, scale_log2, -base);
  }
  template <bool Exact = false>
  static __device__ T probability(T score, T scale_log2, T base) {
    return Math::exp2(exponent<Exact>(score, scale_log2, base));
  }

  // Returns whether no score was above -inf. A NaN score makes this false.
  __device__ bool is_fully_masked() const { return sum == T(0) && max == -Math::infinity(); }

  // Returns the factor for the output. If a score times the scale overflows T, the sum is 0
  // although a key is visible; the output is then 0 / 0, the NaN that the formula gives.
  __device__ T normalizer() const { return is_fully_masked() ? T(0) : T(1) / sum; }

  // Returns the sum of exp(scale * s) over all scores s; `sum` is in units of 2^-Headroom.
  template <int Headroom = 0>
  __device__ ExponentSum<T> exponent_sum(T scale_log2) const {
    if (is_fully_masked()) return {-Math::infinity(), -Math::infinity()};
    return {base(scale_log2), Math::log2(sum / power_of_half(Headroom))};
  }

  // Returns log(sum(exp(scale * s))) over all scores s; `sum` is in units of 2^-Headroom.
  template <int Headroom = 0>
  __device__ T log_sum_exp(T scale_log2) const {
    if (is_fully_masked()) return -Math::infinity();
    return (base(scale_log2) + Math::log2(sum / power_of_half(Headroom))) * Math::ln_2;
  }

  // Returns the row's statistics. `unit` is the factor that converts a score to natural units.
  template <int Headroom = 0>
  __device__ RowSummary<T> summary(T unit) const {
    if (is_fully_masked()) return {};
    return RowSummary<T>::of(*this, sum, Math::log2(sum / power_of_half(Headroom)), unit);
  }
};
