// Statistics of query rows that a call may return in addition to the log-sum-exp: the largest score
// (`Config::max_logits`) and the entropy of the weights (`Config::entropy`). The softmax of a row
// accumulates them together with its sum. If a call returns no statistics, all structs and
// functions here are empty.
//
// The entropy follows from the row's sum of p and from its moment, the sum of p * exponent. An
// exponent is a power of two relative to the row's base: p = c * 2^exponent with a constant c. Then
//
//   -sum_j w_j log2(w_j) = log2(sum / c) - moment / sum   with w_j = p_j / sum.
#pragma once

template <class T>
struct SoftmaxMath;

template <class T, bool enabled>
struct LargestScore {
  __device__ void include_score(T) {}
};

template <class T>
struct LargestScore<T, true> {
  T largest = -SoftmaxMath<T>::infinity();

  // `score` may be the maximum of several scores. A NaN is ignored here, but the row's sum is NaN.
  __device__ void include_score(T score) { largest = fmax(largest, score); }
};

template <class T, bool enabled>
struct ExponentMoment {
  __device__ void include_exponent(T, T) {}
  __device__ void shift_base(T, T, T) {}
};

template <class T>
struct ExponentMoment<T, true> {
  // 2^exponent is 0 in every type for this exponent and lower ones. Exponents of masked pairs are
  // -inf. Clamped to this bound, they add 0 to the moment instead of NaN.
  static constexpr T least_exponent = -2048;

  T moment = 0;

  __device__ void include_exponent(T p, T exponent) {
    moment = fma(p, fmax(exponent, least_exponent), moment);
  }

  // Raises the base by `change`. `sum` is the row's sum before it is multiplied by `factor`.
  __device__ void shift_base(T change, T sum, T factor) {
    moment = factor * fma(-fmin(change, -least_exponent), sum, moment);
  }
};

// Statistics that a softmax accumulates for a row, in addition to its sum.
template <class T, bool max_logits = false, bool entropy = false>
struct RowStatistics : LargestScore<T, max_logits>, ExponentMoment<T, entropy> {
  static constexpr bool has_largest = max_logits;
  static constexpr bool has_moment = entropy;
};

template <class Config, class T>
using StatisticsOf = RowStatistics<T, Config::max_logits, Config::entropy>;

template <class Config>
constexpr bool has_statistics = Config::max_logits || Config::entropy;

// Statistics of a row in natural units, as the call returns them.
template <class T>
struct RowSummary {
  using Math = SoftmaxMath<T>;

  T max_logit = -Math::infinity();
  T entropy = 0;

  // Returns the summary of a row from its statistics and its sum, which is not 0. `log_sum` is log2
  // of the sum of 2^exponent. `unit` is the factor that converts a score to natural units.
  template <class Statistics>
  __device__ static RowSummary of(const Statistics& row, T sum, T log_sum, T unit) {
    RowSummary result;
    // A NaN in the sum comes from a score that is NaN or inf.
    if constexpr (Statistics::has_largest) result.max_logit = sum == sum ? row.largest * unit : sum;
    if constexpr (Statistics::has_moment) {
      const T entropy = (log_sum - row.moment / sum) * Math::ln_2;
      // Rounding may make the entropy of a row with one key negative. A NaN stays.
      result.entropy = entropy < T(0) ? T(0) : entropy;
    }
    return result;
  }

  // Accounts for a sink: the weights of the keys now sum to `weight` instead of 1.
  __device__ void scale_weights(T weight) { entropy = part_of_entropy(weight, entropy); }

  // Adds the keys of a KV split, whose weights sum to `weight` in the whole row.
  __device__ void add_split(T weight, const RowSummary& split) {
    max_logit = fmax(max_logit, split.max_logit);
    entropy += part_of_entropy(weight, split.entropy);
  }

 private:
  // Returns -sum(w * log(w)) of weights w that sum to `weight`. `entropy` is the entropy of the
  // same weights, normalized to the sum 1.
  __device__ static T part_of_entropy(T weight, T entropy) {
    return weight == T(0) ? T(0) : weight * (entropy - Math::log2(weight) * Math::ln_2);
  }
};

// Writes the row statistics that the call returns. `index` is the index of the row in lse.
template <class Config, class T, class AnyParams>
__device__ void write_statistics(const AnyParams& p, long long index,
                                 const RowSummary<T>& summary) {
  if constexpr (Config::max_logits) static_cast<T*>(p.max_logits)[index] = summary.max_logit;
  if constexpr (Config::entropy) static_cast<T*>(p.entropy)[index] = summary.entropy;
}
