// Split KV: the keys of one query tile are split over several CTAs, and their results are merged.
// The workspace holds the normalized partial outputs (num_splits, batch, heads_q, seqlen_q,
// head_dim_v), then the log-sum-exps (num_splits, batch, heads_q, seqlen_q), in the accumulator's
// type. If modifications change scores, a log-sum-exp is a pair of numbers (`ExponentSum`), stored
// in two arrays. One array follows for each row statistic that the call returns. For packed
// queries, (heads_q, total_q) replaces (batch, heads_q, seqlen_q).
#pragma once

#include "params.cuh"
#include "score/degenerate_rows.cuh"
#include "score/lse_merge.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "score/statistics.cuh"
#include "tile/element.cuh"
#include "scheduler/pages.cuh"
#include "scheduler/sequences.cuh"
#include "scheduler/unowned_rows.cuh"

template <class Config>
struct Partials {
  using T = Accumulator<typename Config::Element>;

  // Whether the log-sum-exp of a row is a pair of numbers. All keys of a padded row may have the
  // score -1e9. As a single number, the log-sum-exp of n such keys, -1e9 + log(n), rounds to -1e9,
  // so splits with few and with many keys would get equal weights.
  static constexpr bool lse_is_pair = Config::Mods::changes_scores;
  static constexpr int lse_numbers = lse_is_pair ? 2 : 1;
  // Number of accumulator-type numbers that a split stores for each row: output, log-sum-exp and
  // statistics.
  static constexpr int numbers =
      Config::head_dim_v + lse_numbers + Config::max_logits + Config::entropy;
  using Merge = LseMerge<T, lse_is_pair>;

  T* out;
  T* lse;
  int64 rows;  // number of rows of one split

  __device__ explicit Partials(const Params& p)
      : out(static_cast<T*>(p.workspace)), rows(row_count(p)) {
    lse = out + p.num_splits * rows * Config::head_dim_v;
  }

  // Returns the index of a query row in lse, and among the rows of a split.
  __device__ static int64 row_index(const Params& p, int batch, int head, int row) {
    return (int64(batch) * p.heads_q + head) * p.seqlen_q + row;
  }
  __device__ static int64 row_index(const Params& p, const Sequence& sequence, int batch, int head,
                                    int row) {
    if (p.cu_seqlens_q == nullptr) return row_index(p, batch, head, row);
    return int64(head) * p.total_q + sequence.q_first + row;
  }
  __device__ T* out_row(int split, int64 row) const {
    return out + (split * rows + row) * Config::head_dim_v;
  }
  __device__ T* lse_row(int split, int64 row) const { return lse + split * rows + row; }

  // Returns the log-sum-exp of a row over the keys of a split. If it is a pair, `lse` holds the
  // bases of all splits and then the logarithms of all splits.
  __device__ auto sum(const Params& p, int split, int64 row) const {
    if constexpr (lse_is_pair) {
      return ExponentSum<T>{*lse_row(split, row), *lse_row(p.num_splits + split, row)};
    } else {
      return *lse_row(split, row);
    }
  }
  __device__ void set(const Params& p, int split, int64 row, const ExponentSum<T>& sum) const {
    *lse_row(split, row) = sum.base;
    *lse_row(p.num_splits + split, row) = sum.log_sum;
  }
  template <int Headroom, class State>
  __device__ void set(const Params& p, int split, int64 row, const State& state,
                      T scale_log2) const {
    if constexpr (lse_is_pair) {
      set(p, split, row, state.template exponent_sum<Headroom>(scale_log2));
    } else {
      *lse_row(split, row) = state.template log_sum_exp<Headroom>(scale_log2);
    }
  }
  __device__ void set_statistics(const Params& p, int split, int64 row,
                                 const RowSummary<T>& summary) const {
    if constexpr (Config::max_logits) *max_logit(p, split, row) = summary.max_logit;
    if constexpr (Config::entropy) *entropy(p, split, row) = summary.entropy;
  }
  __device__ RowSummary<T> statistics(const Params& p, int split, int64 row) const {
    RowSummary<T> summary;
    if constexpr (Config::max_logits) summary.max_logit = *max_logit(p, split, row);
    if constexpr (Config::entropy) summary.entropy = *entropy(p, split, row);
    return summary;
  }

 private:
  __device__ T* max_logit(const Params& p, int split, int64 row) const {
    return lse_row(lse_numbers * p.num_splits + split, row);
  }
  __device__ T* entropy(const Params& p, int split, int64 row) const {
    return lse_row((lse_numbers + Config::max_logits) * p.num_splits + split, row);
  }

  __device__ static int64 row_count(const Params& p) {
    if constexpr (Config::has_seqlens) {
      const int64 packed = p.total_q;
      return p.heads_q * (p.cu_seqlens_q != nullptr ? packed : int64(p.batch) * p.seqlen_q);
    } else {
      return int64(p.batch) * p.heads_q * p.seqlen_q;
    }
  }
};

// Returns the row of V that belongs to the first key of a sequence.
template <class Config>
__device__ Row<typename Config::Element> first_value_of(const Params& p, const Sequence& sequence,
                                                        int batch, int head_kv) {
  using Element = typename Config::Element;
  if constexpr (Config::page_size > 0) {
    const PagedRows<Element, Config::page_size> values = {
        p.v.head<const Element>(0, head_kv),
        p.block_table + batch * p.block_table_stride,
        p.v.batch_stride,
        p.v.row_stride,
        p.pages,
        sequence.seqlen_k};
    return values.at(0);
  } else {
    return {p.v.head<const Element>(sequence.k_batch, head_kv) + sequence.k_first * p.v.row_stride,
            true};
  }
}

// Returns the query row that this warp merges, as an index into (batch, heads_q, seqlen_q).
__device__ inline int64 row_of_warp() {
  return (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}

// Merges one query row by one warp: out = sum_s w_s out_s with w_s = exp(lse_s - lse). `out_row()`
// returns the address of the output row. It is called after the first loads, which thus do not wait
// for the address computation.
template <class Config, class OutRow>
__device__ void combine_row(const Params& p, const Partials<Config>& partials, int64 index,
                            int head, int visible, const Row<typename Config::Element>& first_value,
                            OutRow out_row) {
  using T = typename Partials<Config>::T;
  using Math = SoftmaxMath<T>;
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 32;
  // The maximum over the splits of the log-sum-exp. If the log-sum-exp is stored as a pair
  // (`ExponentSum`), of its base.
  T max = -Math::infinity();
  for (int s = 0; s < p.num_splits; ++s) max = fmax(max, *partials.lse_row(s, index));
  typename Partials<Config>::Merge merge = {max == -Math::infinity() ? T(0) : max};
  for (int s = 0; s < p.num_splits; ++s) merge.sum += merge.weight_of(partials.sum(p, s, index));
  T normalizer = merge.normalizer();
  if constexpr (Config::sinks) {
    T lse = merge.lse();
    normalizer *= apply_sink<Config>(p, head, lse);
  }

  Element* out = out_row();
  for (int column = lane; column < Config::head_dim_v; column += 32) {
    T merged = 0;
    for (int s = 0; s < p.num_splits; ++s) {
      const bool is_masked = *partials.lse_row(s, index) == -Math::infinity();
      const T weight = merge.weight_of(partials.sum(p, s, index)) * normalizer;
      // If the row attends to no key of the split, its partial output may be 0 * NaN.
      const T partial = is_masked ? T(0) : partials.out_row(s, index)[column];
      merged = fma(weight, partial, merged);
    }
    out[column] = Config::modified
                      ? narrow<Element>(merged)
                      : degenerate_value(visible, narrow<Element>(merged), first_value, column);
  }
  if (lane == 0 && p.lse != nullptr) {
    T lse = merge.lse();
    apply_sink<Config>(p, head, lse);
    static_cast<T*>(p.lse)[index] = lse;
  }
  if constexpr (has_statistics<Config>) {
    RowSummary<T> summary;
    for (int s = 0; s < p.num_splits; ++s) {
      const T weight = merge.weight_of(partials.sum(p, s, index)) * normalizer;
      summary.add_split(weight, partials.statistics(p, s, index));
    }
    // The sum is NaN if a split has a NaN score.
    if (merge.sum != merge.sum) summary.max_logit = merge.sum;
    if (lane == 0) write_statistics<Config>(p, index, summary);
  }
}

template <class Config>
__device__ void combine(const Params& p) {
  using Element = typename Config::Element;
  const Partials<Config> partials(p);
  const int64 warp = row_of_warp();
  if (warp >= int64(p.batch) * p.heads_q * p.seqlen_q) return;
  const int row = warp % p.seqlen_q;
  const int batch_head = warp / p.seqlen_q;
  const int batch = batch_head / p.heads_q;
  const int head = batch_head % p.heads_q;
  const int head_kv = head / (p.heads_q / p.heads_kv);
  if constexpr (Config::has_seqlens) {
    const Sequence sequence = find_sequence<Config::page_size>(p, batch);
    UnownedRows<Config>{p}.clear_around(batch, row, p.seqlen_q, head, 1);
    if (row >= sequence.seqlen_q) return;
    const Mask<Config> mask(sequence.seqlen_k, sequence.template q_offset<Config>(p, batch),
                            {p, batch});
    combine_row(p, partials, partials.row_index(p, sequence, batch, head, row), head,
                mask.visible_end(row), first_value_of<Config>(p, sequence, batch, head_kv), [&] {
                  return p.out.head<Element>(sequence.q_batch, head) +
                         (sequence.q_first + row) * p.out.row_stride;
                });
  } else {
    const Row<Element> first_value = {p.v.head<const Element>(batch, head_kv), true};
    combine_row(p, partials, warp, head, Mask<Config>(p, batch).visible_end(row), first_value,
                [&] { return p.out.head<Element>(batch, head) + row * p.out.row_stride; });
  }
}
