// Distribution of KV work over CTAs in `decode`, where few query rows attend to many keys.
//
// An output tile is a tile of query rows with one KV head; its keys are counted in units of
// `unit_keys` keys. By default, every output tile is split into `num_splits` partial tiles. With
// `Config::balanced` (stream-K: Osama et al. 2023; Lean Attention: Sanovar et al. 2024), the units
// of all sequences are numbered consecutively, and each CTA of a KV head and row tile processes an
// equal range of units, the work range. All CTAs then end together, whatever the lengths, and only
// the first and last output tile of a work range may be split. CTAs of different heads process the
// same keys at the same time: heads are adjacent in memory, and DRAM is read faster in longer runs.
//
// The CTAs of a cluster merge their partial tiles of an output tile within the cluster; the results
// of several clusters are merged in device memory. Without clusters, each CTA counts as a cluster.
#pragma once

#include "params.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"
#include "score/mask.cuh"

// Partial tile: the KV units of an output tile that one CTA processes. `find_others` sets the
// members from `number` on.
struct Part {
  int batch;
  int head_kv;
  int row_tile;
  Sequence sequence;
  int begin;    // first KV unit
  int end;      // one past the last KV unit
  int number;   // index among the partial tiles that this cluster has of the output tile
  int count;    // number of these partial tiles
  int place;    // rank in the cluster of the CTA that has the first of them
  int result;   // index of this cluster's result among those of the output tile
  int results;  // number of results of the output tile, which are merged in device memory
  int first_slot;
  int slot_step;
  int first_extra;
  // Whether the output tile is the last one of every CTA in all clusters that have parts of it.
  // These CTAs then each merge a slice of the columns.
  bool is_spread;

  __device__ bool is_whole() const { return count == 1 && results == 1; }

  // Returns the slot in device memory of a result of the output tile, and of its counter.
  __device__ int slot_of(int result) const {
    return first_slot + slot_step * result + (result == 0 ? first_extra : 0);
  }
};

// Merge group: a node of the tree that merges an output tile's results in device memory. A group of
// `fan` results is merged into the slot of its first one, a member of a group of the next level.
struct Meeting {
  // Size of a group. CTAs merge groups in parallel: one CTA takes 100 us for 132 results.
  static constexpr int fan = 8;

  int first;     // index of the group's first result
  int step = 1;  // difference between the indices of consecutive members
  int level = 0;

  __device__ explicit Meeting(int result) : first(result - result % fan) {}

  // Returns the number of members, if the output tile has `results` results.
  __device__ int count(int results) const { return min(fan, ceil_div(results - first, step)); }
  __device__ bool is_last(int results) const { return step * fan >= results; }
  // Returns the result whose counter the group uses. No other group uses it: groups of the first
  // level use a multiple of `fan`, groups of a higher level a multiple of `fan` plus their level.
  __device__ int counter() const { return first + level; }

  __device__ void rise() {
    step *= fan;
    ++level;
    first -= first % (step * fan);
  }
};

// Work range of a CTA, and the position in it. Without `Config::balanced`, `next` is the index of
// the current partial tile among all, `end` their number, and the other members are unused. The
// host ensures that 31 bits suffice: a 64-bit division takes 0.2 us.
struct Share {
  unsigned line;            // number of units of all sequences
  unsigned units;           // number of units of a work range
  unsigned next;            // first unit of the current partial tile
  unsigned end;             // one past the last unit of the work range
  unsigned sequence_begin;  // first unit of sequence `batch`
  int batch;
  Sequence sequence;
};

// Computes the work range of a CTA and its partial tiles. One warp calls `take()`; one of its lanes
// calls the other functions.
template <class Config>
struct Shares {
  static constexpr int unit_keys = Config::Bc * (Config::warps / Config::team);
  static constexpr int group = Config::group;  // number of query heads per KV head
  static constexpr unsigned cluster = Config::cluster > 0 ? Config::cluster : 1;  // CTAs in one

  const Params& p;
  Share& share;
  const int row_tiles;  // number of query tiles of the longest sequence
  const int items;      // number of output tiles of one sequence
  const int used_keys;  // element of seqused_k (if not null) at the lane's index

  __device__ Shares(const Params& params, Share& share, int used_keys)
      : p(params),
        share(share),
        used_keys(used_keys),
        row_tiles(ceil_div(params.seqlen_q * group, Config::Br)),
        items(params.heads_kv * row_tiles) {}

  __device__ void take() {
    if constexpr (Config::balanced) {
      share = share_of_line();
    } else {
      share.next = blockIdx.x;
      share.end = unsigned(p.batch) * items * p.num_splits;
    }
  }

  // Sets `part`, up to its member `end`, to the current partial tile. Returns whether one is left.
  __device__ bool find(Part& part) {
    if constexpr (Config::balanced) {
      return find_in_share(part);
    } else {
      return find_in_splits(part);
    }
  }

  // Sets the other members of `part`, which only the merge with other partial tiles needs.
  __device__ void find_others(Part& part) const {
    if constexpr (Config::balanced) {
      find_others_in_line(part);
    } else {
      find_others_of_split(part);
    }
  }

  // Returns whether more partial tiles may follow `part`.
  __device__ bool goes_on(const Part& part) const {
    return Config::balanced ? share.next + (part.end - part.begin) < share.end
                            : share.next + gridDim.x < share.end;
  }

  // Advances to the partial tile after `part`.
  __device__ void pass(const Part& part) {
    if constexpr (Config::balanced) {
      share.next += part.end - part.begin;
      if (share.next < share.end) {
        share.sequence_begin = share.next;
        share.sequence = sequence_of(++share.batch);
      }
    } else {
      share.next += gridDim.x;
    }
  }

  // Returns an approximate upper bound of the number of keys in all sequences, times KV heads.
  __device__ int64 keys_of_all() const {
    return Config::balanced ? int64(share.line) * unit_keys * p.heads_kv
                            : int64(p.batch) * p.seqlen_k * p.heads_kv;
  }

 private:
  __device__ Sequence sequence_of(int batch) const {
    return sequence_of(p, batch);
  }
  // Returns the sequence at the lane's index, with the length `used_keys`, which is already loaded.
  __device__ Sequence sequence_of_lane() const {
    Params own = p;
    if (p.seqused_k != nullptr) own.keys = used_keys;
    own.seqused_k = nullptr;
    const int lane = threadIdx.x % 32;
    return sequence_of(own, min(lane, p.batch - 1));
  }
  __device__ static Sequence sequence_of(const Params& p, int batch) {
    if constexpr (Config::sequences) {
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
    return Config::sequences ? sequence.template q_offset<Config>(p, batch)
                             : first_position<Config>(p, batch, p.q_offset);
  }

  // A sequence without keys still counts as one unit, so that one CTA writes its output rows.
  __device__ int units_of(const Sequence& sequence, int batch) const {
    return max(1, ceil_div(sequence.seqlen_k, unit_keys) - first_unit(sequence, batch));
  }

  __device__ bool find_in_splits(Part& part) {
    for (; share.next < share.end; share.next += gridDim.x) {
      const int split = share.next % p.num_splits;
      const int item = share.next / p.num_splits;
      const int batch = item / items;
      const Sequence sequence = sequence_of(batch);
      const int row_tile = item % row_tiles;
      if (row_tile * Config::Br >= sequence.seqlen_q * group) continue;
      const int units = units_of(sequence, batch);
      const int first = first_unit(sequence, batch);
      const int most = ceil_div(units, p.num_splits);
      const int begin = min(units, split * most);
      part.batch = batch;
      part.head_kv = item % items / row_tiles;
      part.row_tile = row_tile;
      part.sequence = sequence;
      part.begin = first + begin;
      part.end = first + min(units, begin + most);
      return true;
    }
    return false;
  }

  __device__ void find_others_of_split(Part& part) const {
    const int split = share.next % p.num_splits;
    part.number = 0;
    part.count = 1;
    part.place = 0;
    part.result = split;
    part.results = p.num_splits;
    part.first_slot = share.next - split;
    part.slot_step = 1;
    part.first_extra = 0;
    part.is_spread = false;
  }

  __device__ Share share_of_line() const {
    // All sequences have the same number of units if no array holds their lengths, and no array of
    // offsets moves a window that masks their first keys.
    constexpr bool begins_alike = !(Config::offsets && Config::window_left);
    const bool is_uniform =
        (begins_alike && !Config::sequences) || p.batch == 1 ||
        (begins_alike && p.seqused_k == nullptr && p.cache_batch_idx == nullptr);
    Share taken;
    if (is_uniform) {
      // Only lane 0 uses the result, so this is sequence 0.
      taken.sequence = sequence_of_lane();
      const int units = units_of(taken.sequence, 0);
      cut_line(taken, p.batch * units);
      taken.batch = p.batch == 1 ? 0 : taken.next / units;
      taken.sequence_begin = taken.batch * units;
      if (taken.batch > 0 && taken.next < taken.end) taken.sequence = sequence_of(taken.batch);
    } else if (p.batch <= 32) {
      take_of_few(taken);
    } else {
      unsigned units = 0;
      for (int first = 0; first < p.batch; first += 32) units += sum_of_warp(units_at(first));
      cut_line(taken, units);
      find_batch(taken);
      if (taken.next < taken.end) taken.sequence = sequence_of(taken.batch);
    }
    return taken;
  }

  // Sets the work range if there are at most 32 sequences: each lane looks up one of them.
  __device__ void take_of_few(Share& taken) const {
    const int lane = threadIdx.x % 32;
    const Sequence own = sequence_of_lane();
    const unsigned units = lane < p.batch ? units_of(own, lane) : 0;
    const unsigned up_to = sum_up_to_lane(units);
    cut_line(taken, __shfl_sync(~0u, up_to, 31));
    // A work range that starts past the last unit is empty, so any sequence will do.
    const int found = min(31u, __ffs(__ballot_sync(~0u, taken.next < up_to)) - 1u);
    taken.batch = found;
    taken.sequence_begin = __shfl_sync(~0u, up_to - units, found);
    taken.sequence = {__shfl_sync(~0u, own.q_batch, found),  __shfl_sync(~0u, own.q_first, found),
                      __shfl_sync(~0u, own.seqlen_q, found), __shfl_sync(~0u, own.k_batch, found),
                      __shfl_sync(~0u, own.k_first, found),  __shfl_sync(~0u, own.seqlen_k, found)};
  }

  // Sets the CTA's range of the `line` units. The grid axes are row tiles, KV heads, and the CTAs
  // that divide the units of a row tile and KV head. If the units are few, only the CTAs of one
  // cluster have any, because merging across clusters would cost more than it saves.
  __device__ static void cut_line(Share& taken, unsigned line) {
    const bool is_short = Config::cluster > 0 && line <= Config::cluster_units * cluster;
    taken.line = line;
    // Two branches, because a division by a constant is cheap.
    if (is_short) {
      taken.units = (line + cluster - 1) / cluster;
    } else {
      taken.units = (line + gridDim.z - 1) / gridDim.z;
    }
    taken.next = min(line, blockIdx.z * taken.units);
    taken.end = min(line, taken.next + taken.units);
  }

  // Returns the number of units of the sequence at index first + lane.
  __device__ int units_at(int first) const {
    const int batch = first + threadIdx.x % 32;
    return batch < p.batch ? units_of(sequence_of(batch), batch) : 0;
  }

  __device__ static unsigned sum_up_to_lane(unsigned x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned below = __shfl_up_sync(~0u, x, step);
      if (threadIdx.x % 32 >= step) x += below;
    }
    return x;
  }

  __device__ static int sum_of_warp(int x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
  }

  // Finds the sequence in which the work range begins.
  __device__ void find_batch(Share& taken) const {
    const unsigned next = taken.next;
    if (next >= taken.end) return;
    unsigned begin = 0;
    for (int first = 0;; first += 32) {
      const unsigned own = units_at(first);
      const unsigned sum = sum_up_to_lane(own);
      const unsigned after = __ballot_sync(~0u, next < begin + sum);
      if (after != 0) {
        const int found = __ffs(after) - 1;
        taken.batch = first + found;
        taken.sequence_begin = begin + __shfl_sync(~0u, sum - own, found);
        return;
      }
      begin += __shfl_sync(~0u, sum, 31);
    }
  }

  __device__ unsigned sequence_end() const {
    return share.sequence_begin + units_of(share.sequence, share.batch);
  }

  __device__ bool find_in_share(Part& part) const {
    if (share.next >= share.end) return false;
    const unsigned begin = share.sequence_begin;
    const int first = first_unit(share.sequence, share.batch);
    part.batch = share.batch;
    part.head_kv = blockIdx.y;
    part.row_tile = blockIdx.x;
    part.sequence = share.sequence;
    part.begin = first + (share.next - begin);
    part.end = first + (min(sequence_end(), share.end) - begin);
    return true;
  }

  __device__ void find_others_in_line(Part& part) const {
    const unsigned begin = share.sequence_begin, sequence_end = this->sequence_end();
    const unsigned first_place = begin / share.units;
    const unsigned last_place = (sequence_end - 1) / share.units;
    const unsigned own_cluster = blockIdx.z / cluster;
    const unsigned first_cluster = first_place / cluster;
    const unsigned first_here = max(first_place, own_cluster * cluster);
    const unsigned last_here = min(last_place, own_cluster * cluster + cluster - 1);
    part.number = blockIdx.z - first_here;
    part.count = last_here - first_here + 1;
    part.place = first_here % cluster;
    part.result = own_cluster - first_cluster;
    part.results = last_place / cluster - first_cluster + 1;
    // A cluster has two slots per KV head and row tile. The second one is for an output tile that
    // begins in the cluster's range and continues in the next cluster.
    part.first_slot = 2 * (first_cluster * items + blockIdx.y * row_tiles + blockIdx.x);
    part.slot_step = 2 * items;
    part.first_extra = 1;
    part.is_spread = cluster > 1 && first_place % cluster == 0 &&
                     last_place % cluster == cluster - 1 &&
                     sequence_end == min(share.line, (last_place + 1) * share.units);
  }
};
