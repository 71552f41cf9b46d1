// Softmax of one KV tile, for the two rows of which a lane of a consumer holds elements. P uses the
// previous base, and the row sums of P show whether that base is still valid. Row maxima are
// computed only if it is not.
#pragma once

#include "forward/hopper/cta.cuh"
#include "params.cuh"
#include "ptx/base.cuh"
#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "score/lazy_softmax.cuh"
#include "score/modify.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

// Returns the largest score of this lane in a row. Four independent chains hide the latency.
template <int Bc>
__device__ inline float largest_of_lane(const float (&scores)[Bc / 2], int half) {
  constexpr int chains = 4;
  float max[chains];
#pragma unroll
  for (int j = 0; j < Bc / 8; ++j) {
    const float two = fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]);
    max[j % chains] = j < chains ? two : fmaxf(two, max[j % chains]);
  }
#pragma unroll
  for (int i = 1; i < min(chains, Bc / 8); ++i) max[0] = fmaxf(max[0], max[i]);
  return max[0];
}

// Returns the bits of the largest score of this lane in a row, provided that this score is not
// negative. If all scores are negative, the result is the smallest of them, because negative floats
// and their bits have opposite orders. One instruction compares three integers.
template <int Bc>
__device__ inline int largest_bits_of_lane(const float (&scores)[Bc / 2], int half) {
  constexpr int chains = 2;
  int max[chains];
#pragma unroll
  for (int j = 0; j < Bc / 8; ++j) {
    const int first = __float_as_int(scores[4 * j + 2 * half]);
    const int second = __float_as_int(scores[4 * j + 2 * half + 1]);
    max[j % chains] =
        j < chains ? ::max(first, second) : ::max(::max(first, second), max[j % chains]);
  }
  return ::max(max[0], max[1]);
}

// Returns the bits of the largest score of this lane in a row, provided that all scores are
// negative. Otherwise, the result is the smallest score that is not negative.
template <int Bc>
__device__ inline int largest_negative_bits_of_lane(const float (&scores)[Bc / 2], int half) {
  unsigned min = ~0u;
#pragma unroll
  for (int j = 0; j < Bc / 8; ++j) {
    const unsigned first = __float_as_uint(scores[4 * j + 2 * half]);
    const unsigned second = __float_as_uint(scores[4 * j + 2 * half + 1]);
    min = ::min(::min(first, second), min);
  }
  return min;
}

// `Transposed` selects the specialization for float8 (float8/softmax.cuh), whose V is transposed.
template <class Config, bool Transposed = HopperCta<Config>::transposes_values>
struct HopperSoftmax {
  using Row = LazySoftmaxRow<typename Config::Element, StatisticsOf<Config, float>>;
  static constexpr int Bc = Config::Bc;
  using Scores = float[Bc / 2];
  using Operand = HopperOperand<typename Config::Element>;
  using Probabilities = unsigned[Operand::components][Bc / 4];
  // Moments of this lane's elements in its two rows.
  using Moments = ExponentMoment<float, Config::entropy>[2];

  static_assert(!Config::bounded || (Config::Mods::changes_scores && Row::highest < 0),
                "bounded scores need log2 scores and the exponent range of bfloat16");

  // Returns whether a score is treated as masked. A row without other scores is recomputed by
  // another launch (low_rows.cuh).
  __device__ static bool is_masked_score(float score) {
    if constexpr (Config::marks_low_rows) return score <= low_score<float>;
    return score == -SoftmaxMath<float>::infinity();
  }

  const float scale_log2;
  Row rows[2];
  bool any_empty;  // whether a row of the warp may have had no visible key yet

  __device__ explicit HopperSoftmax(const Params& p)
      : scale_log2(exponent_scale<Config, float>(p)) {}

  __device__ void reset() {
    rows[0].reset();
    rows[1].reset();
    if constexpr (Config::bounded) rows[0].base = rows[1].base = 0;
    any_empty = true;
  }

  __device__ static void apply_factor(Scores& scores) {
    if constexpr (prior_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] *= prior_factor<Config>;
    }
  }

  // Whether keys are masked by their positions only, so that mask() can recognize a row that
  // attends to one key. False with sinks: the output of such a row is then not the value of that
  // key, and all lanes of the row need the base.
  static constexpr bool positions_mask_keys =
      !Config::modified || !(Config::detects_one_key_rows || Config::sinks ||
                             Config::Mods::changes_scores || Config::Mods::masks_pairs);

  // Masks the keys from visible_end(half) on, counted from the first one that this lane holds.
  template <class VisibleEnd>
  __device__ void mask(Scores& scores, bool is_first_of_keys, VisibleEnd visible_end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = visible_end(half);
      // The only key of a row is the first key that its first lane holds.
      if (positions_mask_keys && visible == 1 && is_first_of_keys && threadIdx.x % 4 == 0) {
        rows[half].set_only_key(scores[2 * half] * scale_log2);
      }
      fill_row_from<Bc / 8>(scores + 2 * half, visible, -SoftmaxMath<float>::infinity());
    }
  }

  // Masks the keys before visible_begin(half).
  template <class VisibleBegin>
  __device__ static void mask_before(Scores& scores, VisibleBegin visible_begin) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fill_row_before<Bc / 8>(scores + 2 * half, visible_begin(half),
                              -SoftmaxMath<float>::infinity());
    }
  }

  // Computes P from the scores. Calls wait() before it computes exponentials. Returns whether the
  // base of any row of the warp changed, so that the previous sums and output must be multiplied by
  // `rescale`.
  template <class Wait>
  __device__ bool exponentiate(Scores& scores, Probabilities& probabilities, float (&rescale)[2],
                               Wait wait) {
    if constexpr (Config::max_logits) include_scores(scores);
    wait();
    float sums[2];
    Moments moments;
    compute_exponentials(scores, probabilities, sums, moments);
    bool changes = false;
    // Bounded scores need no maximum: bfloat16 holds any p that they produce, float32 their sums.
    if constexpr (!Config::bounded) {
      changes =
          __any_sync(~0u, any_empty | Row::is_too_large(sums[0]) | Row::is_too_large(sums[1]));
      if (changes) changes = bases_must_change(sums);
      if (changes) changes = change_bases(scores, sums, rescale);
      if (changes) compute_exponentials(scores, probabilities, sums, moments);
    }
    rows[0].sum += sums[0];
    rows[1].sum += sums[1];
    if constexpr (Config::entropy) {
      rows[0].moment += moments[0].moment;
      rows[1].moment += moments[1].moment;
    }
    return changes;
  }

  // Returns whether the sums require a new base in any row of the warp. First KV tiles rarely do.
  __device__ bool bases_must_change(const float (&sums)[2]) {
    bool may_change = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_established =
          any_of_lanes(Row::is_large_enough(sums[half], Bc / 4) || rows[half].sum != 0);
      may_change |= !is_established || Row::is_too_large(sums[half]);
    }
    const bool must_change = __any_sync(~0u, may_change);
    if (!must_change) any_empty = false;
    return must_change;
  }

  // Updates the largest scores of this lane's rows with the scores of a KV tile. The softmax itself
  // computes no maxima, so these comparisons are the cost of Config::max_logits. Scores are
  // compared as integers, and again as floats only if the result may be wrong. The branch keeps the
  // compiler from moving the comparisons past a wait for a product that is in flight.
  __device__ void include_scores(Scores& scores) {
    if constexpr (Config::Mods::changes_scores) {
      include_exponents(scores);
      return;
    }
    // Without the pin, the compiler keeps copies of some scores as integers.
    ptx::pin(scores);
    float largest[2];
    int signs = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int previous = __float_as_int(rows[half].largest);
      const int bits = ::max(largest_bits_of_lane<Bc>(scores, half), previous);
      largest[half] = __int_as_float(bits);
      signs |= bits;
    }
    // The result of a row is wrong if all of the row's scores so far are negative.
    if (signs < 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = fmaxf(rows[half].largest, largest_of_lane<Bc>(scores, half));
      }
    }
    rows[0].largest = largest[0];
    rows[1].largest = largest[1];
  }

  // Does the same for changed scores, which are exponents relative to the base. For bfloat16 the
  // exponents are negative, unless scores are bounded or have outgrown the base.
  __device__ void include_exponents(const Scores& scores) {
    constexpr bool are_negative = !Config::bounded && Row::highest < 0;
    float largest[2];
    bool may_be_wrong = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int bits = are_negative ? largest_negative_bits_of_lane<Bc>(scores, half)
                                    : largest_bits_of_lane<Bc>(scores, half);
      // Negative exponents do not matter to a row that already has a score at or above the base.
      may_be_wrong |= are_negative ? bits >= 0 : bits < 0 && rows[half].largest < rows[half].base;
      largest[half] = __int_as_float(bits);
    }
    if (may_be_wrong) {
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[half] = largest_of_lane<Bc>(scores, half);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].include_score(rows[half].base + largest[half]);
    }
  }

  // Computes P, and the sum and the moment of this lane's elements of each row.
  __device__ void compute_exponentials(const Scores& scores, Probabilities& probabilities,
                                       float (&sums)[2], Moments& moments) const {
    float parts[2][2] = {};
    if constexpr (Config::entropy) moments[0] = moments[1] = {};
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) {
      const int half = i % 2;
      float p[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float exponent_of_p = exponent(scores[2 * i + c], half);
        p[c] = Row::probability(exponent_of_p);
        parts[half][c] += p[c];
        moments[half].include_exponent(p[c], exponent_of_p);
      }
      unsigned components[Operand::components];
      Operand::split(p[0], p[1], components);
#pragma unroll
      for (int component = 0; component < Operand::components; ++component) {
        probabilities[component][i] = components[component];
      }
    }
    sums[0] = parts[0][0] + parts[0][1];
    sums[1] = parts[1][0] + parts[1][1];
    // Without the pin, the compiler sinks these conversions to their use, after the next S = Q K^T.
#pragma unroll
    for (int component = 0; component < Operand::components; ++component) {
      ptx::pin(probabilities[component]);
    }
  }

  // Returns the exponent of p, relative to the row's base. Modified scores are exponents already.
  __device__ float exponent(float score, int half) const {
    if constexpr (Config::Mods::changes_scores) return score;
    return fmaf(score, scale_log2, -rows[half].base);
  }

  // Changes the bases of rows whose p are too large, or whose first p are too small. Returns
  // whether any base in the warp changed. If all keys of a KV tile are masked, no base changes.
  __device__ bool change_bases(Scores& scores, const float (&sums)[2], float (&rescale)[2]) {
    bool any_remains_empty = false, any_changes = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = max_of_lanes(exponent(largest_of_lane<Bc>(scores, half), half));
      const bool is_empty = rows[half].is_empty();
      any_remains_empty |= is_empty && is_masked_score(max);
      const bool outgrown = any_of_lanes(Row::is_too_large(sums[half]));
      const float change = rows[half].template change_base<Config::marks_low_rows>(
          max, outgrown, is_empty, rescale[half]);
      any_changes |= change != 0;
      if constexpr (Config::Mods::changes_scores) {
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
          scores[4 * j + 2 * half] -= change;
          scores[4 * j + 2 * half + 1] -= change;
        }
      }
    }
    any_empty = __any_sync(~0u, any_remains_empty);
    return __any_sync(~0u, any_changes);
  }
};

#endif  // __CUDA_ARCH__ == 900
