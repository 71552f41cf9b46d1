// Order in which CTAs process the query tiles of sequences whose lengths are only known on the
// device. A kernel of one CTA counts the tiles and sorts the sequences by their number of keys,
// longest first, so that long tiles do not come last. An atomic counter then assigns tiles to CTAs
// in that order. A static assignment needs no counter. Every CTA then builds the order itself,
// which is faster than launching a separate kernel.
#pragma once

#include "params.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/sequences.cuh"
#include "scheduler/work_tile.cuh"

// The order, stored in the workspace (with split KV, after the partial results). Tiles are counted
// for one query head, except by `next_tile`, which counts tiles of all query heads.
struct VarlenOrder {
  __device__ static int64 words(int batch) { return 2 * int64(batch) + 2; }

  unsigned* next_tile;   // atomic counter of the tiles assigned to CTAs
  unsigned* first_tile;  // (batch + 1) number of tiles before each position of the order
  int* sequence;         // (batch) index of the sequence at each position of the order

  int batch;

  __device__ explicit VarlenOrder(const Params& p)
      : next_tile(static_cast<unsigned*>(p.workspace)),
        first_tile(next_tile + 1),
        sequence(static_cast<int*>(p.workspace) + p.batch + 2),
        batch(p.batch) {}

  // Returns the same arrays, placed `words` 32-bit words later in the workspace.
  __device__ VarlenOrder offset_by(int64 words) const {
    VarlenOrder moved = *this;
    moved.next_tile += words;
    moved.first_tile += words;
    moved.sequence += words;
    return moved;
  }

  // ---- Building the order, by the first threads of a CTA.

  // Sequences are sorted by classes of their number of keys: eight classes between consecutive
  // powers of two. The order within a class does not matter.
  static constexpr int classes = 256;
  // Size of `build()`'s shared memory in 32-bit words: a counter per class and a sum per warp.
  static constexpr int scratch_words = classes + 32;

  // Returns the class of a sequence of `keys` keys. Class 0 holds the sequences with the most keys.
  __device__ static int class_of(int keys) {
    // The exponent and three mantissa bits of float(keys): 1 to 241 for 1 to 2^30 keys.
    const int rank = keys == 0 ? 0 : (__float_as_int(float(keys)) >> 20) - (127 << 3) + 1;
    return classes - 1 - rank;
  }

  // A `Builders` argument, which describes the threads that build the order together: here all
  // threads of a CTA. `deterministic` is true if each of several CTAs builds the order for itself.
  struct CtaThreads {
    static constexpr bool deterministic = false;
    __device__ static unsigned threads() { return blockDim.x; }
    __device__ static void sync() { __syncthreads(); }
  };

  template <int Br, class Builders>
  __device__ void build(const Params& p, int* scratch) const {
    int* class_ends = scratch;
    int* warp_sums = scratch + classes;
    for (int i = threadIdx.x; i < classes; i += Builders::threads()) class_ends[i] = 0;
    Builders::sync();
    for (int i = threadIdx.x; i < batch; i += Builders::threads()) {
      atomicAdd(&class_ends[class_of(find_sequence<0>(p, i).seqlen_k)], 1);
    }
    Builders::sync();
    int carry = 0;
    for (int first = 0; first < classes; first += Builders::threads()) {
      const int i = first + threadIdx.x;
      int total;
      const int before =
          exclusive_scan<Builders>(i < classes ? class_ends[i] : 0, warp_sums, total);
      if (i < classes) class_ends[i] = carry + before;
      carry += total;
    }
    Builders::sync();
    if constexpr (Builders::deterministic) {
      if (threadIdx.x < 32) write_in_order(p, class_ends);
    } else {
      for (int i = threadIdx.x; i < batch; i += Builders::threads()) {
        sequence[atomicAdd(&class_ends[class_of(find_sequence<0>(p, i).seqlen_k)], 1)] = i;
      }
    }
    Builders::sync();
    carry = 0;
    for (int first = 0; first < batch; first += Builders::threads()) {
      const int i = first + threadIdx.x;
      const int tiles = i < batch ? ceil_div(find_sequence<0>(p, sequence[i]).seqlen_q, Br) : 0;
      int total;
      const int before = exclusive_scan<Builders>(tiles, warp_sums, total);
      if (i < batch) first_tile[i] = carry + before;
      carry += total;
    }
    if (threadIdx.x == 0) {
      first_tile[batch] = carry;
      *next_tile = 0;
    }
  }

  // Called by one warp. Writes `sequence`, with the sequences of a class ordered by their index.
  __device__ void write_in_order(const Params& p, int* class_ends) const {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < batch; first += 32) {
      const int i = first + lane;
      const int sequence_class = i < batch ? class_of(find_sequence<0>(p, i).seqlen_k) : -1;
      const unsigned same_class = __match_any_sync(~0u, sequence_class);
      const int before = __popc(same_class & ((1u << lane) - 1));
      if (i < batch) sequence[class_ends[sequence_class] + before] = i;
      __syncwarp();
      if (i < batch && before == 0) class_ends[sequence_class] += __popc(same_class);
      __syncwarp();
    }
  }

  // Returns the exclusive prefix sum of `value` over the threads. Sets `total` to the sum.
  template <class Builders>
  __device__ static int exclusive_scan(int value, int* warp_sums, int& total) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int inclusive = inclusive_scan(value);
    if (lane == 31) warp_sums[warp] = inclusive;
    Builders::sync();
    const int warp_inclusive =
        inclusive_scan(lane < Builders::threads() / 32 ? warp_sums[lane] : 0);
    total = __shfl_sync(~0u, warp_inclusive, 31);
    const int before_warp = __shfl_sync(~0u, warp_inclusive, max(0, warp - 1));
    Builders::sync();
    return (warp > 0 ? before_warp : 0) + inclusive - value;
  }

  // Returns the inclusive prefix sum over the lanes of a warp.
  __device__ static int inclusive_scan(int value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, value, distance);
      if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
  }

  // ---- Assignment of tiles. All lanes of a warp call these functions together.

  // Returns the next tile number, counted over all heads. No tile is left if it is >= `tiles()`.
  __device__ unsigned fetch() const {
    unsigned tile = 0;
    if (threadIdx.x % 32 == 0) tile = atomicAdd(next_tile, 1u);
    return __shfl_sync(~0u, tile, 0);
  }

  __device__ unsigned tiles(int heads) const { return first_tile[batch] * heads; }

  // Returns the position in the order of the sequence that contains `tile`, counted for one head.
  // In each round of the search, every lane tests one position.
  __device__ int position_of(unsigned tile) const {
    // first_tile[low] <= tile < first_tile[high]
    int low = 0;
    int high = batch;
    while (high - low > 1) {
      const int step = ceil_div(high - low, 32);
      const int position = low + int(threadIdx.x % 32) * step;
      const bool is_before = position < high && first_tile[position] <= tile;
      low += (__popc(__ballot_sync(~0u, is_before)) - 1) * step;
      high = min(high, low + step);
    }
    return low;
  }
};

// Returns the coordinates of query tile number `tile` of a sequence, counted over all heads. As in
// the other `tile_coord()`, heads are taken in sections, and query tiles in descending order.
template <int Br>
__device__ TileCoord tile_coord(const Params& p, const Sequence& sequence, int batch, int tile,
                                int section_heads) {
  const int q_tiles = ceil_div(sequence.seqlen_q, Br);
  const int first_head = tile / (section_heads * q_tiles) * section_heads;
  const int heads = min(section_heads, p.heads_q - first_head);
  tile -= first_head * q_tiles;
  const int head = first_head + tile % heads;
  const int q_tile = q_tiles - 1 - tile / heads;
  return {q_tile * Br, batch, head, head / (p.heads_q / p.heads_kv), 0};
}

// Returns the number of query heads in a section: those of one KV head. If a causal mask makes
// tiles unequal, a section has as many KV heads as have at most `section_keys` keys in total.
template <bool Causal>
__device__ int find_section_heads(const Params& p, int seqlen_k, int section_keys) {
  const int group = p.heads_q / p.heads_kv;
  return Causal ? group * min(p.heads_kv, max(1, section_keys / max(1, seqlen_k))) : group;
}

// Computes the work tile of tile number `fetch()`, counted over all heads and splits. All lanes of
// a warp call this together; the lane whose `writes` is true writes `work_tile`.
template <class Config, class Fetch>
__device__ void fetch_work_tile(const Params& p, const VarlenOrder& order, Fetch fetch,
                                int section_keys, WorkTile<true>& work_tile, bool writes) {
  unsigned tile = fetch();
  if (tile >= order.tiles(p.heads_q) * (Config::split_keys ? p.num_splits : 1)) {
    if (writes) work_tile = WorkTile<true>::end_of_work();
    return;
  }
  int split = 0;
  if constexpr (Config::split_keys) {
    split = tile % p.num_splits;
    tile /= p.num_splits;
  }
  const int position = order.position_of(tile / p.heads_q);
  const int batch = order.sequence[position];
  const Sequence sequence = find_sequence<0>(p, batch);
  TileCoord coord = tile_coord<Config::Br>(
      p, sequence, batch, tile - order.first_tile[position] * p.heads_q,
      find_section_heads<Config::causal>(p, sequence.seqlen_k, section_keys));
  if constexpr (Config::split_keys) coord.split = split;
  const Mask<Config> mask(sequence.seqlen_k, sequence.q_offset<Config>(p, batch), {p, batch});
  const int q_end = min(coord.q_begin + Config::Br, sequence.seqlen_q);
  if (writes) {
    work_tile = {{sequence},
                 coord,
                 kv_tile_range<Config::Bc, Config::split_keys>(mask, coord.q_begin, q_end, split,
                                                               p.num_splits)};
  }
}
