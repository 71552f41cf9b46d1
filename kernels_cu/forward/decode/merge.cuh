// Merging: of the warps' results, then, where an item has several parts, of the blocks'. None of it
// runs often, and code is fetched from memory like anything else: no loop is unrolled further than
// it takes to have several loads under way.
#pragma once

#include "forward/decode/block.cuh"
#include "forward/decode/cluster.cuh"
#include "forward/decode/memory.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"
#include "grid/shares.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeMerge {
  using Element = typename Config::Element;
  using Block = DecodeBlock<Config>;
  using Cluster = DecodeCluster<Config>;
  using Math = SoftmaxMath<float>;
  static constexpr int record = Block::record;
  static constexpr int columns = Block::record_columns;

  const Block& block;
  const DecodeMemory<Config> memory;

  __device__ explicit DecodeMerge(const Block& block) : block(block), memory{block} {}

  // Where a merged result goes.
  enum class To { output, cluster, memory };

  // The warps' results, or the teams', in shared memory.
  __device__ void merge_warps() const {
    const Part& part = block.part;
    const To to = part.is_whole() ? To::output : part.count == 1 ? To::memory : To::cluster;
    constexpr int teams = Block::Team::teams;
    merge<teams>(Block::shared_floats(), Block::team_bytes / 4, teams, 0, block.tile_rows(), to,
                 part.result);
    if (part.count == 1) join();
  }

  // In a cluster: what the other blocks with parts of the item have sent or will send.
  __device__ void merge_sent() const {
    const Part& part = block.part;
    Cluster{block}.wait_for_sent();
    merge<Config::cluster>(Block::kept_results(), Block::kept_floats, part.count, 0,
                           block.tile_rows(), part.results == 1 ? To::output : To::memory,
                           part.result);
    join();
  }

  // The cluster's result, or the block's, is in device memory. Of each group the last to arrive
  // goes on with what it has merged.
  __device__ void join() const {
    const Part& part = block.part;
#pragma unroll 1
    for (Meeting meeting(part.result); meeting.step < part.results; meeting.rise()) {
      const int count = meeting.count(part.results);
      if (count == 1) continue;
      if (!memory.is_last_to_arrive(meeting, count)) return;
      merge_group(meeting, count);
    }
  }

  // All rows, as many at a time as fit.
  __device__ void merge_group(const Meeting& meeting, int count) const {
    const To to = meeting.is_last(block.part.results) ? To::output : To::memory;
    const int all_rows = block.tile_rows();
    const int at_once = Block::rings_bytes / (count * record * 4);
#pragma unroll 1
    for (int first_row = 0; first_row < all_rows; first_row += at_once) {
      const int rows = min(at_once, all_rows - first_row);
      memory.gather(meeting, count, first_row, rows);
      merge<Meeting::fan>(Block::shared_floats(), rows * record, count, first_row, rows, to,
                          meeting.first);
      // All warps have left what the next rows take the place of.
      __syncthreads();
    }
  }

  // Merges the rows [first, first + rows) of at most Most results in shared memory, that begin
  // result_floats apart, always in the same order. In device memory the merged one takes the place
  // of result `target`. A thread has four columns of a row, and all its loads are under way before
  // it needs one.
  template <int Most>
  __device__ void merge(const float* source, int result_floats, int results, int first, int rows,
                        To to, int target) const {
    constexpr int row_chunks = Block::output_chunks;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * row_chunks; i += 32 * Config::warps) {
      const int row = i / row_chunks;
      const int column = i % row_chunks * 4;
      // The last stands in for those that are not there.
      const auto result = [&](int r) {
        return source + row * record + min(r, results - 1) * result_floats;
      };
      float base = -Math::infinity();
#pragma unroll
      for (int r = 0; r < Most; ++r) base = fmaxf(base, result(r)[columns]);
      float sum = 0;
      Vector<float, 4> merged = {};
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        const float* one = result(r);
        const auto values = *reinterpret_cast<const Vector<float, 4>*>(one + column);
        // What saw no key has no say: it has no base, and columns of anything.
        const auto state = *reinterpret_cast<const Vector<float, 2>*>(one + columns);
        const bool counts = r < results && state.at[0] > -Math::infinity();
        const float weight = counts ? Math::exp2(state.at[0] - base) : 0;
        sum = fmaf(weight, counts ? state.at[1] : 0, sum);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          merged.at[c] = fmaf(weight, counts ? values.at[c] : 0, merged.at[c]);
        }
      }
      if (to != To::output) {
        leave_partial((first + row) * record + column, merged, to, target);
        if (column == 0) leave_partial((first + row) * record + columns, {{base, sum}}, to, target);
        continue;
      }
      float normalizer = sum == 0 ? 0 : 1 / sum;
      if constexpr (Config::sinks) {
        float lse = log_sum_exp(base, sum);
        normalizer *= take_sink<Config>(block.p, block.score_row(first + row).head, lse);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) merged.at[c] *= normalizer;
      write_output(first + row, column, merged);
      if (column == 0 && block.p.lse != nullptr) {
        const float log_sum = sum == 0 ? -Math::infinity() : base + Math::log2(sum);
        float lse = log_sum * Math::ln_2;
        if constexpr (Config::sinks) {
          take_sink<Config>(block.p, block.score_row(first + row).head, lse);
        }
        write_log_sum_exp(first + row, lse);
      }
    }
  }

  __device__ static float log_sum_exp(float base, float sum) {
    const float log_sum = sum == 0 ? -Math::infinity() : base + Math::log2(sum);
    return log_sum * Math::ln_2;
  }

  // Four floats of a result that others are merged with.
  __device__ void leave_partial(int index, const Vector<float, 4>& values, To to,
                                int target) const {
    if (!Block::in_cluster || to == To::memory) {
      *reinterpret_cast<Vector<float, 4>*>(memory.result(target) + index) = values;
      return;
    }
    if constexpr (Block::in_cluster) Cluster{block}.send(index, values);
  }

  __device__ void write_output(int row, int column, const Vector<float, 4>& values) const {
    Vector<Element, 4> narrowed;
#pragma unroll
    for (int c = 0; c < 4; ++c) narrowed.at[c] = narrow<Element>(values.at[c]);
    const Sequence& sequence = block.part.sequence;
    const int64 output_row = sequence.q_first + block.query_of(row);
    const int head = block.part.head_kv * Block::group + block.head_of(row);
    Element* target = block.p.out.template head<Element>(sequence.q_batch, head) +
                      output_row * block.p.out.row_stride + column;
    store_columns<Config::head_dim_v, Config::out_alignment>(target, narrowed,
                                                             Config::head_dim_v - column);
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
