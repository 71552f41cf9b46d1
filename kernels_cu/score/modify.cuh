// Application of modifications: masks and score functions that act between Q K^T and the softmax.
// The host generates the struct `Mods` (cupy_flash/mods/codegen/emit.py). Its functions take the
// coordinates of a row, then those of a key, then a score.
#pragma once

#include "params.cuh"
#include "score/capture.cuh"
#include "score/functions.cuh"
#include "score/softmax.cuh"

// `Mods` of kernels without modifications.
struct NoMods {
  static constexpr bool changes_scores = false;
  static constexpr bool masks_pairs = false;
  static constexpr bool calls_functions = false;
  static constexpr bool has_low_scores = false;
};

// Coordinates of a row of the score matrix, which modifications receive.
struct ScoreRow {
  int batch;
  int head;
  int row;       // index of the query in its sequence
  int q_offset;  // position of the sequence's first query among its keys
  int q_start;   // first row of a packed sequence in q
  int k_start;   // first row of a packed sequence in k
};

// Factor of scores before the mask. Modifications that change scores apply it themselves.
template <class Config>
constexpr float prior_factor = Config::Mods::changes_scores ? 1 : score_factor<Config>;

// Returns the factor of scores after the mask, which makes them exponents of two.
template <class Config, class T>
__device__ T exponent_scale(const Params& p) {
  if constexpr (Config::Mods::changes_scores) {
    return 1;
  } else {
    return scale_to_log2<T>(p.softmax_scale);
  }
}

// Returns the factor that converts a score after the mask to natural units.
template <class Config, class T>
__device__ T logit_unit(const Params& p) {
  if constexpr (Config::Mods::changes_scores) {
    return SoftmaxMath<T>::ln_2;
  } else {
    return T(p.softmax_scale);
  }
}

// Changes and masks scores of several rows and keys: score(r, n) is the score of row coord(r) and
// key first_key + step(n), where step(n) is a constant that increases with n. Changed scores become
// exponents of two relative to base(r). If `masks` is false, no pair is masked, because the block
// mask marks the block as full. pairs(r).bias() returns a bias element of row r, which may have
// been loaded in advance.
template <class Config, int Rows, int Count>
struct ModifiedRows {
  using Mods = typename Config::Mods;

  template <class AnyParams, class RowCoord, class Base, class Score, class Step, class Pairs>
  __device__ static void modify(const AnyParams& p, RowCoord coord, int first_key, Base base,
                                bool masks, Score score, Step step, Pairs pairs) {
    if constexpr (Mods::changes_scores || Mods::masks_pairs) {
      if (!Mods::changes_scores && !masks) return;
      if constexpr (Mods::has_bounds) {
        // Bounds are checked for all rows at once, so that the captures of the keys are loaded
        // once for all rows.
        bool is_inside = true;
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          const auto row = row_of(p, coord(r), base(r));
          const auto keys = Mods::keys(p.mods, row, first_key);
          is_inside &= Mods::is_inside(p.mods, row, keys, step(Count - 1));
        }
        if (is_inside) {
          modify_all<true>(p, coord, first_key, base, masks, score, step, pairs);
          return;
        }
      }
      modify_all<false>(p, coord, first_key, base, masks, score, step, pairs);
    }
  }

 private:
  template <class AnyParams, class T>
  __device__ static auto row_of(const AnyParams& p, const ScoreRow& coord, T base) {
    return Mods::row(p.mods, coord.batch, coord.head, coord.row + coord.q_offset, coord.row,
                     coord.q_start, coord.k_start, base);
  }

  template <bool Inside, class AnyParams, class RowCoord, class Base, class Score, class Step,
            class Pairs>
  __device__ static void modify_all(const AnyParams& p, RowCoord coord, int first_key, Base base,
                                    bool masks, Score score, Step step, Pairs pairs) {
    if constexpr (Mods::changes_scores) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const auto row = row_of(p, coord(r), base(r));
        const auto keys = Mods::keys(p.mods, row, first_key);
#pragma unroll
        for (int n = 0; n < Count; ++n) {
          score(r, n) =
              Mods::template exponent<Inside>(p.mods, row, keys, step(n), score(r, n), pairs(r));
        }
      }
    }
    if constexpr (Mods::masks_pairs) {
      if (!masks) return;
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const auto row = row_of(p, coord(r), base(r));
        const auto keys = Mods::keys(p.mods, row, first_key);
#pragma unroll
        for (int n = 0; n < Count; ++n) {
          if (!Mods::template is_visible<Inside>(p.mods, row, keys, step(n))) {
            score(r, n) = -SoftmaxMath<typename Mods::Real>::infinity();
          }
        }
      }
    }
  }
};

template <class Config, int Rows, int Count, class AnyParams, class RowCoord, class Score,
          class Step>
__device__ void modify_rows(const AnyParams& p, RowCoord coord, int first_key, Score score,
                            Step step) {
  ModifiedRows<Config, Rows, Count>::modify(
      p, coord, first_key, [](int) { return 0; }, true, score, step,
      [](int) { return LoadOnDemand(); });
}

// Like `ModifiedRows`, for a lane's accumulator fragments (tile/fragments.cuh): `row_scores(r)`
// holds the lane's scores of row `coord(r)`, and `first_key` is the key of the first of these.
template <class Config, int Rows, int column_tiles, class AnyParams, class RowCoord, class Base,
          class RowScores, class Pairs>
__device__ void modify_fragments(const AnyParams& p, RowCoord coord, int first_key, Base base,
                                 bool masks, RowScores row_scores, Pairs pairs) {
  ModifiedRows<Config, Rows, 2 * column_tiles>::modify(
      p, coord, first_key, base, masks,
      [&](int r, int n) -> float& { return row_scores(r)[n / 2 * 4 + n % 2]; },
      [](int n) { return n / 2 * 8 + n % 2; }, pairs);
}

template <class Config, int Rows, int column_tiles, class AnyParams, class RowCoord,
          class RowScores>
__device__ void modify_fragments(const AnyParams& p, RowCoord coord, int first_key,
                                 RowScores row_scores) {
  modify_fragments<Config, Rows, column_tiles>(
      p, coord, first_key, [](int) { return 0.f; }, true, row_scores,
      [](int) { return LoadOnDemand(); });
}

// Attention sink: one more score of a row, without a value. `lse` is the log-sum-exp with the sink,
// and `factor` scales the output.
template <class T>
struct Sink {
  T lse;
  T factor;

  __device__ Sink(T lse, T sink) {
    using Math = SoftmaxMath<T>;
    const T above = (sink - lse) * Math::log2_e;
    const bool is_none = sink == -Math::infinity();
    factor = is_none ? T(1) : T(1) / (T(1) + Math::exp2(above));
    // log(exp(lse) + exp(sink)) is the larger exponent plus `more`, whose exp2() cannot overflow.
    const T more = Math::log2(T(1) + Math::exp2(above > T(0) ? -above : above)) * Math::ln_2;
    this->lse = is_none ? lse : (above > T(0) ? sink : lse) + more;
  }
};

// Adds the head's sink, if there are sinks, to `lse`, a row's log-sum-exp. Returns the factor for
// the output.
template <class Config, class T, class AnyParams>
__device__ T apply_sink(const AnyParams& p, int head, T& lse) {
  if constexpr (Config::sinks) {
    const Sink<T> sink(lse, T(p.mods.sinks.at(head)));
    lse = sink.lse;
    return sink.factor;
  } else {
    return T(1);
  }
}
