// The online softmax of one query row for kernels that start exponentials before they know the
// scores' maximum: the running maximum, here called the base, lags behind (the idea is
// FlashAttention-4's). A floating-point p and sum lose no precision when p grows beyond 1, and most
// of the rescaling, and of the lanes' agreeing on a maximum, is saved. What becomes of a row
// depends on its own scores only.
#pragma once

#include "score/softmax.cuh"

// How scores are compared with bounds: as floats, or by their bits, of which one instruction finds
// the largest of three. The bits' order is right as far as comparing with the bounds goes: where
// these are not negative, negative numbers are in the wrong order among themselves, where they are
// negative the others. Nothing is less than `least()`.
template <bool ByBits, bool NegativeBounds>
struct ScoreOrder {
  using type = float;
  __device__ static type least() { return -SoftmaxMath<float>::infinity(); }
  __device__ static type of(float x) { return x; }
  __device__ static type max(type a, type b) { return fmaxf(a, b); }
  __device__ static bool is_less(type a, type b) { return a < b; }
};
template <>
struct ScoreOrder<true, false> {
  using type = int;
  __device__ static type least() { return -0x7fffffff - 1; }
  __device__ static type of(float x) { return __float_as_int(x); }
  __device__ static type max(type a, type b) { return ::max(a, b); }
  __device__ static bool is_less(type a, type b) { return a < b; }
};
template <>
struct ScoreOrder<true, true> {
  using type = unsigned;
  __device__ static type least() { return ~0u; }
  __device__ static type of(float x) { return __float_as_uint(x); }
  __device__ static type max(type a, type b) { return ::min(a, b); }
  __device__ static bool is_less(type a, type b) { return a > b; }
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

  float base;  // p = exp2(score * scale_log2 - base)
  float sum;   // of this lane's p

  __device__ void reset() {
    base = first_base;
    sum = 0;
  }

  // Whether the row, four lanes', has seen no score above -inf: the largest p is never 0.
  __device__ bool is_fresh() const {
    return (__ballot_sync(~0u, sum != 0) >> (threadIdx.x & 28) & 15) == 0;
  }

  // The base of a row that sees only this score, times the scale: p is a power of two to within
  // float32's rounding, and a 16-bit result exactly the value. The lanes that do not hold the score
  // need not know: they have no p to sum up, nor the log-sum-exp to write.
  __device__ void see_only(float score) { base = score - (highest - 1); }

  // Takes a maximum in, relative to the base, which changes where it must. Returns by how much, and
  // in `rescale` what the output so far is to be multiplied by.
  __device__ float change_base(float max, bool is_fresh, float& rescale) {
    const bool changes = max > highest || (is_fresh && max < lowest && max > -Math::infinity());
    const float change = changes ? max - lowest : 0;
    rescale = changes && !is_fresh ? Math::exp2(-change) : 1;
    base += change;
    sum *= rescale;
    return change;
  }

  // log(sum(exp(scale * s))), natural. A NaN in the sum stays.
  __device__ float log_sum_exp() const {
    return sum == 0 ? -Math::infinity() : (base + Math::log2(sum)) * Math::ln_2;
  }
};
