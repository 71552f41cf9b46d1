// The online softmax of one query row for kernels that start exponentials before they know the
// scores' maximum: the running maximum, here called the base, lags behind (the idea is
// FlashAttention-4's). A floating-point p and sum lose no precision when p grows beyond 1, and most
// of the rescaling, and of the lanes' agreeing on a maximum, is saved. What becomes of a row
// depends on its own scores only.
#pragma once

#include "softmax.cuh"

// The bits of floats, of which one instruction finds the largest of three. Their order is right as
// far as comparing with bounds goes: where these are not negative, negative numbers are in the
// wrong order among themselves, where they are negative the others.
template <bool NegativeBounds>
struct OrderedBits {
  using type = int;
  __device__ static type of(float x) { return __float_as_int(x); }
  __device__ static type max(type a, type b) { return ::max(a, b); }
  __device__ static bool is_outside(type x, bool has_lowest, float lowest, float highest) {
    return x > of(highest) || (has_lowest && x < of(lowest));
  }
};
template <>
struct OrderedBits<true> {
  using type = unsigned;
  __device__ static type of(float x) { return __float_as_uint(x); }
  __device__ static type max(type a, type b) { return ::min(a, b); }
  // One comparison, as counted from the highest what is above it comes last.
  __device__ static bool is_outside(type x, bool has_lowest, float lowest, float highest) {
    return x - of(highest) > (has_lowest ? of(lowest) : ~0u) - of(highest);
  }
};

template <class Element>
struct LaggingSoftmaxRow {
  using Math = SoftmaxMath<float>;
  // The exponent of a row's largest p lies between these two. float16 holds 2^15, but it has no
  // numbers below 1 to spare: many small p make up much of an output. bfloat16 has all exponents of
  // float32, and values with which p of 1 would overflow.
  static constexpr float highest = headroom<Element> ? -headroom<Element> : 15;
  static constexpr float lowest = highest - 15;
  // A row's first base where its scores allow it: those of most inputs lie around zero.
  static constexpr float first_base = -7 - lowest;

  float log2_base;  // p = exp2(score * scale_log2 - base); -inf before the row's first key
  float sum;

  __device__ void reset() {
    log2_base = -Math::infinity();
    sum = 0;
  }

  __device__ float base() const { return is_fresh() ? first_base : log2_base; }

  __device__ bool is_fresh() const { return log2_base == -Math::infinity(); }

  // Whether the base must change for scores of this maximum, relative to the base.
  __device__ bool must_change(float max) const {
    return max > highest || (is_fresh() && max < lowest);
  }

  // Takes a maximum in for which the base need not change.
  __device__ void keep_base() { log2_base = base(); }

  // Takes a maximum in. Returns by how much the base changes, and in `rescale` what the output so
  // far is to be multiplied by.
  __device__ float change_base(float max, float& rescale) {
    const bool changes = must_change(max) && max > -Math::infinity();
    const float change = changes ? max - lowest : 0;
    rescale = changes && !is_fresh() ? Math::exp2(-change) : 1;
    log2_base = max == -Math::infinity() ? log2_base : base() + change;
    sum *= rescale;
    return change;
  }

  // log(sum(exp(scale * s))), natural. A NaN in the sum stays.
  __device__ float log_sum_exp() const {
    return sum == 0 ? -Math::infinity() : (base() + Math::log2(sum)) * Math::ln_2;
  }
};
