// Sums of a query row from which the tangents of its output and log-sum-exp follow.
//
// With P = exp(t - lse) and the tangent t. of a score t, the tangents are
//
//   lse. = rowsum(P t.)        out. = (P (t. - lse.)) V + P V.
//
// A kernel iterates over the keys once, so it does not know lse. in advance. It therefore sums H V
// with H = P (t. - c), where c is constant in a row, and adds (c - lse.) out at the end:
//
//   lse. - c = rowsum(H)       out. = H V + P V. + (c - lse.) out
//
// H and `out` are rounded. If c is far from lse., compared with the spread of t. in the row, the
// rounding errors of these terms exceed those of the formula. So c is the mean of t. in the first
// processed KV tile with a visible key of the row, weighted by P. If c turns out to be far from
// lse., because later tiles hold most of the weight, the CTA iterates once more, with c = lse. A
// row that attends to one key has H = 0, and the tangent of its output is exactly the tangent of
// that key's value.
#pragma once

#include "backward/lse_exponent.cuh"
#include "backward/softmax_backward.cuh"
#include "tangents/params.cuh"

// Whether tensor cores multiply scaled P and H, because the type holds no small numbers.
template <class Element>
constexpr bool scales_weights = false;
template <>
constexpr bool scales_weights<half_t> = true;

// Sums of one query row, whose pairs are held by `lanes` consecutive lanes. With `Scaled`, P and H
// are multiplied by a power of two, `one`, so that float16 holds small ones. Otherwise `one` is 1.
// With `HasSink`, a sink takes part of the row's weight. The weight of the keys is then summed, too:
// 1 minus the weight of the sink would be inaccurate for small weights of the keys.
template <class T, int lanes, bool Scaled, bool HasSink>
struct TangentRow {
  using Math = SoftmaxMath<T>;
  // The first `one` allows for H up to 2^4, and 2^largest_log2 is within the range of float16.
  static constexpr int first_log2 = Scaled ? 12 : 0;
  static constexpr int largest_log2 = 15;
  // Largest square of the distance of c from lse., in units of the variance of t. in the row.
  static constexpr int farthest = 16;

  T lse_log2;            // log-sum-exp in base 2, minus log2 of `one`
  T center = 0;          // c
  T sum = 0;             // this lane's part of rowsum(H)
  T square = 0;          // this lane's part of rowsum(P (t. - c)^2)
  T total = 0;           // this lane's part of rowsum(P), with HasSink
  bool has_key = false;  // whether a key with P > 0 was found
  int one_log2 = first_log2;

  // Sets the log-sum-exp in base 2; +inf for a row without a tangent.
  __device__ void begin(T its_lse_log2) { lse_log2 = its_lse_log2 - first_log2; }

  __device__ T one() const { return Scaled ? T(__int_as_float((127 + one_log2) << 23)) : T(1); }

  // Sets `center` if no earlier KV tile had a visible key of the row. probability(n) and tangent(n)
  // are P and t. of the n-th of the lane's `count` pairs in the KV tile. All lanes of a warp must
  // call this function together.
  template <int count, class Probability, class Tangent>
  __device__ void find_center(Probability probability, Tangent tangent) {
    T total = 0, weighted = 0, largest = 0, its_tangent = 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const T p = probability(n), x = tangent(n);
      total += p;
      weighted = fma(p, x, weighted);
      if (p > largest) {
        largest = p;
        its_tangent = x;
      }
    }
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) {
      total += __shfl_xor_sync(~0u, total, bit);
      weighted += __shfl_xor_sync(~0u, weighted, bit);
      const T other = __shfl_xor_sync(~0u, largest, bit);
      const T other_tangent = __shfl_xor_sync(~0u, its_tangent, bit);
      if (other > largest) {
        largest = other;
        its_tangent = other_tangent;
      }
    }
    if (has_key) return;
    has_key = total != 0;
    // The mean over a single key would be rounded.
    if (has_key) center = total == largest ? its_tangent : weighted / total;
  }

  // Returns H, and adds it to the sums.
  __device__ T add(T probability, T tangent) {
    const T distance = tangent - center;
    const T h = probability * distance;
    sum += h;
    square = fma(h, distance, square);
    if constexpr (HasSink) total += probability;
    return h;
  }

  // Sums the row over its lanes. All lanes of a warp must call this function together.
  __device__ void add_lanes() {
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) {
      sum += __shfl_xor_sync(~0u, sum, bit);
      square += __shfl_xor_sync(~0u, square, bit);
      if constexpr (HasSink) total += __shfl_xor_sync(~0u, total, bit);
    }
    if constexpr (Scaled) {
      sum /= one();
      square /= one();
      if constexpr (HasSink) total /= one();
    }
  }

  // Returns the tangent of the row's log-sum-exp.
  __device__ T lse_tangent() const { return sum + center * weight(); }

  // Returns lse. - c.
  __device__ T distance() const { return HasSink ? lse_tangent() - center : sum; }

  // Returns whether H should be summed again, after restart(): c is far from lse., or H exceeds the
  // range of float16. P is at most 1, so that H is at most the square root of `square`.
  __device__ bool is_inaccurate() const {
    const T d = distance();
    bool is_far = d * d * weight() > farthest * spread();
    if constexpr (Scaled) is_far |= square > Math::exp2(T(2 * (largest_log2 - one_log2)));
    return is_far;
  }

  // Clears the sums, and moves c to lse.
  __device__ void restart() {
    if constexpr (Scaled) {
      const T size = Math::log2(spread()) / 2;
      // A NaN or infinite size leaves `one` as it is.
      if (size > largest_log2 - one_log2 && size < 100) {
        const int log2 = largest_log2 - static_cast<int>(size) - 1;
        lse_log2 += one_log2 - log2;
        one_log2 = log2;
      }
    }
    center += distance();
    sum = square = total = 0;
  }

 private:
  // Returns the weight of the keys.
  __device__ T weight() const { return HasSink ? total : T(1); }

  // Returns rowsum(P (t. - lse.)^2).
  __device__ T spread() const {
    const T d = distance();
    return square - 2 * d * sum + d * d * weight();
  }
};
