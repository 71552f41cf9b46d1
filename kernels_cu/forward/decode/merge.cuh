// Merging of partial results: first those of the warps, then those of CTAs if a query tile has
// several partial tiles. This code runs rarely, so its instructions are often fetched from memory.
// To keep it short, loops are unrolled only as far as needed to have several loads in flight.
#pragma once

#include "forward/decode/cta.cuh"
#include "forward/decode/cluster.cuh"
#include "forward/decode/merge_slice.cuh"
#include "forward/decode/memory.cuh"
#include "ptx/base.cuh"
#include "ptx/wide_access.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "scheduler/kv_partition.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeMerge {
  using Element = typename Config::Element;
  using Cta = DecodeCta<Config>;
  using Cluster = DecodeCluster<Config>;
  using Slice = MergeSlice<Config>;
  using Math = SoftmaxMath<float>;

  const Cta& cta;
  const DecodeMemory<Config> memory;

  __device__ explicit DecodeMerge(const Cta& cta) : cta(cta), memory{cta} {}

  // Number of floats that the merge reads from the state of a row.
  static constexpr int state_floats = has_statistics<Config> ? 4 : 2;

  static constexpr float lowest_base = -0x1.fffffep127f;

  enum class Destination { output, cluster, memory };

  // Merges the partial results of the warps, or of groups of column warps, in shared memory.
  __device__ void merge_warps() const {
    const PartialTile& partial_tile = cta.partial_tile;
    const Destination destination = partial_tile.is_unsplit() ? Destination::output
                                    : partial_tile.count == 1 ? Destination::memory
                                                              : Destination::cluster;
    constexpr int key_warps = Cta::ColumnWarps::key_warps;
    const Slice all_columns;
    merge<key_warps>(Cta::shared_floats(), Cta::key_warp_bytes / 4, key_warps, all_columns, 0,
                     cta.tile_rows(), destination, partial_tile.result);
    if (partial_tile.count == 1) merge_in_memory(all_columns);
  }

  // Merges the partial results that the other CTAs of the cluster send.
  __device__ void merge_received() const {
    const PartialTile& partial_tile = cta.partial_tile;
    const Slice slice = Slice::for_cta(partial_tile, partial_tile.index);
    Cluster{cta}.wait_results();
    merge<Config::cluster>(
        Cta::receive_buffer(), Cta::receive_floats, partial_tile.count, slice, 0, cta.tile_rows(),
        partial_tile.results == 1 ? Destination::output : Destination::memory, partial_tile.result);
    merge_in_memory(slice);
  }

  // Merges results in global memory, where this CTA or its cluster has written one. The last CTA of
  // a merge group to arrive merges the group and proceeds to the next level of the tree.
  __device__ void merge_in_memory(const Slice& slice) const {
    const PartialTile& partial_tile = cta.partial_tile;
#pragma unroll 1
    for (MergeGroup merge_group(partial_tile.result); merge_group.step < partial_tile.results;
         merge_group.next_level()) {
      const int count = merge_group.count(partial_tile.results);
      if (count == 1) continue;
      if (!memory.is_last_to_arrive(merge_group, count, slice)) return;
      merge_results(merge_group, count, slice);
    }
  }

  // Merges all rows of a merge group, as many at a time as fit in shared memory.
  __device__ void merge_results(const MergeGroup& merge_group, int count,
                                const Slice& slice) const {
    const Destination destination =
        merge_group.is_root(cta.partial_tile.results) ? Destination::output : Destination::memory;
    const int all_rows = cta.tile_rows();
    const int rows_per_pass = Cta::rings_bytes / (count * slice.record() * 4);
#pragma unroll 1
    for (int first_row = 0; first_row < all_rows; first_row += rows_per_pass) {
      const int rows = min(rows_per_pass, all_rows - first_row);
      memory.gather(merge_group, count, first_row, rows, slice);
      merge<MergeGroup::fan_in>(Cta::shared_floats(), rows * slice.record(), count, slice,
                                first_row, rows, destination, merge_group.first);
      // All warps have read these rows before the next ones overwrite them.
      __syncthreads();
    }
  }

  // Merges the rows [first, first + rows) of at most `MaxResults` results, always in the same
  // order. The results are in shared memory, result_floats apart. In global memory, the merged
  // result overwrites result `target`.
  template <int MaxResults>
  __device__ void merge(const float* source, int result_floats, int results, const Slice& slice,
                        int first, int rows, Destination destination, int target) const {
    // A copy in registers: after a store, the compiler would read `cta.partial_tile` again.
    const PartialTile partial_tile = cta.partial_tile;
    const int first_row = slice.first_row(), step = slice.rows_at_once();
    if (first_row >= step) return;
#pragma unroll 1
    for (int chunk = threadIdx.x - first_row * slice.chunks(); chunk < slice.valid_chunks();
         chunk += Slice::threads) {
#pragma unroll 1
      for (int row = first_row; row < rows; row += step) {
        merge_chunk<MaxResults>(partial_tile, source + row * slice.record(), result_floats, results,
                                slice, first + row, chunk, destination, target);
      }
    }
  }

  // Merges four columns of a row. All loads are issued before the first one is used.
  template <int MaxResults>
  __device__ void merge_chunk(const PartialTile& partial_tile, const float* source,
                              int result_floats, int results, const Slice& slice, int row,
                              int chunk, Destination destination, int target) const {
    // An index past the last result reads the last one again; the second loop below ignores it.
    const auto result = [&](int r) { return source + min(r, results - 1) * result_floats; };
    // A partial result over no visible key has base -inf and weight 0. If all results are such,
    // `base` is lowest_base: with -inf, the weights would be NaN.
    float base = lowest_base;
#pragma unroll
    for (int r = 0; r < MaxResults; ++r) base = fmaxf(base, result(r)[slice.state()]);
    float sum = 0;
    RowStatistics<float, Config::max_logits, Config::entropy> statistics;
    Vector<float, 4> merged = {};
#pragma unroll
    for (int r = 0; r < MaxResults; ++r) {
      const float* record = result(r);
      const auto values = *reinterpret_cast<const Vector<float, 4>*>(record + 4 * chunk);
      const auto state =
          *reinterpret_cast<const Vector<float, state_floats>*>(record + slice.state());
      const float weight = Math::exp2(state.data[0] - base);
      if (r >= results) continue;
      sum = fmaf(weight, state.data[1], sum);
      if constexpr (Config::max_logits) statistics.include_score(state.data[2]);
      if constexpr (Config::entropy) {
        ExponentMoment<float, true> part = {state.data[3]};
        part.shift_base(base - state.data[0], state.data[1], weight);
        statistics.moment += part.moment;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) merged.data[c] = fmaf(weight, values.data[c], merged.data[c]);
    }
    if (destination != Destination::output) {
      Vector<float, 4> state = {{base, sum}};
      if constexpr (Config::max_logits) state.data[2] = statistics.largest;
      if constexpr (Config::entropy) state.data[3] = statistics.moment;
      write_partial(partial_tile, row, chunk, merged, state, slice, destination, target);
      return;
    }
    float normalizer = sum == 0 ? 0 : ptx::rcp_approx(sum);
    if constexpr (Config::sinks) {
      float lse = log_sum_exp(base, sum);
      normalizer *= apply_sink<Config>(cta.p, cta.score_row(row).head, lse);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) merged.data[c] *= normalizer;
    const int column = 4 * (slice.first_chunk() + chunk);
    write_output(row, column, merged);
    if (column == 0 && cta.p.lse != nullptr) {
      float lse = log_sum_exp(base, sum);
      if constexpr (Config::sinks) {
        apply_sink<Config>(cta.p, cta.score_row(row).head, lse);
      }
      write_number([&] { return cta.p.lse; }, row, lse);
    }
    if constexpr (has_statistics<Config>) {
      if (column == 0) write_row_statistics(row, base, sum, statistics);
    }
  }

  __device__ static float log_sum_exp(float base, float sum) {
    const float log_sum = sum == 0 ? -Math::infinity() : base + Math::log2(sum);
    return log_sum * Math::ln_2;
  }

  // Writes a chunk of a row for further merging, and with the first chunk the row's base and sum.
  __device__ void write_partial(const PartialTile& partial_tile, int row, int chunk,
                                const Vector<float, 4>& values, const Vector<float, 4>& state,
                                const Slice& slice, Destination destination, int target) const {
    if (!Cta::in_cluster || destination == Destination::memory) {
      float* record = memory.result(target, slice) + row * slice.record();
      ptx::st_global_v4(record + 4 * chunk, values.data);
      if (chunk == 0) ptx::st_global_v4(record + slice.state(), state.data);
      return;
    }
    if constexpr (Cta::in_cluster) Cluster{cta}.send(partial_tile, row, chunk, values, state);
  }

  __device__ void write_output(int row, int column, const Vector<float, 4>& values) const {
    const Sequence& sequence = cta.partial_tile.sequence;
    const int64 output_row = sequence.q_first + cta.query_of(row);
    const int head = cta.partial_tile.head_kv * Cta::group + cta.head_of(row);
    Element* target = cta.p.out.template head<Element>(sequence.q_batch, head) +
                      output_row * cta.p.out.row_stride + column;
    constexpr int dim = Config::head_dim_v;
    if (Config::out_alignment >= 8 && (dim % 16 == 0 || dim - column >= 4)) {
      ptx::st_global_v2(target, pack<Element>(values.data[0], values.data[1]),
                        pack<Element>(values.data[2], values.data[3]));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < dim - column) target[c] = narrow<Element>(values.data[c]);
      }
    }
  }

  template <class Statistics>
  __device__ void write_row_statistics(int row, float base, float sum,
                                       const Statistics& statistics) const {
    RowSummary<float> summary;
    if (sum != 0) {
      const float unit = logit_unit<Config, float>(cta.p);
      summary = RowSummary<float>::of(statistics, sum, Math::log2(sum), unit);
      float lse = log_sum_exp(base, sum);
      summary.scale_weights(apply_sink<Config>(cta.p, cta.score_row(row).head, lse));
    }
    const auto& p = cta.p;
    if constexpr (Config::max_logits) {
      write_number([&] { return p.max_logits; }, row, summary.max_logit);
    }
    if constexpr (Config::entropy) write_number([&] { return p.entropy; }, row, summary.entropy);
  }

  // Writes the log-sum-exp or a statistic of a row to array(), which has the shape of lse. The
  // address is a function, so that it is loaded only after the index is known.
  template <class Array>
  __device__ void write_number(Array array, int row, float number) const {
    // lse has shape (batch, heads_q, seqlen_q) or, for packed queries, (heads_q, total_q).
    const Params& p = cta.p;
    const Sequence& sequence = cta.partial_tile.sequence;
    const bool is_packed = Config::has_seqlens && cta.p.cu_seqlens_q != nullptr;
    const int seqlen = is_packed ? cta.p.total_q : p.seqlen_q;
    const int64 head = int64(sequence.q_batch) * p.heads_q + cta.partial_tile.head_kv * Cta::group +
                       cta.head_of(row);
    static_cast<float*>(array())[head * seqlen + sequence.q_first + cta.query_of(row)] = number;
  }
};

#endif  // __CUDA_ARCH__ >= 800
