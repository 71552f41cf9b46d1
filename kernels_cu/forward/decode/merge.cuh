// Merging of partial results: first those of the warps, then those of CTAs if a query tile has
// several partial tiles. This code runs rarely, and code is fetched from memory, too. So loops are
// unrolled only as far as needed to have several loads in flight.
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

  enum class To { output, cluster, memory };

  // Merges the partial results of the warps, or of groups of column warps, in shared memory.
  __device__ void merge_warps() const {
    const PartialTile& partial_tile = block.partial_tile;
    const To to = partial_tile.is_unsplit() ? To::output : partial_tile.count == 1 ? To::memory : To::cluster;
    constexpr int teams = Block::Team::teams;
    const Columns all;
    merge<teams>(Block::shared_floats(), Block::team_bytes / 4, teams, all, 0, block.tile_rows(),
                 to, partial_tile.result);
    if (partial_tile.count == 1) join(all);
  }

  // Merges the partial results that the other CTAs of the cluster send.
  __device__ void merge_sent() const {
    const PartialTile& partial_tile = block.partial_tile;
    const Columns columns = Columns::of_block(partial_tile, partial_tile.index);
    Cluster{block}.wait_for_sent();
    merge<Config::cluster>(Block::kept_results(), Block::kept_floats, partial_tile.count, columns, 0,
                           block.tile_rows(), partial_tile.results == 1 ? To::output : To::memory,
                           partial_tile.result);
    join(columns);
  }

  // Merges results in global memory, where this CTA or its cluster has written one. The last CTA of
  // a merge group to arrive merges the group and proceeds to the next level of the tree.
  __device__ void join(const Columns& columns) const {
    const PartialTile& partial_tile = block.partial_tile;
#pragma unroll 1
    for (MergeGroup merge_group(partial_tile.result); merge_group.step < partial_tile.results; merge_group.next_level()) {
      const int count = merge_group.count(partial_tile.results);
      if (count == 1) continue;
      if (!memory.is_last_to_arrive(merge_group, count, columns)) return;
      merge_results(merge_group, count, columns);
    }
  }

  // Merges all rows of a merge group, as many at a time as fit in shared memory.
  __device__ void merge_results(const MergeGroup& merge_group, int count, const Columns& columns) const {
    const To to = merge_group.is_root(block.partial_tile.results) ? To::output : To::memory;
    const int all_rows = block.tile_rows();
    const int at_once = Block::rings_bytes / (count * columns.record() * 4);
#pragma unroll 1
    for (int first_row = 0; first_row < all_rows; first_row += at_once) {
      const int rows = min(at_once, all_rows - first_row);
      memory.gather(merge_group, count, first_row, rows, columns);
      merge<MergeGroup::fan_in>(Block::shared_floats(), rows * columns.record(), count, columns,
                          first_row, rows, to, merge_group.first);
      // All warps have read these rows before the next ones overwrite them.
      __syncthreads();
    }
  }

  // Merges the rows [first, first + rows) of at most `Most` results, always in the same order. The
  // results are in shared memory, result_floats apart. In global memory, the merged result
  // overwrites result `target`.
  template <int Most>
  __device__ void merge(const float* source, int result_floats, int results, const Columns& columns,
                        int first, int rows, To to, int target) const {
    // A copy in registers: after a store, the compiler would read `block.partial_tile` again.
    const PartialTile partial_tile = block.partial_tile;
    const int first_row = columns.first_row(), step = columns.rows_at_once();
    if (first_row >= step) return;
#pragma unroll 1
    for (int chunk = threadIdx.x - first_row * columns.chunks(); chunk < columns.chunks_there();
         chunk += Columns::threads) {
#pragma unroll 1
      for (int row = first_row; row < rows; row += step) {
        merge_chunk<Most>(partial_tile, source + row * columns.record(), result_floats, results, columns,
                          first + row, chunk, to, target);
      }
    }
  }

  // Merges four columns of a row. All loads are issued before the first one is used.
  template <int Most>
  __device__ void merge_chunk(const PartialTile& partial_tile, const float* source, int result_floats,
                              int results, const Columns& columns, int row, int chunk, To to,
                              int target) const {
    // Indices past the last result read it again; the loop below ignores them.
    const auto result = [&](int r) { return source + min(r, results - 1) * result_floats; };
    // A partial result over no visible key has base -inf and weight 0. If all are such, the base
    // stays finite.
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
      leave_partial(partial_tile, row, chunk, merged, {{base, sum}}, columns, to, target);
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

  // Writes a chunk of a row for further merging. The first chunk comes with the row's base and sum.
  __device__ void leave_partial(const PartialTile& partial_tile, int row, int chunk,
                                const Vector<float, 4>& values, const Vector<float, 4>& state,
                                const Columns& columns, To to, int target) const {
    if (!Block::in_cluster || to == To::memory) {
      float* record = memory.result(target, columns) + row * columns.record();
      ptx::st_global_v4(record + 4 * chunk, values.at);
      if (chunk == 0) ptx::st_global_v4(record + columns.state(), state.at);
      return;
    }
    if constexpr (Block::in_cluster) Cluster{block}.send(partial_tile, row, chunk, values, state);
  }

  __device__ void write_output(int row, int column, const Vector<float, 4>& values) const {
    const Sequence& sequence = block.partial_tile.sequence;
    const int64 output_row = sequence.q_first + block.query_of(row);
    const int head = block.partial_tile.head_kv * Block::group + block.head_of(row);
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
    // lse has shape (batch, heads_q, seqlen_q) or, for packed queries, (heads_q, total_q).
    const Params& p = block.p;
    const Sequence& sequence = block.partial_tile.sequence;
    const bool is_packed = Config::sequences && block.p.cu_seqlens_q != nullptr;
    const int seqlen = is_packed ? block.p.total_q : p.seqlen_q;
    const int64 head = int64(sequence.q_batch) * p.heads_q + block.partial_tile.head_kv * Block::group +
                       block.head_of(row);
    static_cast<float*>(p.lse)[head * seqlen + sequence.q_first + block.query_of(row)] = lse;
  }
};

#endif  // __CUDA_ARCH__ >= 800
