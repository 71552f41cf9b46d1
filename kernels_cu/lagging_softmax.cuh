// The online softmax of one query row for kernels that start exponentials before they know the
// scores' maximum: the running maximum, here called the base, lags behind (the idea is
// FlashAttention-4's). A floating-point p and sum lose no precision when p grows beyond 1, and most
// of the rescaling, and of the lanes' agreeing on a maximum, is saved. What becomes of a row
// depends on its own scores only.
#pragma once

#include "softmax.cuh"

struct LaggingSoftmaxRow {
  using Math = SoftmaxMath<float>;
  // A row's first base where its scores allow it: those of most inputs lie around zero. p may grow
  // to 2^slack, which float16 holds, but the largest p is never below 1: float16 has no smaller
  // numbers to spare, and many small p make up much of an output.
  static constexpr float first_base = -7;
  static constexpr float slack = 15;

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
    return max > slack || (is_fresh() && max < 0);
  }

  // Takes a maximum in for which the base need not change.
  __device__ void keep_base() { log2_base = base(); }

  // Takes a maximum in. Returns by how much the base changes, and in `rescale` what the output so
  // far is to be multiplied by.
  __device__ float change_base(float max, float& rescale) {
    const bool changes = must_change(max) && max > -Math::infinity();
    const float change = changes ? max : 0;
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
