// The online softmax of one query row (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2,
// section 3.1): scores arrive a tile at a time, the sum and the output are kept relative to a
// running maximum, and the division by the sum waits until the end.
#pragma once

#include "ptx.cuh"

template <class T>
struct SoftmaxMath;

template <>
struct SoftmaxMath<float> {
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr float ln_2 = 0.6931471805599453f;
  // With a scale of zero every score counts the same, but 0 * -inf of a masked one would be NaN.
  static constexpr float smallest_scale = 1e-30f;
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
  static constexpr double smallest_scale = 1e-290;
  static __device__ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
  static __device__ double multiply(double x, double y) { return __dmul_rn(x, y); }
  static __device__ double exp2(double x) { return ::exp2(x); }
  static __device__ double log2(double x) { return ::log2(x); }
};

// softmax_scale with the change of base folded in, so that exp(scale * s) is one exp2.
template <class T>
__device__ T scale_to_log2(double softmax_scale) {
  using Math = SoftmaxMath<T>;
  return T(fmax(softmax_scale * 1.4426950408889634, double(Math::smallest_scale)));
}

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

  static __device__ T probability(T score, T scale_log2, T base) {
    return Math::exp2(fma(score, scale_log2, -base));
  }

  // 1 / sum, or 0 for a row that saw no key. A NaN in the sum stays.
  __device__ T normalizer() const { return sum == T(0) ? T(0) : T(1) / sum; }

  // log(sum(exp(scale * s))), natural.
  __device__ T log_sum_exp(T scale_log2) const {
    return sum == T(0) ? -Math::infinity() : (base(scale_log2) + Math::log2(sum)) * Math::ln_2;
  }
};
