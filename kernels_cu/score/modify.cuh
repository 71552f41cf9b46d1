// What modifications make of scores between the product and the softmax, and what they hide. The
// host writes the struct `Mods` of a unit from the call's (cupy_flash/mods/emit.py); its functions
// take the row's coordinates, then a key, then each score.
#pragma once

#include "params.cuh"
#include "score/capture.cuh"
#include "score/functions.cuh"
#include "score/softmax.cuh"

// Of units without modifications.
struct NoMods {
  static constexpr bool changes_scores = false;
  static constexpr bool hides_pairs = false;
};

// A row of a score matrix, as modifications know it.
struct ScoreRow {
  int batch;
  int head;
  int row;       // of the sequence
  int q_offset;  // position of the sequence's first query among its keys
  int q_start;   // where a packed sequence begins in q
  int k_start;
};

// What scores are multiplied by ahead of the mask. Modifications that change them do so themselves.
template <class Config>
constexpr float prior_factor = Config::Mods::changes_scores ? 1 : score_factor<Config>;

// And behind it, to be exponents of two.
template <class Config, class T>
__device__ T exponent_scale(const Params& p) {
  if constexpr (Config::Mods::changes_scores) {
    return 1;
  } else {
    return scale_to_log2<T>(p.softmax_scale);
  }
}

// Changes and hides scores of a row: score(n) is the one of key first_key + step(n), a constant.
// Where they are changed, they become exponents of two relative to the base. With `hides` false
// nothing is hidden, as a block map says. `pairs` has elements of pairs at hand.
template <class Config, int Count, class AnyParams, class T, class Score, class Step,
          class Pairs = FromMemory>
__device__ void modify_row(const AnyParams& p, const ScoreRow& at, int first_key, T base,
                           bool hides, Score score, Step step, const Pairs& pairs = {}) {
  using Mods = typename Config::Mods;
  if constexpr (Mods::changes_scores || Mods::hides_pairs) {
    const auto row = Mods::row(p.mods, at.batch, at.head, at.row + at.q_offset, at.row, at.q_start,
                               at.k_start, base);
    const auto keys = Mods::keys(p.mods, row, first_key);
    if constexpr (Mods::changes_scores) {
#pragma unroll
      for (int n = 0; n < Count; ++n) {
        score(n) = Mods::exponent(p.mods, row, keys, step(n), score(n), pairs);
      }
    }
    if constexpr (Mods::hides_pairs) {
      if (!hides) return;
#pragma unroll
      for (int n = 0; n < Count; ++n) {
        if (!Mods::sees(p.mods, row, keys, step(n))) score(n) = -SoftmaxMath<T>::infinity();
      }
    }
  }
}

// A lane's part of a row of accumulators (tile/fragments.cuh), whose first key is first_key.
template <class Config, int column_tiles, class AnyParams, class Pairs = FromMemory>
__device__ void modify_fragment_row(const AnyParams& p, const ScoreRow& at, int first_key,
                                    float* row, float base = 0, bool hides = true,
                                    const Pairs& pairs = {}) {
  modify_row<Config, 2 * column_tiles>(
      p, at, first_key, base, hides, [&](int n) -> float& { return row[n / 2 * 4 + n % 2]; },
      [](int n) { return n / 2 * 8 + n % 2; }, pairs);
}

// A sink is one more score of a row, without a value: what it makes of the log-sum-exp, and the
// factor that it leaves of the output.
template <class T>
struct Sink {
  T lse;
  T factor;

  __device__ Sink(T lse, T sink) {
    using Math = SoftmaxMath<T>;
    const T above = (sink - lse) * Math::log2_e;
    const bool is_none = sink == -Math::infinity();
    factor = is_none ? T(1) : T(1) / (T(1) + Math::exp2(above));
    // log(exp(lse) + exp(sink)) from the larger one.
    const T more = Math::log2(T(1) + Math::exp2(above > T(0) ? -above : above)) * Math::ln_2;
    this->lse = is_none ? lse : (above > T(0) ? sink : lse) + more;
  }
};

// Takes the head's sink, if there are such, into a row's log-sum-exp; returns the factor.
template <class Config, class T, class AnyParams>
__device__ T take_sink(const AnyParams& p, int head, T& lse) {
  if constexpr (Config::sinks) {
    const Sink<T> sink(lse, T(p.mods.sinks.at(head)));
    lse = sink.lse;
    return sink.factor;
  } else {
    return T(1);
  }
}
