// Softmax backward: converts S and dP to P and dS.
#pragma once

#include "backward/params.cuh"
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"

// Returns whether a modified score has a slope other than 1 with respect to the scaled score.
template <class Mods>
constexpr bool changes_slope() {
  if constexpr (Mods::changes_scores) {
    return Mods::changes_slope;
  } else {
    return false;
  }
}

// Default of `SoftmaxBackward::pairs`: the bias of each pair is loaded when the pair needs it.
struct PairsOnDemand {
  // Whether a branch checks that all captured elements of a tile exist, so that loads need no
  // bounds.
  static constexpr bool checks_bounds = true;

  __device__ LoadOnDemand operator()(int) const { return {}; }
};

// Default of the argument `keeps` of `SoftmaxBackward::run()`: dropout drops no pair.
struct AllKept {
  __device__ bool operator()(int, int) const { return true; }
};

// Integer with one bit per pair: 64 bits if `IsLong`, otherwise 32 bits.
template <bool IsLong>
struct PairBits {
  using type = unsigned;
};
template <>
struct PairBits<true> {
  using type = unsigned long long;
};

// Softmax backward of the pairs of `Queries` rows and `Keys` keys that a thread holds. `score(r,
// n)` is the score of query `row_of(r)` and key `first_key + step(n)`, where `step(n)` is constant
// and grows with n. `stats(r)` returns the row statistics of query `row_of(r)`, and `pairs(r)`
// returns an object that provides its bias (see `ModifiedRows`). With `Listed`, an unmasked tile
// has no pair that functions or positions mask. Otherwise, it has no pair that positions mask, and
// functions are evaluated for it, too. With `HasVisiblePairs`, `visible_pairs` holds one bit for
// each pair of a masked tile, and neither functions nor positions are evaluated. The bits come from
// a block mask or from `find_visible_pairs()`. `AnyParams` is a template parameter because only
// translation units with modifications have `p.mods`.
template <class Config, int Queries, int Keys, class AnyParams = GradientParams,
          class Pairs = PairsOnDemand, bool Listed = false, bool HasVisiblePairs = false>
struct SoftmaxBackward {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  using Mods = typename Config::Mods;
  using Math = SoftmaxMath<T>;
  using VisiblePairs = typename PairBits<(Queries * Keys > 32)>::type;
  // Whether functions that mask pairs are evaluated, for masked or for unmasked tiles.
  template <bool Masked>
  static constexpr bool masks_pairs =
      Mods::masks_pairs && !HasVisiblePairs && (Masked || !Listed);
  template <bool Masked>
  static constexpr bool is_modified = Mods::changes_scores || masks_pairs<Masked>;

  const AnyParams& p;
  const Mask<Config>& mask;
  const Sequence& sequence;
  int batch;
  int head;
  T scale_log2;
  T one = 1;       // number that represents P = 1; not 1 if P is scaled
  T log2_one = 0;  // log2 of `one`; `stats(r).lse_log2` is reduced by it
  Pairs pairs = {};
  VisiblePairs visible_pairs = 0;

  // Returns the index of a pair's bit in `visible_pairs`. With two keys, the order of the bits is
  // that of `TransposedPairs`.
  __device__ static int bit(int r, int n) { return r / 2 * (2 * Keys) + 2 * n + r % 2; }

  // Returns whether the n-th key has a visible pair.
  __device__ static bool has_visible_pair(VisiblePairs pairs, int n) {
    VisiblePairs of_key = 0;
#pragma unroll
    for (int r = 0; r < Queries; ++r) of_key |= VisiblePairs(1) << bit(r, n);
    return (pairs & of_key) != 0;
  }

  // Evaluates the mask of a masked tile, and returns its visible pairs. Callers do so before the
  // products of the tile, because their accumulators would leave too few registers.
  template <class RowOf, class Step>
  __device__ VisiblePairs find_visible_pairs(RowOf row_of, int first_key, Step step) const {
    VisiblePairs found = 0;
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      const int row = row_of(r);
      const VisibleRange visible = visible_range(row, first_key);
      const auto mod = mod_row(row, T(0));
      const auto keys = Mods::keys(p.mods, mod, first_key);
#pragma unroll
      for (int n = 0; n < Keys; ++n) {
        const bool is_visible =
            visible.include(step(n)) && Mods::is_visible(p.mods, mod, keys, step(n));
        found |= VisiblePairs(is_visible) << bit(r, n);
      }
    }
    return found;
  }

  // Replaces `score(r, n)`, which is S, by P, and `gradient(r, n)`, which is dP, by dS. `Masked`
  // says that pairs may be masked by position or lie past the last row. If `OfScaled`, dS is the
  // gradient of the scaled scores, otherwise of the modified scores that the softmax is taken of.
  // `keeps(r, n)` is whether dropout keeps the pair. If a row's only key is dropped, delta is 0,
  // and so is dS. A dropped pair with P near 1 may be one of several: its dS is never set to 0.
  template <bool Masked, bool OfScaled = true, class RowOf, class Stats, class Score,
            class Gradient, class Step, class Keeps = AllKept>
  __device__ void run(RowOf row_of, int first_key, Stats stats, Score score, Gradient gradient,
                      Step step, Keeps keeps = {}) const {
    for_each_pair<Masked, OfScaled>(
        row_of, first_key, stats, score, step,
        [&](int r, int n, bool is_visible, bool has_one_key, T exponent, T slope) {
          const T probability = is_visible ? Math::exp2(exponent) : T(0);
          const T ds = probability * (gradient(r, n) - stats(r).delta) * slope;
          score(r, n) = probability;
          // If functions may mask pairs, a score of -inf masks its pair, too.
          bool has_gradient = Config::may_mask_pairs ? probability != 0 : is_visible;
          if constexpr (may_have_one_key) {
            has_gradient = has_gradient && !(keeps(r, n) && probability > threshold(stats(r)));
          }
          if (has_one_key) has_gradient = has_gradient && !(probability > threshold(stats(r)));
          gradient(r, n) = has_gradient ? ds : T(0);
        },
        0, Queries);
  }

  // Replaces S by P only, for `r` in [first, last). Requires that modifications change no slopes.
  template <bool Masked, class RowOf, class Stats, class Score, class Step>
  __device__ void compute_p(RowOf row_of, int first_key, Stats stats, Score score, Step step,
                            int first, int last) const {
    for_each_pair<Masked, true>(
        row_of, first_key, stats, score, step,
        [&](int r, int n, bool is_visible, bool, T exponent, T) {
          score(r, n) = is_visible ? Math::exp2(exponent) : T(0);
        },
        first, last);
  }

  // Sets dS to 0 in rows that attend to one key by position. Such rows are few, so the thread's
  // first and last rows, which attend to the fewest keys, are checked first. P is checked, too,
  // because lse may cover more keys than this call has, or include a sink.
  template <class RowOf, class Score, class Gradient>
  __device__ void zero_one_key_ds(RowOf row_of, Score score, Gradient gradient) const {
    if constexpr (zeroes_one_key_ds<Config>) {
      static_assert(sizeof(Element) == 2, "for other types the threshold depends on the row");
      if (count(row_of(0)) > 1 && count(row_of(Queries - 1)) > 1) return;
#pragma unroll
      for (int r = 0; r < Queries; ++r) {
        if (count(row_of(r)) != 1) continue;
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          if (score(r, n) > one * p_of_one_key<Element, most_columns<Config>>) gradient(r, n) = 0;
        }
      }
    }
  }

  // Sets P of pairs that are masked by position to 0. For calls without functions
  // or arrays that mask pairs.
  template <class RowOf, class Score, class Step>
  __device__ void mask_p(RowOf row_of, int first_key, Score score, Step step) const {
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      const VisibleRange visible = visible_range(row_of(r), first_key);
#pragma unroll
      for (int n = 0; n < Keys; ++n) {
        if (!visible.include(step(n))) score(r, n) = 0;
      }
    }
  }

  // Calls `store(r, n, is_visible, has_one_key, exponent, slope)` for each pair. `has_one_key` is
  // whether its row attends to one key by position, `exponent` is log2 of P, and `slope` is the
  // derivative of the modified score by the scaled score. `store` must select with `is_visible`
  // rather than multiply by it, so that a NaN of a masked pair has no effect.
  template <bool Masked, bool OfScaled, class RowOf, class Stats, class Score, class Step,
            class Store>
  __device__ void for_each_pair(RowOf row_of, int first_key, Stats stats, Score score, Step step,
                                Store store, int first, int last) const {
    if constexpr (is_modified<Masked>) {
      if constexpr (Mods::has_bounds && Pairs::checks_bounds) {
        bool is_inside = true;
#pragma unroll
        for (int r = 0; r < Queries; ++r) {
          const auto row = mod_row(row_of(r), T(0));
          is_inside &=
              Mods::is_inside(p.mods, row, Mods::keys(p.mods, row, first_key), step(Keys - 1));
        }
        if (is_inside) {
          evaluate_pairs<Masked, true, OfScaled>(row_of, first_key, stats, score, step, store,
                                                 first, last);
          return;
        }
      }
    }
    evaluate_pairs<Masked, false, OfScaled>(row_of, first_key, stats, score, step, store, first,
                                            last);
  }

  // Returns the threshold of P, in the unit of P, above which a key counts as the row's only key.
  __device__ T threshold(const RowStats<T>& row) const {
    if constexpr (sizeof(Element) == 2) {
      return one * p_of_one_key<Element, most_columns<Config>>;
    } else {
      return one * least_p_of_one_key<Element, most_columns<Config>>(row.lse_log2 + log2_one);
    }
  }

 private:

  // Whether functions or arrays may mask all keys of a row except one.
  static constexpr bool may_have_one_key = zeroes_one_key_ds<Config> && Config::may_mask_pairs;

  // Whether rows that attend to one key are detected by position. With `Config::may_mask_pairs` and
  // 16-bit inputs they are not, to save registers. There P alone detects such rows, because it
  // exceeds the threshold unless scores are in the thousands.
  static constexpr bool checks_positions =
      zeroes_one_key_ds<Config> && !(Config::may_mask_pairs && sizeof(Element) == 2);

  // Returns how many keys a row attends to by position. The count rises and then falls with `row`.
  __device__ int count(int row) const { return mask.visible_end(row) - mask.visible_begin(row); }

  // Range of keys that a row attends to by position, as offsets from `first_key`.
  struct VisibleRange {
    int begin;
    int end;
    __device__ bool include(int step) const { return step < end && step >= begin; }
  };
  __device__ VisibleRange visible_range(int row, int first_key) const {
    VisibleRange visible = {0, row < sequence.seqlen_q ? mask.visible_end(row) - first_key : 0};
    if constexpr (Config::window_left) visible.begin = mask.visible_begin(row) - first_key;
    return visible;
  }

  // Returns whether a pair of a masked tile is visible by its position or, if `HasVisiblePairs`,
  // whether it is visible at all.
  template <class Step>
  __device__ bool is_visible_pair(const VisibleRange& visible, int r, int n, Step step) const {
    if constexpr (HasVisiblePairs) return visible_pairs >> bit(r, n) & 1;
    return visible.include(step(n));
  }

  __device__ auto mod_row(int row, T base) const {
    return Mods::row(p.mods, batch, head, row + mask.q_offset, row, sequence.q_first,
                     sequence.k_first, base);
  }

  template <bool Masked, bool Inside, bool OfScaled, class RowOf, class Stats, class Score,
            class Step, class Store>
  __device__ void evaluate_pairs(RowOf row_of, int first_key, Stats stats, Score score, Step step,
                                 Store store, int first, int last) const {
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      if (r < first || r >= last) continue;
      const int row = row_of(r);
      const T lse_log2 = stats(r).lse_log2;
      VisibleRange visible = {};
      if constexpr (Masked && !HasVisiblePairs) visible = visible_range(row, first_key);
      const bool has_one_key = Masked && checks_positions && count(row) == 1;
      if constexpr (is_modified<Masked>) {
        const auto mod = mod_row(row, lse_log2);
        const auto keys = Mods::keys(p.mods, mod, first_key);
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          const T x = score(r, n);
          T exponent, slope = 1;
          if constexpr (Mods::changes_scores) {
            exponent = Mods::template exponent<Inside>(p.mods, mod, keys, step(n), x, pairs(r));
            if constexpr (OfScaled && Mods::changes_slope) {
              slope = Mods::template slope<Inside>(p.mods, mod, keys, step(n), x, pairs(r));
            }
          } else {
            exponent = fma(x, scale_log2, -lse_log2);
          }
          bool is_visible = !Masked || is_visible_pair(visible, r, n, step);
          if constexpr (masks_pairs<Masked>) {
            is_visible =
                is_visible && Mods::template is_visible<Inside>(p.mods, mod, keys, step(n));
          }
          store(r, n, is_visible, has_one_key, exponent, slope);
        }
      } else {
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          const bool is_visible = !Masked || is_visible_pair(visible, r, n, step);
          store(r, n, is_visible, has_one_key, fma(score(r, n), scale_log2, -lse_log2), T(1));
        }
      }
    }
  }
};
