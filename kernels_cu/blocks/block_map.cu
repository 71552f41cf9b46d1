// Finds out which blocks of the score matrix a mask hides wholly, shows wholly, or in part. First
// come ranges of what captured arrays hold for the rows of each row tile and for the keys of each
// key block; then, for 32 blocks at a time, what those say (bounds.cuh), and of blocks
// that stay undecided a thread block looks at pairs, until one is seen and one is hidden.
//
// The unit declares ModArguments, Mods and MaskBounds ahead of this file.
#include "blocks/bounds.cuh"
#include "blocks/map.cuh"
#include "score/capture.cuh"

struct BlockMapParams {
  BlockMap map;
  void* row_ranges;  // MaskBounds::Rows (batches, heads, row tiles)
  void* key_ranges;  // MaskBounds::Keys (batches, heads, key blocks)
  int batches;
  int heads;
  int seqlen_q;
  int seqlen_k;
  int q_offset;
  int Br;
  int Bc;
  int row_tiles;
  // Only keys from `left` before a row's position to `right` behind it are looked at.
  int left;
  int right;
  alignas(8) ModArguments mods;
};

namespace block_map {

constexpr int lanes = 32;
constexpr int threads = 256;
constexpr int warps = threads / lanes;
constexpr unsigned all_lanes = 0xffffffffu;
// Keys of a row that a lane looks at in one go, and rows between two looks at what others found.
constexpr int keys_of_lane = 4;
constexpr int rows_of_turn = 4;

// A mask that stands for all batches, or heads, is asked about the first.
struct Head {
  int64 index;
  int batch;
  int head;

  __device__ Head(const BlockMapParams& p, int64 index)
      : index(index), batch(int(index / p.heads)), head(int(index % p.heads)) {}
};

// Of a word among all of the map.
struct Word {
  int first_block;
  int tile;
  Head at;

  __device__ Word(const BlockMapParams& p, int64 index)
      : first_block(int(index % p.map.words) * 32),
        tile(int(index / p.map.words % p.row_tiles)),
        at(p, index / p.map.words / p.row_tiles) {}
};

// Positions of a row tile, and keys of a block, ends included.
struct Block {
  int i_low;
  int i_high;
  int j_low;
  int j_high;

  __device__ Block(const BlockMapParams& p, int tile, int key_block)
      : i_low(tile * p.Br + p.q_offset),
        i_high(min((tile + 1) * p.Br, p.seqlen_q) - 1 + p.q_offset),
        j_low(key_block * p.Bc),
        j_high(min((key_block + 1) * p.Bc, p.seqlen_k) - 1) {}

  // Without the rows and keys that the band leaves nothing of.
  __device__ Block within_band(const BlockMapParams& p) const {
    Block part = *this;
    part.i_low = max(i_low, j_low - p.right);
    part.i_high = min(i_high, j_high + p.left);
    part.j_low = max(j_low, part.i_low - p.left);
    part.j_high = min(j_high, part.i_high + p.right);
    return part;
  }

  __device__ bool is_empty() const { return i_low > i_high || j_low > j_high; }
};

// Ranges that the lanes of a warp have, joined; each lane gets them.
template <class T>
__device__ T of_lane(T x, int distance) {
  static_assert(sizeof(T) % 4 == 0, "words are exchanged");
  unsigned words[sizeof(T) / 4];
  memcpy(words, &x, sizeof(T));
  for (unsigned& word : words) word = __shfl_xor_sync(all_lanes, word, distance);
  memcpy(&x, words, sizeof(T));
  return x;
}
template <class T>
__device__ T joined_over_warp(T range) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    range = range_joined(range, T{of_lane(range.low, distance), of_lane(range.high, distance)});
  }
  return range;
}
template <class Real>
__device__ RealRange<Real> joined_over_warp(RealRange<Real> range) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    range = range_joined(range, RealRange<Real>{of_lane(range.low, distance),
                                                of_lane(range.high, distance), false});
  }
  range.may_be_nan = __any_sync(all_lanes, range.may_be_nan);
  return range;
}
__device__ inline Truth joined_over_warp(Truth range) {
  return {__any_sync(all_lanes, range.may_be_true) != 0,
          __any_sync(all_lanes, range.may_be_false) != 0};
}

// What at(position) gives at the positions from first to last, joined by a warp.
template <class At>
__device__ auto ranges_between(int first, int last, At at) {
  const int lane = threadIdx.x % lanes;
  // Lanes without a position of their own take the last once more.
  auto ranges = at(min(first + lane, last));
  for (int position = first + lane + lanes; position <= last; position += lanes) {
    MaskBounds::join(ranges, at(position));
  }
  MaskBounds::each(ranges, [](auto& range) { range = joined_over_warp(range); });
  return ranges;
}

// A warp for each row tile of each head, if there is anything to be read of rows, and for each key
// block.
__device__ inline void find_ranges(const BlockMapParams& p) {
  const int row_tiles = MaskBounds::row_ranges > 0 ? p.row_tiles : 0;
  const int key_blocks = MaskBounds::key_ranges > 0 ? p.map.key_blocks : 0;
  const int64 index = int64(blockIdx.x) * warps + threadIdx.x / lanes;
  // Of a mask without ranges nobody calls it, but the compiler would see a division by 0.
  const int warps_of_head = max(1, row_tiles + key_blocks);
  const int64 of_head = index % warps_of_head;
  const Head at(p, index / warps_of_head);
  if (at.index >= int64(p.batches) * p.heads) return;
  const bool is_first_lane = threadIdx.x % lanes == 0;
  if (of_head < row_tiles) {
    const Block block(p, int(of_head), 0);
    const auto ranges = ranges_between(block.i_low, block.i_high, [&](int i) {
      return MaskBounds::rows_at(p.mods, at.batch, at.head, i, 0, 0);
    });
    auto* to = static_cast<MaskBounds::Rows*>(p.row_ranges);
    if (is_first_lane) to[at.index * p.row_tiles + of_head] = ranges;
  } else {
    const int key_block = int(of_head) - row_tiles;
    const Block block(p, 0, key_block);
    const auto ranges = ranges_between(block.j_low, block.j_high, [&](int j) {
      return MaskBounds::keys_at(p.mods, at.batch, at.head, j, 0, 0);
    });
    auto* to = static_cast<MaskBounds::Keys*>(p.key_ranges);
    if (is_first_lane) to[at.index * p.map.key_blocks + key_block] = ranges;
  }
}

// What is known of 32 blocks, a bit for each.
struct Found {
  unsigned open;  // looked at pair by pair
  unsigned seen;  // some pair is seen
  unsigned hidden;
};

__device__ inline Seen seen_by_bounds(const BlockMapParams& p, const Head& at, int tile,
                                      int key_block) {
  if (key_block >= p.map.key_blocks) return Seen::none;
  const Block block = Block(p, tile, key_block).within_band(p);
  if (block.is_empty()) return Seen::none;
  MaskBounds::Rows rows = {};
  MaskBounds::Keys keys = {};
  if constexpr (MaskBounds::row_ranges > 0) {
    rows = static_cast<const MaskBounds::Rows*>(p.row_ranges)[at.index * p.row_tiles + tile];
  }
  if constexpr (MaskBounds::key_ranges > 0) {
    keys = static_cast<const MaskBounds::Keys*>(
        p.key_ranges)[at.index * p.map.key_blocks + key_block];
  }
  return MaskBounds::classify(p.mods, at.batch, at.head, block.i_low, block.i_high, block.j_low,
                              block.j_high, 0, 0, rows, keys);
}

// A warp's part of the pairs of a block, until the thread block knows one that is seen and one that
// is hidden.
__device__ inline void look_at_pairs(const BlockMapParams& p, const Head& at, const Block& block,
                                     unsigned bit, Found& found) {
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes;
  volatile const Found& known = found;
  unsigned seen = 0, hidden = 0;
  // Rows innermost, as what is read of keys alone then stays in registers.
  for (int first = block.j_low; first <= block.j_high; first += keys_of_lane * lanes) {
    const int j = first + lane;
    int rows = 0;
    for (int i = block.i_low + warp; i <= block.i_high; i += warps) {
      const auto row = Mods::row(p.mods, at.batch, at.head, i, i - p.q_offset, 0, 0, 0);
      const auto keys = Mods::keys(p.mods, row, j);
      const int begin = i - p.left, end = min(block.j_high, i + p.right);
#pragma unroll
      for (int n = 0; n < keys_of_lane; ++n) {
        const bool is_inside = j + n * lanes >= begin && j + n * lanes <= end;
        const bool sees = Mods::sees(p.mods, row, keys, n * lanes);
        seen |= is_inside & sees;
        hidden |= is_inside & !sees;
      }
      // After the first row too: of a mask without order it shows both.
      if (rows++ % rows_of_turn == 0 || i + warps > block.i_high) {
        const unsigned any_seen = __any_sync(all_lanes, seen != 0) ? bit : 0;
        const unsigned any_hidden = __any_sync(all_lanes, hidden != 0) ? bit : 0;
        const unsigned known_seen = known.seen, known_hidden = known.hidden;
        if (lane == 0) {
          if (any_seen & ~known_seen) atomicOr(&found.seen, bit);
          if (any_hidden & ~known_hidden) atomicOr(&found.hidden, bit);
        }
        // The first lane's word, as others may have read later.
        const bool is_known = (any_seen | known_seen) & (any_hidden | known_hidden) & bit;
        if (__any_sync(all_lanes, is_known)) return;
      }
    }
  }
}

// A thread block for each word of the map.
__device__ inline void build(const BlockMapParams& p) {
  __shared__ Found found;
  const int64 index = blockIdx.x;
  const int lane = threadIdx.x % lanes;
  if (threadIdx.x < lanes) {
    const Word word(p, index);
    const Seen seen = seen_by_bounds(p, word.at, word.tile, word.first_block + lane);
    const unsigned open = __ballot_sync(all_lanes, seen == Seen::some);
    const unsigned all = __ballot_sync(all_lanes, seen == Seen::all);
    if (lane == 0) found = {open, all, 0};
  }
  __syncthreads();
  const unsigned open = found.open;
  if (open != 0) {
    // Not ahead of the barrier, where most warps only wait.
    const Word word(p, index);
    for (unsigned left = open; left != 0; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const Block block = Block(p, word.tile, word.first_block + bit).within_band(p);
      look_at_pairs(p, word.at, block, 1u << bit, found);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.map.visited[index] = found.seen;
    p.map.full[index] = found.seen & ~found.hidden;
    if (found.seen != 0) atomicAdd(p.map.counts + index / p.map.words, __popc(found.seen));
  }
}

}  // namespace block_map
