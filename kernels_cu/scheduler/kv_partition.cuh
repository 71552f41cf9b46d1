// Distribution of KV work over CTAs in `decode`, where few query rows attend to many keys.
//
// An output tile is a tile of query rows with one KV head; its keys are counted in units of
// `unit_keys` keys. By default, every output tile is split into `num_splits` partial tiles. With
// `Config::balanced` (stream-K: Osama et al. 2023; Lean Attention: Sanovar et al. 2024), the units
// of all sequences are numbered consecutively, and each CTA of a KV head and row tile processes an
// equal range of units, the work range. All CTAs then end together, whatever the lengths, and only
// the first and last output tile of a work range may be split. CTAs of different heads process the
// same keys at the same time: the heads of a key are adjacent in memory, so the CTAs together read
// long contiguous runs, which DRAM delivers faster.
//
// The CTAs of a cluster merge their partial tiles of an output tile within the cluster; the results
// of several clusters are merged in device memory. Without clusters, each CTA counts as a cluster.
#pragma once

#include "params.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/sequences.cuh"
#include "score/mask.cuh"

// Partial tile: the KV units of an output tile that one CTA processes. `set_merge_info()` sets the
// members from `index` on.
struct PartialTile {
  int batch;
  int head_kv;
  int row_tile;
  Sequence sequence;
  int begin;    // first KV unit
  int end;      // one past the last KV unit
  int index;    // index among this cluster's partial tiles of the output tile
  int count;    // number of this cluster's partial tiles of the output tile
  int first_cta_rank;  // rank in the cluster of the CTA that has partial tile 0 of these
  int result;   // index of this cluster's result among the results of the output tile
  int results;  // number of results (one per cluster) that are merged in device memory
  int first_slot;
  int slot_step;
  int first_result_offset;
  // Whether this output tile is the last one of every CTA in every cluster that processes a part of
  // it. Each of these CTAs then merges a slice of the columns.
  bool is_sliced;

  __device__ bool is_unsplit() const { return count == 1 && results == 1; }

  // Returns the slot in device memory of a result of the output tile, and of its counter.
  __device__ int slot_of(int result) const {
    return first_slot + slot_step * result + (result == 0 ? first_result_offset : 0);
  }
};

// Merge group: a node of the tree that merges an output tile's results in device memory. A group of
// `fan_in` results is merged into the slot of its first result, a member of a next-level group.
struct MergeGroup {
  // Size of a group. CTAs merge groups in parallel; a single CTA would take 100 us for 132 results.
  static constexpr int fan_in = 8;

  int first;     // index of the group's first result
  int step = 1;  // difference between the indices of consecutive members
  int level = 0;

  __device__ explicit MergeGroup(int result) : first(result - result % fan_in) {}

  // Returns the number of members, if the output tile has `results` results.
  __device__ int count(int results) const { return min(fan_in, ceil_div(results - first, step)); }
  __device__ bool is_root(int results) const { return step * fan_in >= results; }
  // Returns the result whose counter the group uses. No other group uses it: groups of the first
  // level use a multiple of `fan_in`, groups of a higher level a multiple of `fan_in` plus their
  // level.
  __device__ int counter() const { return first + level; }

  __device__ void next_level() {
    step *= fan_in;
    ++level;
    first -= first % (step * fan_in);
  }
};

// Work range of a CTA, and the position in it. Without `Config::balanced`, `next` is the index of
// the current partial tile among all partial tiles, `end` is their number, and the other members
// are unused. The host ensures that all counts fit in 31 bits: a 64-bit division takes 0.2 us.
struct WorkRange {
  unsigned total_units;     // number of units of all sequences
  unsigned range_units;     // number of units of a work range
  unsigned next;            // first unit of the current partial tile
  unsigned end;             // one past the last unit of the work range
  unsigned sequence_begin;  // first unit of sequence `batch`
  int batch;
  Sequence sequence;
};

// Computes the work range of a CTA and its partial tiles. One warp calls `init_work_range()`; one
// of its lanes calls the other functions.
template <class Config>
struct KvPartitioner {
  static constexpr int unit_keys = Config::Bc * (Config::warps / Config::column_warps);
  static constexpr int group = Config::group;  // number of query heads per KV head
  static constexpr unsigned cluster = Config::cluster > 0 ? Config::cluster : 1;  // cluster size

  const Params& p;
  WorkRange& work_range;
  const int row_tiles;  // number of row tiles of the longest sequence, for one KV head
  const int output_tiles;  // number of output tiles of the longest sequence, for all KV heads
  const int lane_seqlen;   // seqused_k[lane], or 0

  __device__ KvPartitioner(const Params& params, WorkRange& work_range, int lane_seqlen)
      : p(params),
        work_range(work_range),
        lane_seqlen(lane_seqlen),
        row_tiles(ceil_div(params.seqlen_q * group, Config::Br)),
        output_tiles(params.heads_kv * row_tiles) {}

  __device__ void init_work_range() {
    if constexpr (Config::balanced) {
      work_range = stream_k_range();
    } else {
      work_range.next = blockIdx.x;
      work_range.end = unsigned(p.batch) * output_tiles * p.num_splits;
    }
  }

  // Sets the members of `partial_tile` up to `end`. Returns whether a partial tile is left.
  __device__ bool get_tile(PartialTile& partial_tile) {
    if constexpr (Config::balanced) {
      return get_stream_k_tile(partial_tile);
    } else {
      return get_split_tile(partial_tile);
    }
  }

  // Sets the members of `partial_tile` from `index` on, which only merging needs.
  __device__ void set_merge_info(PartialTile& partial_tile) const {
    if constexpr (Config::balanced) {
      set_stream_k_merge_info(partial_tile);
    } else {
      set_split_merge_info(partial_tile);
    }
  }

  // Returns whether more partial tiles may follow `partial_tile`.
  __device__ bool has_next(const PartialTile& partial_tile) const {
    return Config::balanced
               ? work_range.next + (partial_tile.end - partial_tile.begin) < work_range.end
               : work_range.next + gridDim.x < work_range.end;
  }

  // Advances to the partial tile after `partial_tile`.
  __device__ void advance(const PartialTile& partial_tile) {
    if constexpr (Config::balanced) {
      work_range.next += partial_tile.end - partial_tile.begin;
      if (work_range.next < work_range.end) {
        work_range.sequence_begin = work_range.next;
        work_range.sequence = sequence_of(++work_range.batch);
      }
    } else {
      work_range.next += gridDim.x;
    }
  }

  // Returns about the number of keys in all sequences times the number of KV heads, rounded up.
  __device__ int64 total_keys() const {
    return Config::balanced ? int64(work_range.total_units) * unit_keys * p.heads_kv
                            : int64(p.batch) * p.seqlen_k * p.heads_kv;
  }

 private:
  __device__ Sequence sequence_of(int batch) const {
    return sequence_of(p, batch);
  }
  // Returns the sequence at the lane's index, whose length `lane_seqlen` is already loaded.
  __device__ Sequence sequence_of_lane() const {
    Params lane_params = p;
    if (p.seqused_k != nullptr) lane_params.keys = lane_seqlen;
    lane_params.seqused_k = nullptr;
    const int lane = threadIdx.x % 32;
    return sequence_of(lane_params, min(lane, p.batch - 1));
  }
  __device__ static Sequence sequence_of(const Params& p, int batch) {
    if constexpr (Config::has_seqlens) {
      // `Config::balanced` excludes packed queries, and keys are packed only if queries are.
      int capacity;
      return find_sequence<Config::page_size, !Config::balanced>(p, batch, capacity);
    } else {
      return {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
    }
  }

  // Returns the first KV unit that any row of the sequence attends to; no CTA processes earlier
  // ones.
  __device__ int first_unit(const Sequence& sequence, int batch) const {
    if constexpr (Config::window_left) {
      const Mask<Config> mask(sequence.seqlen_k, q_offset_of(sequence, batch), {p, batch});
      return mask.visible_begin(0) / unit_keys;
    } else {
      return 0;
    }
  }
  __device__ int q_offset_of(const Sequence& sequence, int batch) const {
    return Config::has_seqlens ? sequence.template q_offset<Config>(p, batch)
                               : first_position<Config>(p, batch, p.q_offset);
  }

  // A sequence without keys still counts as one unit, so that one CTA writes its output rows.
  __device__ int unit_count(const Sequence& sequence, int batch) const {
    return max(1, ceil_div(sequence.seqlen_k, unit_keys) - first_unit(sequence, batch));
  }

  __device__ bool get_split_tile(PartialTile& partial_tile) {
    for (; work_range.next < work_range.end; work_range.next += gridDim.x) {
      const int split = work_range.next % p.num_splits;
      const int output_tile = work_range.next / p.num_splits;
      const int batch = output_tile / output_tiles;
      const Sequence sequence = sequence_of(batch);
      const int row_tile = output_tile % row_tiles;
      if (row_tile * Config::Br >= sequence.seqlen_q * group) continue;
      const int units = unit_count(sequence, batch);
      const int first = first_unit(sequence, batch);
      const int split_units = ceil_div(units, p.num_splits);
      const int begin = min(units, split * split_units);
      partial_tile.batch = batch;
      partial_tile.head_kv = output_tile % output_tiles / row_tiles;
      partial_tile.row_tile = row_tile;
      partial_tile.sequence = sequence;
      partial_tile.begin = first + begin;
      partial_tile.end = first + min(units, begin + split_units);
      return true;
    }
    return false;
  }

  __device__ void set_split_merge_info(PartialTile& partial_tile) const {
    const int split = work_range.next % p.num_splits;
    partial_tile.index = 0;
    partial_tile.count = 1;
    partial_tile.first_cta_rank = 0;
    partial_tile.result = split;
    partial_tile.results = p.num_splits;
    partial_tile.first_slot = work_range.next - split;
    partial_tile.slot_step = 1;
    partial_tile.first_result_offset = 0;
    partial_tile.is_sliced = false;
  }

  __device__ WorkRange stream_k_range() const {
    // All sequences have the same number of units if no array holds their lengths and if no array
    // of query positions (`Config::offsets`) moves the left edge of a window.
    constexpr bool same_first_unit = !(Config::offsets && Config::window_left);
    const bool is_uniform =
        (same_first_unit && !Config::has_seqlens) || p.batch == 1 ||
        (same_first_unit && p.seqused_k == nullptr && p.cache_batch_idx == nullptr);
    WorkRange range;
    if (is_uniform) {
      // Only lane 0 uses the returned work range, so `sequence_of_lane()` is sequence 0.
      range.sequence = sequence_of_lane();
      const int units = unit_count(range.sequence, 0);
      set_range(range, p.batch * units);
      range.batch = p.batch == 1 ? 0 : range.next / units;
      range.sequence_begin = range.batch * units;
      if (range.batch > 0 && range.next < range.end) range.sequence = sequence_of(range.batch);
    } else if (p.batch <= 32) {
      set_small_batch_range(range);
    } else {
      unsigned units = 0;
      for (int first = 0; first < p.batch; first += 32) units += warp_sum(lane_unit_count(first));
      set_range(range, units);
      find_first_sequence(range);
      if (range.next < range.end) range.sequence = sequence_of(range.batch);
    }
    return range;
  }

  // Sets the work range if there are at most 32 sequences: each lane looks up one of them.
  __device__ void set_small_batch_range(WorkRange& range) const {
    const int lane = threadIdx.x % 32;
    const Sequence lane_sequence = sequence_of_lane();
    const unsigned units = lane < p.batch ? unit_count(lane_sequence, lane) : 0;
    const unsigned inclusive = inclusive_scan(units);
    set_range(range, __shfl_sync(~0u, inclusive, 31));
    // A work range that starts past the last unit is empty, so any sequence will do.
    const int owner = min(31u, __ffs(__ballot_sync(~0u, range.next < inclusive)) - 1u);
    range.batch = owner;
    range.sequence_begin = __shfl_sync(~0u, inclusive - units, owner);
    range.sequence = {__shfl_sync(~0u, lane_sequence.q_batch, owner),
                      __shfl_sync(~0u, lane_sequence.q_first, owner),
                      __shfl_sync(~0u, lane_sequence.seqlen_q, owner),
                      __shfl_sync(~0u, lane_sequence.k_batch, owner),
                      __shfl_sync(~0u, lane_sequence.k_first, owner),
                      __shfl_sync(~0u, lane_sequence.seqlen_k, owner)};
  }

  // Sets the CTA's range of the `total_units` units. The grid axes are row tiles, KV heads, and the
  // CTAs that divide the units of a row tile and KV head. If there are few units, only the CTAs of
  // one cluster receive any, because merging across clusters would cost more than it saves.
  __device__ static void set_range(WorkRange& range, unsigned total_units) {
    const bool fits_cluster = Config::cluster > 0 && total_units <= Config::cluster_units * cluster;
    range.total_units = total_units;
    // `cluster` is a compile-time constant, so dividing by it in a branch of its own is cheap.
    if (fits_cluster) {
      range.range_units = (total_units + cluster - 1) / cluster;
    } else {
      range.range_units = (total_units + gridDim.z - 1) / gridDim.z;
    }
    range.next = min(total_units, blockIdx.z * range.range_units);
    range.end = min(total_units, range.next + range.range_units);
  }

  // Returns the number of units of the sequence at index first + lane.
  __device__ int lane_unit_count(int first) const {
    const int batch = first + threadIdx.x % 32;
    return batch < p.batch ? unit_count(sequence_of(batch), batch) : 0;
  }

  __device__ static unsigned inclusive_scan(unsigned x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned below = __shfl_up_sync(~0u, x, step);
      if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
  }

  __device__ static int warp_sum(int x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
  }

  // Finds the sequence in which the work range begins.
  __device__ void find_first_sequence(WorkRange& range) const {
    const unsigned next = range.next;
    if (next >= range.end) return;
    unsigned begin = 0;
    for (int first = 0;; first += 32) {
      const unsigned lane_units = lane_unit_count(first);
      const unsigned sum = inclusive_scan(lane_units);
      const unsigned after = __ballot_sync(~0u, next < begin + sum);
      if (after != 0) {
        const int owner = __ffs(after) - 1;
        range.batch = first + owner;
        range.sequence_begin = begin + __shfl_sync(~0u, sum - lane_units, owner);
        return;
      }
      begin += __shfl_sync(~0u, sum, 31);
    }
  }

  __device__ unsigned sequence_end() const {
    return work_range.sequence_begin + unit_count(work_range.sequence, work_range.batch);
  }

  __device__ bool get_stream_k_tile(PartialTile& partial_tile) const {
    if (work_range.next >= work_range.end) return false;
    const unsigned begin = work_range.sequence_begin;
    const int first = first_unit(work_range.sequence, work_range.batch);
    partial_tile.batch = work_range.batch;
    partial_tile.head_kv = blockIdx.y;
    partial_tile.row_tile = blockIdx.x;
    partial_tile.sequence = work_range.sequence;
    partial_tile.begin = first + (work_range.next - begin);
    partial_tile.end = first + (min(sequence_end(), work_range.end) - begin);
    return true;
  }

  __device__ void set_stream_k_merge_info(PartialTile& partial_tile) const {
    const unsigned begin = work_range.sequence_begin, sequence_end = this->sequence_end();
    const unsigned first_cta = begin / work_range.range_units;
    const unsigned last_cta = (sequence_end - 1) / work_range.range_units;
    const unsigned this_cluster = blockIdx.z / cluster;
    const unsigned first_cluster = first_cta / cluster;
    const unsigned first_local = max(first_cta, this_cluster * cluster);
    const unsigned last_local = min(last_cta, this_cluster * cluster + cluster - 1);
    partial_tile.index = blockIdx.z - first_local;
    partial_tile.count = last_local - first_local + 1;
    partial_tile.first_cta_rank = first_local % cluster;
    partial_tile.result = this_cluster - first_cluster;
    partial_tile.results = last_cta / cluster - first_cluster + 1;
    // A cluster has two slots per KV head and row tile. The second one is for an output tile that
    // begins in the cluster's range and continues in the next cluster.
    partial_tile.first_slot =
        2 * (first_cluster * output_tiles + blockIdx.y * row_tiles + blockIdx.x);
    partial_tile.slot_step = 2 * output_tiles;
    partial_tile.first_result_offset = 1;
    partial_tile.is_sliced =
        cluster > 1 && first_cta % cluster == 0 && last_cta % cluster == cluster - 1 &&
        sequence_end == min(work_range.total_units, (last_cta + 1) * work_range.range_units);
  }
};
