// Builds a block mask: determines which blocks of the score matrix a mask leaves empty, full or
// partial, in three kernels. `find_ranges` computes the range of captured values for the keys of
// each key block and for each row group (a part of a query tile). `build` classifies blocks by
// interval arithmetic on these ranges (bounds.cuh). If a block stays undecided, a CTA evaluates its
// pairs until it has found a visible and a masked one. `order_tiles` sorts the query tiles.
//
// The translation unit declares `ModArguments`, `Mods` and `MaskBounds` before this file.
#include "blocks/bounds.cuh"
#include "blocks/map.cuh"
#include "score/capture.cuh"

struct BlockMapParams {
  BlockMap map;
  void* row_ranges;  // `MaskBounds::Rows` (batches, heads, query tiles, row groups)
  void* key_ranges;  // `MaskBounds::Keys` (batches, heads, key blocks)
  int batches;
  int heads;
  int seqlen_q;
  int seqlen_k;
  int q_offset;
  int part_rows;
  int Bc;
  int row_tiles;
  int parts;  // number of row groups per query tile
  // The band: only keys from `left` before a row's position to `right` after it are considered.
  // Positions may be 2^31 apart, so sums with `left` and `right` need 64 bits.
  int left;
  int right;
  alignas(8) ModArguments mods;

  __device__ int all_parts() const { return row_tiles * parts; }
};

namespace block_map {

constexpr int lanes = 32;
constexpr int threads = 256;
constexpr int warps = threads / lanes;
constexpr unsigned all_lanes = 0xffffffffu;
// Number of keys that a lane evaluates at once; number of rows between two checks by the CTA.
constexpr int keys_of_lane = 4;
constexpr int rows_of_turn = 4;
// Number of classes that query tiles are sorted into, by their number of nonempty blocks.
constexpr int sizes = threads;

// Batch and head. A mask that is the same for all batches or heads is evaluated for the first.
struct Head {
  int index;
  int batch;
  int head;

  __device__ Head(const BlockMapParams& p, int index)
      : index(index), batch(index / p.heads), head(index % p.heads) {}
};

// Positions of the rows of a row group, and keys of a key block; all bounds are inclusive.
struct Block {
  int i_low;
  int i_high;
  int j_low;
  int j_high;

  __device__ Block(const BlockMapParams& p, int part, int key_block)
      : i_low(part * p.part_rows + p.q_offset),
        i_high(min((part + 1) * p.part_rows, p.seqlen_q) - 1 + p.q_offset),
        j_low(key_block * p.Bc),
        j_high(min((key_block + 1) * p.Bc, p.seqlen_k) - 1) {}

  // Returns the block without the rows and keys that lie entirely outside of the band.
  __device__ Block within_band(const BlockMapParams& p) const {
    Block part = *this;
    part.i_low = int(max(int64(i_low), int64(j_low) - p.right));
    part.i_high = int(min(int64(i_high), int64(j_high) + p.left));
    part.j_low = int(max(int64(j_low), int64(part.i_low) - p.left));
    part.j_high = int(min(int64(j_high), int64(part.i_high) + p.right));
    return part;
  }

  __device__ bool is_empty() const { return i_low > i_high || j_low > j_high; }
};

// `of_lane()` returns x of another lane; `joined_over_warp()` the union of the ranges of all lanes.
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

// Returns the union of the ranges at(position) for the positions [first, last]. Called by a warp.
template <class At>
__device__ auto ranges_between(int first, int last, At at) {
  const int lane = threadIdx.x % lanes;
  // Lanes past the last position evaluate the last position again.
  auto ranges = at(min(first + lane, last));
  for (int position = first + lane + lanes; position <= last; position += lanes) {
    MaskBounds::join(ranges, at(position));
  }
  MaskBounds::each(ranges, [](auto& range) { range = joined_over_warp(range); });
  return ranges;
}

// Kernel: one warp computes the ranges of one row group of a head, or of one of its key blocks.
__device__ inline void find_ranges(const BlockMapParams& p) {
  const int parts = MaskBounds::row_ranges > 0 ? p.all_parts() : 0;
  const int key_blocks = MaskBounds::key_ranges > 0 ? p.map.key_blocks : 0;
  const int64 index = int64(blockIdx.x) * warps + threadIdx.x / lanes;
  // Not launched for a mask without ranges; max() only hides a division by 0 from the compiler.
  const int warps_of_head = max(1, parts + key_blocks);
  const int64 of_head = index % warps_of_head;
  const int64 head = index / warps_of_head;
  if (head >= int64(p.batches) * p.heads) return;
  const Head at(p, int(head));
  const bool is_first_lane = threadIdx.x % lanes == 0;
  if (of_head < parts) {
    const Block block(p, int(of_head), 0);
    // The last query tile may have row groups without rows.
    if (block.i_low > block.i_high) return;
    const auto ranges = ranges_between(block.i_low, block.i_high, [&](int i) {
      return MaskBounds::rows_at(p.mods, at.batch, at.head, i, 0, 0);
    });
    auto* to = static_cast<MaskBounds::Rows*>(p.row_ranges);
    if (is_first_lane) to[int64(at.index) * parts + of_head] = ranges;
  } else {
    const int key_block = int(of_head) - parts;
    const Block block(p, 0, key_block);
    const auto ranges = ranges_between(block.j_low, block.j_high, [&](int j) {
      return MaskBounds::keys_at(p.mods, at.batch, at.head, j, 0, 0);
    });
    auto* to = static_cast<MaskBounds::Keys*>(p.key_ranges);
    if (is_first_lane) to[int64(at.index) * p.map.key_blocks + key_block] = ranges;
  }
}

// State of 32 blocks, one bit per block.
struct Found {
  unsigned open;    // undecided: its pairs must be evaluated
  unsigned seen;    // some pair is visible
  unsigned hidden;  // some pair is masked
};

__device__ inline Seen seen_by_bounds(const BlockMapParams& p, const Head& at, int part,
                                      int key_block) {
  if (key_block >= p.map.key_blocks) return Seen::none;
  const Block block = Block(p, part, key_block).within_band(p);
  if (block.is_empty()) return Seen::none;
  MaskBounds::Rows rows = {};
  MaskBounds::Keys keys = {};
  if constexpr (MaskBounds::row_ranges > 0) {
    const int64 of_head = int64(at.index) * p.all_parts();
    rows = static_cast<const MaskBounds::Rows*>(p.row_ranges)[of_head + part];
  }
  if constexpr (MaskBounds::key_ranges > 0) {
    keys = static_cast<const MaskBounds::Keys*>(
        p.key_ranges)[int64(at.index) * p.map.key_blocks + key_block];
  }
  return MaskBounds::classify(p.mods, at.batch, at.head, block.i_low, block.i_high, block.j_low,
                              block.j_high, 0, 0, rows, keys);
}

// Evaluates the mask at the corners of a block, which decides most blocks that a boundary crosses:
// 8 us instead of 200 with pairs only (document mask, 32768 tokens).
__device__ inline Truth seen_by_corners(const BlockMapParams& p, const Head& at,
                                        const Block& block) {
  Truth sees = {false, false};
#pragma unroll
  for (int corner = 0; corner < 4; ++corner) {
    const int i = corner % 2 ? block.i_high : block.i_low;
    const int j = corner / 2 ? block.j_high : block.j_low;
    const auto row = Mods::row(p.mods, at.batch, at.head, i, i - p.q_offset, 0, 0, 0);
    const bool is_seen = Mods::sees(p.mods, row, Mods::keys(p.mods, row, j), 0);
    const bool is_inside = int64(j) >= int64(i) - p.left && int64(j) <= int64(i) + p.right;
    sees.may_be_true |= is_inside & is_seen;
    sees.may_be_false |= is_inside & !is_seen;
  }
  return sees;
}

// Evaluates this warp's pairs of a block, until the CTA has found a visible and a masked pair.
__device__ __forceinline__ void look_at_pairs(const BlockMapParams& p, const Head& at,
                                              const Block& block, unsigned bit, Found& found) {
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes;
  volatile const Found& known = found;
  unsigned seen = 0, hidden = 0;
  // Rows are the inner loop, so that captured values of keys stay in registers.
  for (int first = block.j_low; first <= block.j_high; first += keys_of_lane * lanes) {
    const int j = first + lane;
    int rows = 0;
    for (int i = block.i_low + warp; i <= block.i_high; i += warps) {
      const auto row = Mods::row(p.mods, at.batch, at.head, i, i - p.q_offset, 0, 0, 0);
      const auto keys = Mods::keys(p.mods, row, j);
      const int begin = int(max(int64(block.j_low), int64(i) - p.left));
      const int end = int(min(int64(block.j_high), int64(i) + p.right));
#pragma unroll
      for (int n = 0; n < keys_of_lane; ++n) {
        const bool is_inside = j + n * lanes >= begin && j + n * lanes <= end;
        const bool sees = Mods::sees(p.mods, row, keys, n * lanes);
        seen |= is_inside & sees;
        hidden |= is_inside & !sees;
      }
      // Checked after the first row, too, since an irregular mask has both kinds of pairs there.
      if (rows++ % rows_of_turn == 0 || i + warps > block.i_high) {
        const unsigned any_seen = __any_sync(all_lanes, seen != 0) ? bit : 0;
        const unsigned any_hidden = __any_sync(all_lanes, hidden != 0) ? bit : 0;
        const unsigned known_seen = known.seen, known_hidden = known.hidden;
        if (lane == 0) {
          if (any_seen & ~known_seen) atomicOr(&found.seen, bit);
          if (any_hidden & ~known_hidden) atomicOr(&found.hidden, bit);
        }
        // The vote makes the decision uniform, because lanes may read `known` at different times.
        const bool is_known = (any_seen | known_seen) & (any_hidden | known_hidden) & bit;
        if (__any_sync(all_lanes, is_known)) return;
      }
    }
  }
}

// Returns what is known about the 32 blocks of a word before any pairs are evaluated.
__device__ inline Found found_at_once(const BlockMapParams& p, const Head& at, int part, int word) {
  Truth sees = {false, true};
  bool is_open = false;
  const int key_block = word * 32 + int(threadIdx.x % lanes);
  const Seen seen = word < p.map.words ? seen_by_bounds(p, at, part, key_block) : Seen::none;
  if (seen == Seen::all) sees = {true, false};
  if (seen == Seen::some) {
    sees = seen_by_corners(p, at, Block(p, part, key_block).within_band(p));
    is_open = !(sees.may_be_true && sees.may_be_false);
  }
  return {__ballot_sync(all_lanes, is_open), __ballot_sync(all_lanes, sees.may_be_true),
          __ballot_sync(all_lanes, sees.may_be_false)};
}

// Stores the visible pairs of a block. Each thread stores one half of a ShownPairs entry.
template <int Words>
__device__ __forceinline__ void keep_pairs(const BlockMapParams& p, const Head& at, int part,
                                           int key_block, int slot) {
  using Shown = ShownPairs<Words>;
  static_assert(threads == 2 * Shown::threads, "each has a row");
  const int thread = threadIdx.x / 2, half = threadIdx.x % 2;
  const int row = part * p.part_rows + Shown::first_row(thread) + 8 * half;
  const auto of_row = Mods::row(p.mods, at.batch, at.head, row + p.q_offset, row, 0, 0, 0);
  const auto keys = Mods::keys(p.mods, of_row, key_block * p.Bc + Shown::first_key(thread));
  unsigned* bits = p.map.shown_in<Shown>(blockIdx.x, slot)[thread].bits[half];
#pragma unroll
  for (int word = 0; word < Words; ++word) {
    unsigned shown = 0;
    for (int n = 0; n < min(32, p.Bc / 4 - word * 32); ++n) {
      shown |= unsigned(Mods::sees(p.mods, of_row, keys, Shown::step(word * 32 + n))) << n;
    }
    bits[word] = shown;
  }
}

// Kernel: one CTA per row group and head; each warp classifies a word, from the last to the first.
__device__ inline void build(const BlockMapParams& p) {
  __shared__ Found found[warps];
  const int warp = threadIdx.x / lanes;
  const int part = blockIdx.x % p.all_parts();
  const Head at(p, blockIdx.x / p.all_parts());
  int slot = 0;
  for (int first = (p.map.words - 1) / warps * warps; first >= 0; first -= warps) {
    const Found at_once = found_at_once(p, at, part, first + warp);
    if (threadIdx.x % lanes == 0) found[warp] = at_once;
    __syncthreads();
    for (int n = 0; n < warps; ++n) {
      for (unsigned left = found[n].open; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const Block block = Block(p, part, (first + n) * 32 + bit).within_band(p);
        look_at_pairs(p, at, block, 1u << bit, found[n]);
      }
    }
    __syncthreads();
    for (int n = min(warps, p.map.words - first) - 1; n >= 0; --n) {
      const Found known = found[n];
      if (threadIdx.x == 0) {
        const int64 index = int64(blockIdx.x) * p.map.words + first + n;
        p.map.visited()[index] = known.seen;
        p.map.full()[index] = known.seen & ~known.hidden;
        p.map.behind()[index] = slot;
      }
      unsigned left = known.seen & known.hidden;
      for (; left != 0 && slot < p.map.slots; ++slot) {
        const int bit = 31 - __clz(left), key_block = (first + n) * 32 + bit;
        left &= ~(1u << bit);
        if (p.Bc <= 128) {
          keep_pairs<1>(p, at, part, key_block, slot);
        } else {
          keep_pairs<2>(p, at, part, key_block, slot);
        }
      }
    }
    __syncthreads();
  }
}

// Range and number of key blocks that are nonempty for any row group of a query tile.
struct Extent {
  int begin = 0;
  int end = 0;
  int count = 0;

  __device__ Extent(const BlockMapParams& p, int64 tile) {
    const unsigned* visited = p.map.visited() + tile * p.parts * p.map.words;
    for (int word = 0; word < p.map.words; ++word) {
      unsigned any = 0;
      for (int part = 0; part < p.parts; ++part) any |= visited[part * p.map.words + word];
      if (any == 0) continue;
      if (count == 0) begin = word * 32 + __ffs(any) - 1;
      end = word * 32 + 32 - __clz(any);
      count += __popc(any);
    }
  }

  // Returns the tile's class: from 0 if all key blocks are nonempty to sizes - 1 if none is.
  __device__ int size(const BlockMapParams& p) const {
    return int(int64(p.map.key_blocks - count) * (sizes - 1) / p.map.key_blocks);
  }
};

// Kernel: one CTA per head sorts the query tiles by class, in any order within a class.
__device__ inline void order_tiles(const BlockMapParams& p) {
  __shared__ int ends[sizes];
  const int64 first = int64(blockIdx.x) * p.row_tiles;
  ends[threadIdx.x] = 0;
  __syncthreads();
  for (int tile = threadIdx.x; tile < p.row_tiles; tile += threads) {
    atomicAdd(ends + Extent(p, first + tile).size(p), 1);
  }
  __syncthreads();
  for (int distance = 1; distance < sizes; distance *= 2) {
    const int before = int(threadIdx.x) >= distance ? ends[threadIdx.x - distance] : 0;
    __syncthreads();
    ends[threadIdx.x] += before;
    __syncthreads();
  }
  for (int tile = threadIdx.x; tile < p.row_tiles; tile += threads) {
    const Extent extent(p, first + tile);
    const int place = atomicAdd(ends + extent.size(p), -1) - 1;
    p.map.tiles()[first + place] = {tile, extent.begin, extent.end};
  }
}

}  // namespace block_map
