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
// H and `out` are rounded. The terms that they contribute cancel less if c is close to lse., so
// that the result is more accurate. c is the t. of the largest P in the first processed KV tile
// with a visible key of the row. A row that attends to one key has H = 0, and the tangent of its
// output is exactly the tangent of that key's value.
#pragma once

#include "backward/softmax_backward.cuh"
#include "tangents/params.cuh"

// Returns the log-sum-exp of a row in base 2, from which P follows. For a row that does not exist
// or that has no tangent, returns +inf, so that its P is 0. Rows with scores of very large
// magnitude count as padding, as in the backward pass (preprocess/preprocess.cuh).
template <class Config, class T = Accumulator<typename Config::Element>>
__device__ T lse_log2_of(const TangentParams& p, const Sequence& sequence, int head, int row) {
  const T infinity = SoftmaxMath<T>::infinity();
  if (row >= sequence.seqlen_q) return infinity;
  const T lse = static_cast<const T*>(p.lse)[lse_index<Config>(p, sequence, head, row)];
  if (lse == -infinity) return infinity;
  if constexpr (Config::Mods::changes_scores) {
    const T lse_log2 = mod_finite_sum(lse, SoftmaxMath<T>::log2_e, T(0));
    const T size = lse_log2 < 0 ? -lse_log2 : lse_log2;
    return size > -low_score<T> && size < infinity ? infinity : lse_log2;
  } else {
    return lse * SoftmaxMath<T>::log2_e;
  }
}

// Sums of one query row, whose pairs are held by `lanes` consecutive lanes.
template <class T, int lanes>
struct TangentRow {
  T lse_log2;
  T center = 0;         // c
  T sum = 0;            // this lane's part of rowsum(H)
  bool has_key = false;  // whether a key with P > 0 was found

  // Sets `center` if no earlier KV tile had a visible key of the row. probability(n) and tangent(n)
  // are P and t. of the n-th of the lane's `count` pairs in the KV tile. If even the largest P is
  // below `least`, the tile says little about lse., and `center` stays 0. All lanes of a warp must
  // call this function together.
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
      // Ties are broken by the tangent, so that all lanes choose the same pair in any order.
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

  // Sums the row over its lanes. All lanes of a warp must call this function together.
  __device__ void add_lanes() {
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  }

  // Returns lse. - c. With a sink, the sum of P in a row is 1 minus the weight of the sink, so that
  // rowsum(H) is larger than lse. - c by c times this weight.
  template <class Config>
  __device__ T distance(const TangentParams& p, int head) const {
    if constexpr (Config::sinks) {
      return sum - center * sink_weight(p, head);
    } else {
      return sum;
    }
  }

 private:
  // This function is a template because `mods.sinks` exists only in units with modifications.
  template <class AnyParams>
  __device__ T sink_weight(const AnyParams& p, int head) const {
    using Math = SoftmaxMath<T>;
    return Math::exp2(T(p.mods.sinks.at(head)) * Math::log2_e - lse_log2);
  }
};
