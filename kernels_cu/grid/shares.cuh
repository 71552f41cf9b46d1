// Which keys of which rows each thread block attends to, where few rows see many keys.
//
// An item is a tile of query rows with one key/value head; its keys are counted in units. Either
// every item is cut into num_splits parts. Or, balanced, the sequences stand in one line, and the
// blocks that are there for the same head and row tile take equal shares of its units: then all
// blocks end together however the lengths differ, and at most the first and the last item of a
// share are cut (the idea of Stream-K, Osama et al. 2023; for attention, Lean Attention, Sanovar et
// al. 2024). Blocks for different heads are at the same keys at the same time: heads lie side by
// side, and device memory likes to be read in longer runs than one head's row.
//
// The parts of an item that a cluster of blocks has are merged there, and what clusters have of it
// meets in device memory. Without clusters, each block counts as one.
#pragma once

#include "params.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"
#include "score/mask.cuh"

// A part of an item's keys. From `number` on it is known only where others with parts of the item
// are asked for.
struct Part {
  int batch;
  int head_kv;
  int row_tile;
  Sequence sequence;
  int begin;  // units of keys
  int end;
  int number;   // of this part among those of the item that the cluster has
  int count;    // of those
  int place;    // in the cluster, of the block that has the first of them
  int result;   // number of the cluster's result among those of the item
  int results;  // of the item, that meet in device memory
  int first_slot;
  int slot_step;
  int first_extra;
  // Whether all blocks of some clusters have parts of the item, and each as the last of its share.
  bool is_spread;

  __device__ bool is_whole() const { return count == 1 && results == 1; }

  // The place in device memory of one of the item's results, and of a counter.
  __device__ int slot_of(int result) const {
    return first_slot + slot_step * result + (result == 0 ? first_extra : 0);
  }
};

// The way of one of an item's results in device memory: it meets its neighbours in a group of
// `fan`, what that leaves in the place of its first meets others of its kind, and so on.
struct Meeting {
  // Groups are merged side by side, by a block each. Alone, one took 100 us for 132 results of 32
  // rows.
  static constexpr int fan = 8;

  int first;     // of the group's results
  int step = 1;  // from one to the next
  int level = 0;

  __device__ explicit Meeting(int result) : first(result - result % fan) {}

  // Of the group, where the item has so many results.
  __device__ int count(int results) const { return min(fan, ceil_div(results - first, step)); }
  __device__ bool is_last(int results) const { return step * fan >= results; }
  // The result whose counter is the group's. No other group has it: those of the first level have a
  // multiple of `fan`, and those above it one of the few behind.
  __device__ int counter() const { return first + level; }

  __device__ void rise() {
    step *= fan;
    ++level;
    first -= first % (step * fan);
  }
};

// Where a block is in its share. With Config::balanced: the units of the line and of a block's
// share, and where its part begins and the share ends. Else, of all parts, its own and their
// number. The host sees to it that 31 bits are enough: a division of
// more takes a fifth of a microsecond.
struct Share {
  unsigned line;
  unsigned units;
  unsigned next;
  unsigned end;
  unsigned sequence_begin;  // of the units of sequence `batch`
  int batch;
  Sequence sequence;
};

// One warp takes the share, and one of its lanes finds the parts.
template <class Config>
struct Shares {
  static constexpr int unit_keys = Config::Bc * (Config::warps / Config::team);
  static constexpr int group = Config::group;  // query heads of a key/value head
  static constexpr unsigned cluster = Config::cluster > 0 ? Config::cluster : 1;  // blocks of one

  const Params& p;
  Share& share;
  const int row_tiles;  // of the longest sequence
  const int items;      // of one sequence
  const int used_keys;  // that seqused_k, if any, counts for the sequence of the lane's number

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

  // Whether there is a part where the share is; in what it is found, its keys.
  __device__ bool find(Part& part) {
    if constexpr (Config::balanced) {
      return find_in_share(part);
    } else {
      return find_in_splits(part);
    }
  }

  // And then what other parts its item has: not needed before they are merged.
  __device__ void find_others(Part& part) const {
    if constexpr (Config::balanced) {
      find_others_in_line(part);
    } else {
      find_others_of_split(part);
    }
  }

  // Whether there may be parts behind it.
  __device__ bool goes_on(const Part& part) const {
    return Config::balanced ? share.next + (part.end - part.begin) < share.end
                            : share.next + gridDim.x < share.end;
  }

  // To where the next part begins.
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

  // At least about as many as there are keys in all sequences, times key/value heads.
  __device__ int64 keys_of_all() const {
    return Config::balanced ? int64(share.line) * unit_keys * p.heads_kv
                            : int64(p.batch) * p.seqlen_k * p.heads_kv;
  }

 private:
  __device__ Sequence sequence_of(int batch) const {
    return sequence_of(p, batch);
  }
  // That of the lane's number, whose keys are there.
  __device__ Sequence sequence_of_lane() const {
    Params own = p;
    if (p.seqused_k != nullptr) own.keys = used_keys;
    own.seqused_k = nullptr;
    const int lane = threadIdx.x % 32;
    return sequence_of(own, min(lane, p.batch - 1));
  }
  __device__ static Sequence sequence_of(const Params& p, int batch) {
    if constexpr (Config::sequences) {
      // Packed queries are not shared out evenly, and keys are packed only where they are.
      int capacity;
      return find_sequence<Config::page_size, !Config::balanced>(p, batch, capacity);
    } else {
      return {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
    }
  }

  // The unit with the first key that a row of the sequence sees: those before are nobody's.
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

  // A sequence without keys has a unit too: someone must write that its rows see nothing.
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
    // Every sequence has the same number of units if no array counts its keys, and no array places
    // a window that hides its first ones.
    constexpr bool begins_alike = !(Config::offsets && Config::window_left);
    const bool is_uniform =
        (begins_alike && !Config::sequences) || p.batch == 1 ||
        (begins_alike && p.seqused_k == nullptr && p.cache_batch_idx == nullptr);
    Share taken;
    if (is_uniform) {
      // The first's, in the lane that keeps the share.
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

  // Of as many sequences as a warp has lanes: each finds one, and all know where it lies.
  __device__ void take_of_few(Share& taken) const {
    const int lane = threadIdx.x % 32;
    const Sequence own = sequence_of_lane();
    const unsigned units = lane < p.batch ? units_of(own, lane) : 0;
    const unsigned up_to = sum_up_to_lane(units);
    cut_line(taken, __shfl_sync(~0u, up_to, 31));
    // Of a share behind the line's end, any.
    const int found = min(31u, __ffs(__ballot_sync(~0u, taken.next < up_to)) - 1u);
    taken.batch = found;
    taken.sequence_begin = __shfl_sync(~0u, up_to - units, found);
    taken.sequence = {__shfl_sync(~0u, own.q_batch, found),  __shfl_sync(~0u, own.q_first, found),
                      __shfl_sync(~0u, own.seqlen_q, found), __shfl_sync(~0u, own.k_batch, found),
                      __shfl_sync(~0u, own.k_first, found),  __shfl_sync(~0u, own.seqlen_k, found)};
  }

  // The grid: row tiles, key/value heads, and the blocks that share an item's line: all, or those
  // of one cluster where another would cost more than it brings.
  __device__ static void cut_line(Share& taken, unsigned line) {
    const bool is_short = Config::cluster > 0 && line <= Config::cluster_units * cluster;
    taken.line = line;
    // Of constants a division is a shift.
    if (is_short) {
      taken.units = (line + cluster - 1) / cluster;
    } else {
      taken.units = (line + gridDim.z - 1) / gridDim.z;
    }
    taken.next = min(line, blockIdx.z * taken.units);
    taken.end = min(line, taken.next + taken.units);
  }

  // Of the sequence at first + lane.
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

  // The sequence in which the share begins.
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
    // A cluster has two slots, the second for a sequence that begins in its share and goes on
    // behind it.
    part.first_slot = 2 * (first_cluster * items + blockIdx.y * row_tiles + blockIdx.x);
    part.slot_step = 2 * items;
    part.first_extra = 1;
    part.is_spread = cluster > 1 && first_place % cluster == 0 &&
                     last_place % cluster == cluster - 1 &&
                     sequence_end == min(share.line, (last_place + 1) * share.units);
  }
};
