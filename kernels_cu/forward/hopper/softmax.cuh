// The softmax of one block of keys, of the two rows that a lane of a consumer of the Hopper kernel
// holds parts of. It runs while the tensor cores work on another product, and starts exponentials
// before it knows the maxima.
#pragma once

#include "forward/hopper/cta.cuh"
#include "params.cuh"
#include "ptx/base.cuh"
#include "ptx/sm90a.cuh"
#include "score/lagging_softmax.cuh"
#include "score/modify.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperSoftmax {
  using Row = LaggingSoftmaxRow<typename Config::Element>;
  static constexpr int Bc = Config::Bc;
  using Scores = float[Bc / 2];
  // Scores are compared by their bits, of which one instruction finds the largest of three: 4%
  // faster at head_dim 64 with three consumers, 1 to 2% at 128. A tile's first block then costs
  // more, which with two consumers at head_dim 64, the choice for short causal sequences, is a loss
  // of 1 to 2%.
  static constexpr bool by_bits = HopperCta<Config>::consumers == 3 || Config::head_dim > 64;
  using Order = ScoreOrder<by_bits, (Row::highest < 0)>;

  static_assert(!Config::bounded || (Config::Mods::changes_scores && Row::highest < 0),
                "scores are exponents of two, and p that are not held to a maximum need bfloat16");
  static_assert(Config::guesses >= 1 && Config::guesses <= Bc / 2, "of a lane's scores");

  const float scale_log2;
  Row rows[2];
  // What the largest of a lane's scores must not be less than. It is there for rows without a key
  // yet, but one bound for the warp takes fewer instructions in each block than to look for them.
  typename Order::type least_maximum;

  __device__ explicit HopperSoftmax(const Params& p)
      : scale_log2(exponent_scale<Config, float>(p)) {}

  __device__ void reset() {
    rows[0].reset();
    rows[1].reset();
    if constexpr (Config::bounded) rows[0].base = rows[1].base = 0;
    least_maximum = Order::of(Row::lowest);
  }

  __device__ static void apply_factor(Scores& scores) {
    if constexpr (prior_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] *= prior_factor<Config>;
    }
  }

  // Hides the keys from visible_end(half) on, counted from the first that this lane holds.
  template <class VisibleEnd>
  __device__ void mask(Scores& scores, bool is_first_of_keys, VisibleEnd visible_end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = visible_end(half);
      // The only key of a row is the first that the first of its lanes holds.
      if (!Config::modified && visible == 1 && is_first_of_keys && threadIdx.x % 4 == 0) {
        rows[half].see_only(scores[2 * half] * scale_log2);
      }
      fill_row_from<Bc / 8>(scores + 2 * half, visible, -SoftmaxMath<float>::infinity());
    }
  }

  // And those before visible_begin(half).
  template <class VisibleBegin>
  __device__ static void mask_before(Scores& scores, VisibleBegin visible_begin) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fill_row_before<Bc / 8>(scores + 2 * half, visible_begin(half),
                              -SoftmaxMath<float>::infinity());
    }
  }

  // Turns the scores into probabilities. Returns whether any row of the warp got a new base, so
  // that what was summed up before is to be multiplied by `rescale`.
  __device__ bool exponentiate(Scores& scores, float (&rescale)[2]) {
    // bfloat16 and the sums hold whatever p such scores make, without a maximum to refer to.
    if constexpr (Config::bounded) {
      add_exponentials(scores, [&](int i) { return ptx::ex2_approx(scores[i]); });
      return false;
    } else {
      return exponentiate_lagging(scores, rescale);
    }
  }

  // With a base that may have to change.
  __device__ bool exponentiate_lagging(Scores& scores, float (&rescale)[2]) {
    // From here on the scores are exponents of two, relative to the base.
    if constexpr (!Config::Mods::changes_scores) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) {
        scores[i] = fmaf(scores[i], scale_log2, -rows[i / 2 % 2].base);
      }
    }
    // The base seldom changes: the first exponentials are taken on the guess that it does not,
    // while the maxima are still being found.
    float guessed[Config::guesses];
#pragma unroll
    for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
    bool changes = __any_sync(~0u, may_change(scores, 0) | may_change(scores, 1));
    bool some_see_none = false;
    if constexpr (Config::modified) {
      // Lanes that see no key of the block say so in vain: 2% of the time with documents.
      if (changes) changes = may_change_of_seen(scores, some_see_none);
    }
    if (changes) {
      bool fresh_remain = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float max = max_of_lanes(largest<ScoreOrder<false, false>, 4>(scores, half));
        const bool is_fresh = rows[half].is_fresh();
        fresh_remain |= is_fresh && max == -SoftmaxMath<float>::infinity();
        const float change = rows[half].change_base(max, is_fresh, rescale[half]);
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
          scores[4 * j + 2 * half] -= change;
          scores[4 * j + 2 * half + 1] -= change;
        }
      }
#pragma unroll
      for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
      if (!__any_sync(~0u, fresh_remain)) least_maximum = Order::least();
    } else if (!some_see_none) {
      least_maximum = Order::least();
    }

    add_exponentials(scores, [&](int i) {
      return i < Config::guesses ? guessed[i] : ptx::ex2_approx(scores[i]);
    });
    return changes;
  }

  template <class Exponential>
  __device__ void add_exponentials(Scores& scores, Exponential exponential) {
    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) {
      scores[i] = exponential(i);
      sums[i / 2 % 2][i % 2] += scores[i];
    }
    rows[0].sum += sums[0][0] + sums[0][1];
    rows[1].sum += sums[1][0] + sums[1][1];
    // Else the compiler moves the exponentials to where they are used, behind the wait for O.
    ptx::pin(scores);
  }

  // Whether a row's base must change for all that this lane can tell: it may say so in vain.
  __device__ bool may_change(const Scores& scores, int half) const {
    const auto max = largest<Order, by_bits ? 2 : 4>(scores, half);
    return Order::is_less(Order::of(Row::highest), max) || Order::is_less(max, least_maximum);
  }

  // The same for the warp, of lanes that see keys. Of a row that another sees none of nothing
  // changes; whether some see none is told, as their rows may still be without a key.
  __device__ bool may_change_of_seen(const Scores& scores, bool& some_see_none) const {
    bool may = false, any_is_blind = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_blind = sees_none(scores, half);
      may |= !is_blind && may_change(scores, half);
      any_is_blind |= is_blind;
    }
    some_see_none = __any_sync(~0u, any_is_blind);
    return __any_sync(~0u, may);
  }

  // Whether all scores are hidden that a lane holds of a row. Where bounds are not negative, the
  // bits of -inf are not the least.
  __device__ static bool sees_none(const Scores& scores, int half) {
    using By = ScoreOrder<by_bits && (Row::highest < 0), true>;
    return largest<By, by_bits ? 2 : 4>(scores, half) == By::of(-SoftmaxMath<float>::infinity());
  }

  // Of this lane's part of a row, in several chains for the latency's sake.
  template <class By, int chains>
  __device__ static typename By::type largest(const Scores& scores, int half) {
    typename By::type max[chains];
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      const auto two =
          By::max(By::of(scores[4 * j + 2 * half]), By::of(scores[4 * j + 2 * half + 1]));
      max[j % chains] = j < chains ? two : By::max(two, max[j % chains]);
    }
#pragma unroll
    for (int i = 1; i < min(chains, Bc / 8); ++i) max[0] = By::max(max[0], max[i]);
    return max[0];
  }
};

#endif  // __CUDA_ARCH__ == 900
