// Merging: of the warps' results, then, where an item has several parts, of the blocks'. None of it
// runs often, and code is fetched from memory like anything else: no loop is unrolled further than
// it takes to have several loads under way.
#pragma once

#include "forward/decode/block.cuh"
#include "forward/decode/cluster.cuh"
#include "forward/decode/columns.cuh"
#include "forward/decode/memory.cuh"
#include "ptx/base.cuh"
#include "ptx/wide.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "grid/shares.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeMerge {
  using Element = typename Config::Element;
  using Block = DecodeBlock<Config>;
  using Cluster = DecodeCluster<Config>;
  using Columns = MergedColumns<Config>;
  using Math = SoftmaxMath<float>;

  const Block& block;
  const DecodeMemory<Config> memory;

  __device__ explicit DecodeMerge(const Block& block) : block(block), memory{block} {}

  static constexpr float lowest_base = -0x1.fffffep127f;

  // Where a merged result goes.
  enum class To { output, cluster, memory };

  // The warps' results, or the teams', in shared memory.
  __device__ void merge_warps() const {
    const Part& part = block.part;
    const To to = part.is_whole() ? To::output : part.count == 1 ? To::memory : To::cluster;
    constexpr int teams = Block::Team::teams;
    const Columns all;
    merge<teams>(Block::shared_floats(), Block::team_bytes / 4, teams, all, 0, block.tile_rows(),
                 to, part.result);
    if (part.count == 1) join(all);
  }

  // In a cluster: what the other blocks with parts of the item have sent or will send.
  __device__ void merge_sent() const {
    const Part& part = block.part;
    const Columns columns = Columns::of_block(part, part.number);
    Cluster{block}.wait_for_sent();
    merge<Config::cluster>(Block::kept_results(), Block::kept_floats, part.count, columns, 0,
                           block.tile_rows(), part.results == 1 ? To::output : To::memory,
                           part.result);
    join(columns);
  }

  // The cluster's result, or the block's, is in device memory. Of each group the last to arrive
  // goes on with what it has merged.
  __device__ void join(const Columns& columns) const {
    const Part& part = block.part;
#pragma unroll 1
    for (Meeting meeting(part.result); meeting.step < part.results; meeting.rise()) {
      const int count = meeting.count(part.results);
      if (count == 1) continue;
      if (!memory.is_last_to_arrive(meeting, count, columns)) return;
      merge_group(meeting, count, columns);
    }
  }

  // All rows, as many at a time as fit.
  __device__ void merge_group(const Meeting& meeting, int count, const Columns& columns) const {
    const To to = meeting.is_last(block.part.results) ? To::output : To::memory;
    const int all_rows = block.tile_rows();
    const int at_once = Block::rings_bytes / (count * columns.record() * 4);
#pragma unroll 1
    for (int first_row = 0; first_row < all_rows; first_row += at_once) {
      const int rows = min(at_once, all_rows - first_row);
      memory.gather(meeting, count, first_row, rows, columns);
      merge<Meeting::fan>(Block::shared_floats(), rows * columns.record(), count, columns,
                          first_row, rows, to, meeting.first);
      // All warps have left what the next rows take the place of.
      __syncthreads();
    }
  }

  // Merges the rows [first, first + rows) of at most Most results in shared memory, that begin
  // result_floats apart, always in the same order. In device memory the merged one takes the place
  // of result `target`.
  template <int Most>
  __device__ void merge(const float* source, int result_floats, int results, const Columns& columns,
                        int first, int rows, To to, int target) const {
    // In registers, before there is a store behind which it would be read again.
    const Part part = block.part;
    const int first_row = columns.first_row(), step = columns.rows_at_once();
    if (first_row >= step) return;
#pragma unroll 1
    for (int chunk = threadIdx.x - first_row * columns.chunks(); chunk < columns.chunks_there();
         chunk += Columns::threads) {
#pragma unroll 1
      for (int row = first_row; row < rows; row += step) {
        merge_chunk<Most>(part, source + row * columns.record(), result_floats, results, columns,
                          first + row, chunk, to, target);
      }
    }
  }

  // Four columns of a row. All loads are under way before one is needed.
  template <int Most>
  __device__ void merge_chunk(const Part& part, const float* source, int result_floats,
                              int results, const Columns& columns, int row, int chunk, To to,
                              int target) const {
    // The last stands in for those that are not there.
    const auto result = [&](int r) { return source + min(r, results - 1) * result_floats; };
    // What saw no key has the base -infinity, and is 0. If none did the base is some number.
    float base = lowest_base;
#pragma unroll
    for (int r = 0; r < Most; ++r) base = fmaxf(base, result(r)[columns.state()]);
    float sum = 0;
    Vector<float, 4> merged = {};
#pragma unroll
    for (int r = 0; r < Most; ++r) {
      const float* one = result(r);
      const auto values = *reinterpret_cast<const Vector<float, 4>*>(one + 4 * chunk);
      const auto state = *reinterpret_cast<const Vector<float, 2>*>(one + columns.state());
      const float weight = Math::exp2(state.at[0] - base);
      if (r >= results) continue;
      sum = fmaf(weight, state.at[1], sum);
#pragma unroll
      for (int c = 0; c < 4; ++c) merged.at[c] = fmaf(weight, values.at[c], merged.at[c]);
    }
    if (to != To::output) {
      leave_partial(part, row, chunk, merged, {{base, sum}}, columns, to, target);
      return;
    }
    float normalizer = sum == 0 ? 0 : ptx::rcp_approx(sum);
    if constexpr (Config::sinks) {
      float lse = log_sum_exp(base, sum);
      normalizer *= take_sink<Config>(block.p, block.score_row(row).head, lse);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) merged.at[c] *= normalizer;
    const int column = 4 * (columns.first_chunk() + chunk);
    write_output(row, column, merged);
    if (column == 0 && block.p.lse != nullptr) {
      float lse = log_sum_exp(base, sum);
      if constexpr (Config::sinks) {
        take_sink<Config>(block.p, block.score_row(row).head, lse);
      }
      write_log_sum_exp(row, lse);
    }
  }

  __device__ static float log_sum_exp(float base, float sum) {
    const float log_sum = sum == 0 ? -Math::infinity() : base + Math::log2(sum);
    return log_sum * Math::ln_2;
  }

  // A chunk of a row of a result that others are merged with; with the first, the row's state.
  __device__ void leave_partial(const Part& part, int row, int chunk,
                                const Vector<float, 4>& values, const Vector<float, 4>& state,
                                const Columns& columns, To to, int target) const {
    if (!Block::in_cluster || to == To::memory) {
      float* record = memory.result(target, columns) + row * columns.record();
      ptx::st_global_v4(record + 4 * chunk, values.at);
      if (chunk == 0) ptx::st_global_v4(record + columns.state(), state.at);
      return;
    }
    if constexpr (Block::in_cluster) Cluster{block}.send(part, row, chunk, values, state);
  }

  __device__ void write_output(int row, int column, const Vector<float, 4>& values) const {
    const Sequence& sequence = block.part.sequence;
    const int64 output_row = sequence.q_first + block.query_of(row);
    const int head = block.part.head_kv * Block::group + block.head_of(row);
    Element* target = block.p.out.template head<Element>(sequence.q_batch, head) +
                      output_row * block.p.out.row_stride + column;
    constexpr int columns = Config::head_dim_v;
    if (Config::out_alignment >= 8 && (columns % 16 == 0 || columns - column >= 4)) {
      ptx::st_global_v2(target, pack<Element>(values.at[0], values.at[1]),
                        pack<Element>(values.at[2], values.at[3]));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < columns - column) target[c] = narrow<Element>(values.at[c]);
      }
    }
  }

  __device__ void write_log_sum_exp(int row, float lse) const {
    // (batch, heads_q, seqlen_q), or (heads_q, total_q).
    const Params& p = block.p;
    const Sequence& sequence = block.part.sequence;
    const bool is_packed = Config::sequences && block.p.cu_seqlens_q != nullptr;
    const int seqlen = is_packed ? block.p.total_q : p.seqlen_q;
    const int64 head = int64(sequence.q_batch) * p.heads_q + block.part.head_kv * Block::group +
                       block.head_of(row);
    static_cast<float*>(p.lse)[head * seqlen + sequence.q_first + block.query_of(row)] = lse;
  }
};

#endif  // __CUDA_ARCH__ >= 800
