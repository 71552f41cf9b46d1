// Sums of a query row from which the tangents of its output and log-sum-exp follow.
//
// With P = exp(t - lse) and the tangent t. of a score t, the tangents are
//
//   lse. = rowsum(P t.)        out. = (P (t. - lse.)) V + P V.
//
// A kernel iterates over the keys once, so it does not know lse. in advance. It sums H V with
// H = P (t. - c) instead, where c is constant in a row, and adds (c - lse.) out at the end:
//
//   lse. - c = rowsum(H)       out. = H V + P V. + (c - lse.) out
//
// H and `out` are rounded. Their errors cancel less the closer c is to lse. So c is the tangent of
// the largest P in the row's first KV tile with a visible key. A row that attends to one key has
// H = 0, and the tangent of its output is exactly that of the value.
#pragma once

#include "backward/lse_exponent.cuh"
#include "backward/softmax_backward.cuh"
#include "tangents/params.cuh"

// `lanes` consecutive lanes hold the pairs of a row.
template <class T, int lanes>
struct TangentRow {
  T lse_log2;
  T center = 0;         // c
  T sum = 0;            // this lane's part of rowsum(H)
  bool has_key = false;  // whether a key with P > 0 was found

  // Sets `center` if the row has had no key so far. probability(n) and tangent(n) are P and t. of
  // the lane's n-th of `count` pairs in a KV tile. If even the largest P is below `least`, the tile
  // says little about lse., and `center` stays 0. All lanes of a warp call this together.
  template <int count, class Probability, class Tangent>
  __device__ void find_center(T least, Probability probability, Tangent tangent) {
    T total = 0, largest = 0, its_tangent = 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const T p = probability(n), x = tangent(n);
      total += p;
      if (p > largest || (p == largest && x > its_tangent)) {
        largest = p;
        its_tangent = x;
      }
    }
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) {
      total += __shfl_xor_sync(~0u, total, bit);
      const T other = __shfl_xor_sync(~0u, largest, bit);
      const T other_tangent = __shfl_xor_sync(~0u, its_tangent, bit);
      // All lanes must choose the same pair, in whatever order they compare.
      if (other > largest || (other == largest && other_tangent > its_tangent)) {
        largest = other;
        its_tangent = other_tangent;
      }
    }
    if (has_key) return;
    has_key = total != 0;
    center = has_key && largest >= least ? its_tangent : T(0);
  }

  // Returns H, and adds it to the sum.
  __device__ T add(T probability, T tangent) {
    const T h = probability * (tangent - center);
    sum += h;
    return h;
  }

  // Completes the sum of the row. All lanes of a warp call this together.
  __device__ void add_lanes() {
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  }

  // Returns lse. - c. The weight of the sink is missing in the row sum of P, which lse. is a mean
  // over, so that the sum of H contains c times this weight.
  template <class Config>
  __device__ T distance(const TangentParams& p, int head) const {
    if constexpr (Config::sinks) {
      return sum - center * sink_weight(p, head);
    } else {
      return sum;
    }
  }

 private:
  // A template, because `mods.sinks` exists only in translation units with modifications.
  template <class AnyParams>
  __device__ T sink_weight(const AnyParams& p, int head) const {
    using Math = SoftmaxMath<T>;
    return Math::exp2(T(p.mods.sinks.at(head)) * Math::log2_e - lse_log2);
  }
};
