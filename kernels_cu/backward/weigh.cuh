// Softmax backward: converts S and dP to P and dS.
#pragma once

#include "backward/params.cuh"
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

// Softmax backward of `Queries` rows and `Keys` keys that a thread holds: `score(r, n)` is that of
// query `row_of(r)` and key `first_key + step(n)`, where `step(n)` is constant and grows with n.
// `stats(r)` returns row statistics. `AnyParams`: only params of units with modifications have
// `mods`.
template <class Config, int Queries, int Keys, class AnyParams = GradientParams>
struct Weigh {
  using T = Accumulator<typename Config::Element>;
  using Mods = typename Config::Mods;
  using Math = SoftmaxMath<T>;
  static constexpr bool is_modified = Mods::changes_scores || Mods::hides_pairs;

  const AnyParams& p;
  const Mask<Config>& mask;
  const Sequence& sequence;
  int batch;
  int head;
  T scale_log2;
  T one = 1;       // representation of P = 1 in the unit of P
  T log2_one = 0;  // log2 of `one`, which is subtracted from lse_log2

  // Replaces `score(r, n)`, which is S, by P, and `gradient(r, n)`, which is dP, by dS. `Masked`
  // says that some pairs are masked by position or past the last row. `OfScaled` selects gradients
  // of the scaled scores; otherwise they are those of the modified scores that the softmax takes.
  template <bool Masked, bool OfScaled = true, class RowOf, class Stats, class Score,
            class Gradient, class Step>
  __device__ void run(RowOf row_of, int first_key, Stats stats, Score score, Gradient gradient,
                      Step step) const {
    visit<Masked, OfScaled>(
        row_of, first_key, stats, score, step,
        [&](int r, int n, bool seen, bool sees_one, T exponent, T slope) {
          const T probability = seen ? Math::exp2(exponent) : T(0);
          const T of_score = probability * (gradient(r, n) - stats(r).delta) * slope;
          score(r, n) = probability;
          // If functions may mask pairs, a score of -inf masks its pair, too.
          bool counts = Config::conceals ? probability != 0 : seen;
          if constexpr (may_see_one) counts = counts && !(probability > threshold(stats(r)));
          if (sees_one) counts = counts && !(probability > threshold(stats(r)));
          gradient(r, n) = counts ? of_score : T(0);
        },
        0, Queries);
  }

  // Computes P only, for the rows [first, last). Requires that modifications change no slopes.
  template <bool Masked, class RowOf, class Stats, class Score, class Step>
  __device__ void begin(RowOf row_of, int first_key, Stats stats, Score score, Step step, int first,
                        int last) const {
    visit<Masked, true>(
        row_of, first_key, stats, score, step,
        [&](int r, int n, bool seen, bool, T exponent, T) {
          score(r, n) = seen ? Math::exp2(exponent) : T(0);
        },
        first, last);
  }

  // Sets dS of rows that attend to one key by position to 0. Such rows are few, so the first and
  // the last row, which attend to the fewest keys, are checked first. P is checked, too, because
  // lse may cover more keys than this call has, or include a sink.
  template <class RowOf, class Score, class Gradient>
  __device__ void settle(RowOf row_of, Score score, Gradient gradient) const {
    if constexpr (settles_one_key<Config>) {
      static_assert(sizeof(Element) == 2, "of others the threshold depends on the row");
      if (count(row_of(0)) > 1 && count(row_of(Queries - 1)) > 1) return;
#pragma unroll
      for (int r = 0; r < Queries; ++r) {
        if (count(row_of(r)) != 1) continue;
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          if (score(r, n) > p_of_one_key<typename Config::Element>) gradient(r, n) = 0;
        }
      }
    }
  }

  // Sets P of pairs that are masked by position to 0. For calls without modifications.
  template <class RowOf, class Score, class Step>
  __device__ void hide(RowOf row_of, int first_key, Score score, Step step) const {
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      const Places places = places_of(row_of(r), first_key);
#pragma unroll
      for (int n = 0; n < Keys; ++n) {
        if (!places.include(step(n))) score(r, n) = 0;
      }
    }
  }

 private:
  using Element = typename Config::Element;

  // Returns the threshold of P above which a key counts as the row's only key, times `one`.
  __device__ T threshold(const RowStats<T>& row) const {
    if constexpr (sizeof(Element) == 2) {
      return one * p_of_one_key<Element>;
    } else {
      constexpr int columns =
          Config::head_dim > Config::head_dim_v ? Config::head_dim : Config::head_dim_v;
      return one * least_p_of_one_key<Element, columns>(row.lse_log2 + log2_one);
    }
  }

  // Whether functions or arrays may mask all keys of a row except one.
  static constexpr bool may_see_one = settles_one_key<Config> && Config::conceals;

  // Whether rows that attend to one key are detected by position. With `Config::conceals` and
  // 16-bit inputs they are not, to save registers: their P exceeds the threshold as well, unless
  // scores are in the thousands.
  static constexpr bool asks_places =
      settles_one_key<Config> && !(Config::conceals && sizeof(Element) == 2);

  // Returns how many keys a row attends to by position. With growing `row` it rises, then falls.
  __device__ int count(int row) const { return mask.visible_end(row) - mask.visible_begin(row); }

  // Range of keys that a row attends to by position, counted from `first_key`.
  struct Places {
    int begin;
    int end;
    __device__ bool include(int step) const { return step < end && step >= begin; }
  };
  __device__ Places places_of(int row, int first_key) const {
    Places places = {0, row < sequence.seqlen_q ? mask.visible_end(row) - first_key : 0};
    if constexpr (Config::window_left) places.begin = mask.visible_begin(row) - first_key;
    return places;
  }

  __device__ auto mod_row(int row, T base) const {
    return Mods::row(p.mods, batch, head, row + mask.q_offset, row, sequence.q_first, sequence.k_first, base);
  }

  // Calls `put(r, n, seen, sees_one, exponent, slope)` for each pair: whether it is visible,
  // whether its row attends to one key by position, its exponent, and the slope of its score. `put`
  // must drop masked pairs by selection, so that a NaN in their inputs has no effect.
  template <bool Masked, bool OfScaled, class RowOf, class Stats, class Score, class Step,
            class Put>
  __device__ void visit(RowOf row_of, int first_key, Stats stats, Score score, Step step, Put put,
                        int first, int last) const {
    if constexpr (is_modified) {
      if constexpr (Mods::has_bounds) {
        bool is_inside = true;
#pragma unroll
        for (int r = 0; r < Queries; ++r) {
          const auto row = mod_row(row_of(r), T(0));
          is_inside &=
              Mods::is_inside(p.mods, row, Mods::keys(p.mods, row, first_key), step(Keys - 1));
        }
        if (is_inside) {
          visit_all<Masked, true, OfScaled>(row_of, first_key, stats, score, step, put, first, last);
          return;
        }
      }
    }
    visit_all<Masked, false, OfScaled>(row_of, first_key, stats, score, step, put, first, last);
  }

  template <bool Masked, bool Inside, bool OfScaled, class RowOf, class Stats, class Score,
            class Step, class Put>
  __device__ void visit_all(RowOf row_of, int first_key, Stats stats, Score score, Step step,
                            Put put, int first, int last) const {
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      if (r < first || r >= last) continue;
      const int row = row_of(r);
      const T lse_log2 = stats(r).lse_log2;
      Places places = {};
      if constexpr (Masked) places = places_of(row, first_key);
      const bool sees_one = Masked && asks_places && count(row) == 1;
      if constexpr (is_modified) {
        const auto mod = mod_row(row, lse_log2);
        const auto keys = Mods::keys(p.mods, mod, first_key);
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          const T x = score(r, n);
          T exponent, slope = 1;
          if constexpr (Mods::changes_scores) {
            exponent = Mods::template exponent<Inside>(p.mods, mod, keys, step(n), x);
            if constexpr (OfScaled && Mods::changes_slope) {
              slope = Mods::template slope<Inside>(p.mods, mod, keys, step(n), x);
            }
          } else {
            exponent = fma(x, scale_log2, -lse_log2);
          }
          bool seen = !Masked || places.include(step(n));
          if constexpr (Mods::hides_pairs) {
            seen = seen && Mods::template sees<Inside>(p.mods, mod, keys, step(n));
          }
          put(r, n, seen, sees_one, exponent, slope);
        }
      } else {
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          const bool seen = !Masked || places.include(step(n));
          put(r, n, seen, sees_one, fma(score(r, n), scale_log2, -lse_log2), T(1));
        }
      }
    }
  }
};
