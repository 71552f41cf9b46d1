// From scores and the gradients of probabilities to probabilities and the gradients of scores.
#pragma once

#include "backward/params.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"

// Of `Queries` rows and `Keys` keys that a thread holds: score(r, n) is of query row(r) and of the
// key first_key + step(n), a constant that grows with n; terms(r) are the row's.
// A template of the params too, as only units with modifications have what those read.
template <class Config, int Queries, int Keys, class AnyParams = GradientParams>
struct Weigh {
  using T = Accumulator<typename Config::Element>;
  using Mods = typename Config::Mods;
  using Math = SoftmaxMath<T>;
  static constexpr bool is_modified = Mods::changes_scores || Mods::hides_pairs;

  const AnyParams& p;
  const Mask<Config>& mask;
  const Sequence& at;
  int batch;
  int head;
  T scale_log2;

  // score(r, n) becomes p, gradient(r, n), which is that of p, that of the score. Masked says that
  // some pair is hidden by its place, or lies behind the last row. OfScaled says whether gradients
  // are those of the scaled scores, or of the new ones that the softmax takes.
  template <bool Masked, bool OfScaled = true, class RowOf, class Terms, class Score,
            class Gradient, class Step>
  __device__ void run(RowOf row_of, int first_key, Terms terms, Score score, Gradient gradient,
                      Step step) const {
    if constexpr (is_modified) {
      if constexpr (Mods::has_bounds) {
        bool is_inside = true;
#pragma unroll
        for (int r = 0; r < Queries; ++r) {
          const auto row = mod_row(row_of(r), T(0));
          is_inside &= Mods::is_inside(p.mods, row, Mods::keys(p.mods, row, first_key),
                                       step(Keys - 1));
        }
        if (is_inside) {
          all<Masked, true, OfScaled>(row_of, first_key, terms, score, gradient, step);
          return;
        }
      }
    }
    all<Masked, false, OfScaled>(row_of, first_key, terms, score, gradient, step);
  }

 private:
  __device__ auto mod_row(int row, T base) const {
    return Mods::row(p.mods, batch, head, row + mask.q_offset, row, at.q_first, at.k_first, base);
  }

  template <bool Masked, bool Inside, bool OfScaled, class RowOf, class Terms, class Score,
            class Gradient, class Step>
  __device__ void all(RowOf row_of, int first_key, Terms terms, Score score, Gradient gradient,
                      Step step) const {
#pragma unroll
    for (int r = 0; r < Queries; ++r) {
      const int row = row_of(r);
      const RowTerms<T> of_row = terms(r);
      int begin = 0, end = 0;
      if constexpr (Masked) {
        end = row < at.seqlen_q ? mask.visible_end(row) - first_key : 0;
        if constexpr (Config::window_left) begin = mask.visible_begin(row) - first_key;
      }
      if constexpr (is_modified) {
        const auto mod = mod_row(row, of_row.lse_log2);
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
            exponent = fma(x, scale_log2, -of_row.lse_log2);
          }
          bool seen = !Masked || (step(n) < end && step(n) >= begin);
          if constexpr (Mods::hides_pairs) {
            seen = seen && Mods::template sees<Inside>(p.mods, mod, keys, step(n));
          }
          put(seen, exponent, of_row.delta, slope, score(r, n), gradient(r, n));
        }
      } else {
#pragma unroll
        for (int n = 0; n < Keys; ++n) {
          const bool seen = !Masked || (step(n) < end && step(n) >= begin);
          const T exponent = fma(score(r, n), scale_log2, -of_row.lse_log2);
          put(seen, exponent, of_row.delta, T(1), score(r, n), gradient(r, n));
        }
      }
    }
  }

  // Hidden pairs are left out by selection: a NaN in what they are made of leaves no trace.
  __device__ static void put(bool seen, T exponent, T delta, T slope, T& score, T& gradient) {
    const T probability = seen ? Math::exp2(exponent) : T(0);
    const T of_score = probability * (gradient - delta) * slope;
    score = probability;
    gradient = seen ? of_score : T(0);
  }
};
