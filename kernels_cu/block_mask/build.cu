// Builds a block mask: determines which blocks of the score matrix a mask leaves empty, full or
// partial, in three kernels. `find_ranges` computes the range of captured values for the keys of
// each key block and for each row group (a part of a query tile). `build` classifies blocks by
// interval arithmetic on these ranges (bounds.cuh). If a block stays undecided, a CTA evaluates its
// (query, key) pairs until it has found a visible and a masked pair. `order_tiles` sorts the query
// tiles by their number of nonempty key blocks.
//
// The translation unit declares `ModArguments`, `Mods`, `MaskBounds` and `BlockMaskConfig` before
// this file. `BlockMaskConfig` tells whether sequences have lengths of their own (`has_seqlens`) and
// whether they are packed (`packed`). Arrays have space for `seqlen_q` queries and `seqlen_k` keys of
// each sequence, whatever its length is.
#include "scheduler/packed_tiles.cuh"
#include "block_mask/bounds.cuh"
#include "block_mask/block_mask.cuh"
#include "score/capture.cuh"

struct BlockMaskParams {
  BlockMask map;
  void* row_ranges;  // `MaskBounds::Rows` (batches, heads, query tiles, row groups)
  void* key_ranges;  // `MaskBounds::Keys` (batches, heads, key blocks)
  int batches;
  int heads;
  int seqlen_q;
  int seqlen_k;
  int q_offset;
  int group_rows;
  int Bc;
  int query_tiles;
  int row_groups;  // number of row groups per query tile
  int heads_per_list;  // number of `heads` per list of query tiles; 0 without lists
  // With `BlockMaskConfig::has_seqlens`, as in `Params`. Otherwise null and 0.
  int total_q;
  int total_k;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* seqused_k;
  // Causal or window band: only the keys from `left` before a row's position to `right` after it
  // are considered.
  // Positions may be 2^31 apart, so sums with `left` and `right` need 64 bits.
  int left;
  int right;
  alignas(8) ModArguments mods;

  __device__ int total_row_groups() const { return query_tiles * row_groups; }
};

namespace block_mask {

constexpr int lanes = 32;
constexpr int threads = 256;
constexpr int warps = threads / lanes;
constexpr unsigned all_lanes = 0xffffffffu;
// Number of keys of a row that a lane evaluates; number of rows after which a warp checks whether
// the CTA has found both a visible and a masked pair.
constexpr int keys_per_lane = 4;
constexpr int rows_per_check = 4;
// Number of classes that query tiles are sorted into, by their number of nonempty blocks.
constexpr int size_classes = threads;

// Batch and head. A mask that is the same for all heads is evaluated for head 0 only, and in a dense
// batch also for batch 0 only if it is the same for all batches.
struct BatchHead {
  int index;
  int batch;
  int head;
  Sequence sequence;
  int q_offset;  // position of the first query among the keys

  __device__ BatchHead(const BlockMaskParams& p, int index)
      : index(index),
        batch(index / p.heads),
        head(index % p.heads),
        sequence(sequence_of_batch(p, batch)),
        q_offset(BlockMaskConfig::packed ? sequence.seqlen_k - sequence.seqlen_q : p.q_offset) {}

  // Returns the coordinates of the query at position i, as functions of the mask take them.
  __device__ auto mod_row(const BlockMaskParams& p, int i) const {
    return Mods::row(p.mods, batch, head, i, i - q_offset, sequence.q_first, sequence.k_first, 0);
  }

  // Returns an upper bound of the sequence's number of queries, which takes no search.
  __device__ static int most_queries(const BlockMaskParams& p, int batch) {
    return BlockMaskConfig::packed ? find_sequence<0>(call_of(p), batch).seqlen_q : p.seqlen_q;
  }

 private:
  // Returns the rows of a sequence as the kernels of the backward pass find them.
  __device__ static Sequence sequence_of_batch(const BlockMaskParams& p, int batch) {
    return sequence_of<BlockMaskConfig>(call_of(p), batch);
  }
  __device__ static Params call_of(const BlockMaskParams& p) {
    Params call = {};
    call.batch = p.batches;
    call.seqlen_q = p.seqlen_q;
    call.seqlen_k = p.seqlen_k;
    call.cu_seqlens_q = p.cu_seqlens_q;
    call.cu_seqlens_k = p.cu_seqlens_k;
    call.seqused_k = p.seqused_k;
    call.total_q = p.total_q;
    call.total_k = p.total_k;
    return call;
  }
};

// Positions of the rows of a row group, and keys of a key block; all bounds are inclusive.
struct Block {
  int i_low;
  int i_high;
  int j_low;
  int j_high;

  __device__ Block(const BlockMaskParams& p, const BatchHead& of, int row_group, int key_block)
      : i_low(row_group * p.group_rows + of.q_offset),
        i_high(min((row_group + 1) * p.group_rows, of.sequence.seqlen_q) - 1 + of.q_offset),
        j_low(key_block * p.Bc),
        j_high(min((key_block + 1) * p.Bc, of.sequence.seqlen_k) - 1) {}

  // Returns the block without the rows and keys that lie entirely outside of the band.
  __device__ Block within_band(const BlockMaskParams& p) const {
    Block clipped = *this;
    clipped.i_low = int(max(int64(i_low), int64(j_low) - p.right));
    clipped.i_high = int(min(int64(i_high), int64(j_high) + p.left));
    clipped.j_low = int(max(int64(j_low), int64(clipped.i_low) - p.left));
    clipped.j_high = int(min(int64(j_high), int64(clipped.i_high) + p.right));
    return clipped;
  }

  __device__ bool is_empty() const { return i_low > i_high || j_low > j_high; }
};

// `shuffle_xor()` returns x of the lane whose index differs by an XOR with `distance`.
// `warp_union()` returns the union of the ranges of all lanes.
template <class T>
__device__ T shuffle_xor(T x, int distance) {
  static_assert(sizeof(T) % 4 == 0, "the type must consist of 32-bit words");
  unsigned words[sizeof(T) / 4];
  memcpy(words, &x, sizeof(T));
  for (unsigned& word : words) word = __shfl_xor_sync(all_lanes, word, distance);
  memcpy(&x, words, sizeof(T));
  return x;
}
template <class T>
__device__ T warp_union(T range) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    range =
        range_union(range, T{shuffle_xor(range.low, distance), shuffle_xor(range.high, distance)});
  }
  return range;
}
template <class Real>
__device__ RealRange<Real> warp_union(RealRange<Real> range) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    range = range_union(range, RealRange<Real>{shuffle_xor(range.low, distance),
                                               shuffle_xor(range.high, distance), false});
  }
  range.may_be_nan = __any_sync(all_lanes, range.may_be_nan);
  return range;
}
__device__ inline Truth warp_union(Truth range) {
  return {__any_sync(all_lanes, range.may_be_true) != 0,
          __any_sync(all_lanes, range.may_be_false) != 0};
}

// Returns the union of ranges_at(position) for the positions [first, last]. Called by a warp.
template <class RangesAt>
__device__ auto ranges_between(int first, int last, RangesAt ranges_at) {
  const int lane = threadIdx.x % lanes;
  // Lanes past the last position evaluate the last position again.
  auto ranges = ranges_at(min(first + lane, last));
  for (int position = first + lane + lanes; position <= last; position += lanes) {
    MaskBounds::join(ranges, ranges_at(position));
  }
  MaskBounds::each(ranges, [](auto& range) { range = warp_union(range); });
  return ranges;
}

// Kernel: one warp computes the ranges of one row group of a head, or of one of its key blocks.
__device__ inline void find_ranges(const BlockMaskParams& p) {
  const int row_groups = MaskBounds::row_ranges > 0 ? p.total_row_groups() : 0;
  const int key_blocks = MaskBounds::key_ranges > 0 ? p.map.key_blocks : 0;
  const int64 index = int64(blockIdx.x) * warps + threadIdx.x / lanes;
  // If the mask needs no ranges, this kernel is not launched; max() avoids dividing by constant 0.
  const int warps_per_head = max(1, row_groups + key_blocks);
  const int64 index_in_head = index % warps_per_head;
  const int64 head = index / warps_per_head;
  if (head >= int64(p.batches) * p.heads) return;
  const BatchHead batch_head(p, int(head));
  const bool is_first_lane = threadIdx.x % lanes == 0;
  if (index_in_head < row_groups) {
    const Block block(p, batch_head, int(index_in_head), 0);
    // The last query tile, and those past the end of a sequence, may have row groups without rows.
    if (block.i_low > block.i_high) return;
    const auto ranges = ranges_between(block.i_low, block.i_high, [&](int i) {
      return MaskBounds::rows_at(p.mods, batch_head.batch, batch_head.head, i,
                                 batch_head.sequence.q_first, batch_head.sequence.k_first);
    });
    auto* target = static_cast<MaskBounds::Rows*>(p.row_ranges);
    if (is_first_lane) target[int64(batch_head.index) * row_groups + index_in_head] = ranges;
  } else {
    const int key_block = int(index_in_head) - row_groups;
    const Block block(p, batch_head, 0, key_block);
    if (block.j_low > block.j_high) return;
    const auto ranges = ranges_between(block.j_low, block.j_high, [&](int j) {
      return MaskBounds::keys_at(p.mods, batch_head.batch, batch_head.head, j,
                                 batch_head.sequence.q_first, batch_head.sequence.k_first);
    });
    auto* target = static_cast<MaskBounds::Keys*>(p.key_ranges);
    if (is_first_lane) target[int64(batch_head.index) * p.map.key_blocks + key_block] = ranges;
  }
}

// What is known about the 32 blocks of a word, one bit per block.
struct BlockStates {
  unsigned undecided;  // pairs of the block must be evaluated
  unsigned visible;    // some pair is visible
  unsigned masked;     // some pair is masked
};

__device__ inline Visibility classify_by_bounds(const BlockMaskParams& p,
                                                const BatchHead& batch_head, int row_group,
                                                int key_block) {
  if (key_block >= p.map.key_blocks) return Visibility::none;
  const Block block = Block(p, batch_head, row_group, key_block).within_band(p);
  if (block.is_empty()) return Visibility::none;
  MaskBounds::Rows rows = {};
  MaskBounds::Keys keys = {};
  if constexpr (MaskBounds::row_ranges > 0) {
    const int64 first_of_head = int64(batch_head.index) * p.total_row_groups();
    rows = static_cast<const MaskBounds::Rows*>(p.row_ranges)[first_of_head + row_group];
  }
  if constexpr (MaskBounds::key_ranges > 0) {
    keys = static_cast<const MaskBounds::Keys*>(
        p.key_ranges)[int64(batch_head.index) * p.map.key_blocks + key_block];
  }
  return MaskBounds::classify(p.mods, batch_head.batch, batch_head.head, block.i_low, block.i_high,
                              block.j_low, block.j_high, batch_head.sequence.q_first,
                              batch_head.sequence.k_first, rows, keys);
}

// Evaluates the mask at the corners of a block. This decides most blocks that a boundary of the
// mask crosses: 8 us instead of 200 us without this step (document mask, 32768 tokens).
__device__ inline Truth evaluate_corners(const BlockMaskParams& p, const BatchHead& batch_head,
                                         const Block& block) {
  Truth visible = {false, false};
#pragma unroll
  for (int corner = 0; corner < 4; ++corner) {
    const int i = corner % 2 ? block.i_high : block.i_low;
    const int j = corner / 2 ? block.j_high : block.j_low;
    const auto row = batch_head.mod_row(p, i);
    const bool is_visible = Mods::is_visible(p.mods, row, Mods::keys(p.mods, row, j), 0);
    const bool is_inside = int64(j) >= int64(i) - p.left && int64(j) <= int64(i) + p.right;
    visible.may_be_true |= is_inside & is_visible;
    visible.may_be_false |= is_inside & !is_visible;
  }
  return visible;
}

// Evaluates this warp's pairs of a block until the CTA has found a visible and a masked pair.
__device__ __forceinline__ void evaluate_pairs(const BlockMaskParams& p,
                                               const BatchHead& batch_head, const Block& block,
                                               unsigned bit, BlockStates& states) {
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes;
  volatile const BlockStates& known = states;
  unsigned visible = 0, masked = 0;
  // Rows are the inner loop, so that captured values of keys stay in registers.
  for (int first = block.j_low; first <= block.j_high; first += keys_per_lane * lanes) {
    const int j = first + lane;
    int rows = 0;
    for (int i = block.i_low + warp; i <= block.i_high; i += warps) {
      const auto row = batch_head.mod_row(p, i);
      const auto keys = Mods::keys(p.mods, row, j);
      const int begin = int(max(int64(block.j_low), int64(i) - p.left));
      const int end = int(min(int64(block.j_high), int64(i) + p.right));
#pragma unroll
      for (int n = 0; n < keys_per_lane; ++n) {
        const bool is_inside = j + n * lanes >= begin && j + n * lanes <= end;
        const bool is_visible = Mods::is_visible(p.mods, row, keys, n * lanes);
        visible |= is_inside & is_visible;
        masked |= is_inside & !is_visible;
      }
      // The first row is checked, too: an irregular mask has both visible and masked pairs there.
      if (rows++ % rows_per_check == 0 || i + warps > block.i_high) {
        const unsigned any_visible = __any_sync(all_lanes, visible != 0) ? bit : 0;
        const unsigned any_masked = __any_sync(all_lanes, masked != 0) ? bit : 0;
        const unsigned known_visible = known.visible, known_masked = known.masked;
        if (lane == 0) {
          if (any_visible & ~known_visible) atomicOr(&states.visible, bit);
          if (any_masked & ~known_masked) atomicOr(&states.masked, bit);
        }
        // The vote makes the decision uniform, because lanes may read `known` at different times.
        const bool is_known = (any_visible | known_visible) & (any_masked | known_masked) & bit;
        if (__any_sync(all_lanes, is_known)) return;
      }
    }
  }
}

// Returns the states of the 32 blocks of a word from bounds and corners, before evaluate_pairs().
__device__ inline BlockStates classify_word(const BlockMaskParams& p, const BatchHead& batch_head,
                                            int row_group, int word) {
  Truth visible = {false, true};
  bool is_undecided = false;
  const int key_block = word * 32 + int(threadIdx.x % lanes);
  const Visibility visibility = word < p.map.words
                                    ? classify_by_bounds(p, batch_head, row_group, key_block)
                                    : Visibility::none;
  if (visibility == Visibility::all) visible = {true, false};
  if (visibility == Visibility::some) {
    const Block block = Block(p, batch_head, row_group, key_block).within_band(p);
    visible = evaluate_corners(p, batch_head, block);
    is_undecided = !(visible.may_be_true && visible.may_be_false);
  }
  return {__ballot_sync(all_lanes, is_undecided), __ballot_sync(all_lanes, visible.may_be_true),
          __ballot_sync(all_lanes, visible.may_be_false)};
}

// Stores the visible pairs of a block. Each thread stores one row: bits[half] of one VisiblePairs.
template <int Words>
__device__ __forceinline__ void store_visible_pairs(const BlockMaskParams& p,
                                                    const BatchHead& batch_head, int row_group,
                                                    int key_block, int slot) {
  using TilePairs = VisiblePairs<Words>;
  static_assert(threads == 2 * TilePairs::threads, "each thread processes one row");
  const int thread = threadIdx.x / 2, half = threadIdx.x % 2;
  const int row = row_group * p.group_rows + TilePairs::first_row(thread) + 8 * half;
  const auto mod_row = batch_head.mod_row(p, row + batch_head.q_offset);
  const auto keys = Mods::keys(p.mods, mod_row, key_block * p.Bc + TilePairs::first_key(thread));
  unsigned* bits = p.map.visible_pairs<TilePairs>(blockIdx.x, slot)[thread].bits[half];
#pragma unroll
  for (int word = 0; word < Words; ++word) {
    unsigned bits_of_word = 0;
    for (int n = 0; n < min(32, p.Bc / 4 - word * 32); ++n) {
      bits_of_word |=
          unsigned(Mods::is_visible(p.mods, mod_row, keys, TilePairs::step(word * 32 + n))) << n;
    }
    bits[word] = bits_of_word;
  }
}

// Kernel: one CTA per row group and head. Each warp classifies one word of 32 blocks at a time; the
// CTA proceeds from the last words to the first.
__device__ inline void build(const BlockMaskParams& p) {
  __shared__ BlockStates states[warps];
  const int warp = threadIdx.x / lanes;
  const int row_group = blockIdx.x % p.total_row_groups();
  const int index = blockIdx.x / p.total_row_groups();
  // Most row groups of a packed batch may lie past the end of their sequence.
  if (BlockMaskConfig::packed &&
      row_group * p.group_rows >= BatchHead::most_queries(p, index / p.heads)) {
    for (int word = threadIdx.x; word < p.map.words; word += threads) {
      p.map.nonempty()[int64(blockIdx.x) * p.map.words + word] = 0;
      p.map.full()[int64(blockIdx.x) * p.map.words + word] = 0;
    }
    return;
  }
  const BatchHead batch_head(p, index);
  int slot = 0;
  for (int first = (p.map.words - 1) / warps * warps; first >= 0; first -= warps) {
    const BlockStates classified = classify_word(p, batch_head, row_group, first + warp);
    if (threadIdx.x % lanes == 0) states[warp] = classified;
    __syncthreads();
    for (int n = 0; n < warps; ++n) {
      for (unsigned left = states[n].undecided; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const Block block =
            Block(p, batch_head, row_group, (first + n) * 32 + bit).within_band(p);
        evaluate_pairs(p, batch_head, block, 1u << bit, states[n]);
      }
    }
    __syncthreads();
    for (int n = min(warps, p.map.words - first) - 1; n >= 0; --n) {
      const BlockStates known = states[n];
      if (threadIdx.x == 0) {
        const int64 index = int64(blockIdx.x) * p.map.words + first + n;
        p.map.nonempty()[index] = known.visible;
        p.map.full()[index] = known.visible & ~known.masked;
        p.map.slots_after()[index] = slot;
      }
      unsigned left = known.visible & known.masked;
      for (; left != 0 && slot < p.map.slots; ++slot) {
        const int bit = 31 - __clz(left), key_block = (first + n) * 32 + bit;
        left &= ~(1u << bit);
        if (p.Bc <= 128) {
          store_visible_pairs<1>(p, batch_head, row_group, key_block, slot);
        } else {
          store_visible_pairs<2>(p, batch_head, row_group, key_block, slot);
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

  __device__ Extent(const BlockMaskParams& p, int64 tile) {
    const unsigned* nonempty = p.map.nonempty() + tile * p.row_groups * p.map.words;
    for (int word = 0; word < p.map.words; ++word) {
      unsigned any = 0;
      for (int row_group = 0; row_group < p.row_groups; ++row_group) {
        any |= nonempty[row_group * p.map.words + word];
      }
      if (any == 0) continue;
      if (count == 0) begin = word * 32 + __ffs(any) - 1;
      end = word * 32 + 32 - __clz(any);
      count += __popc(any);
    }
  }

  // Returns the tile's class: 0 if all key blocks are nonempty, size_classes - 1 if none is.
  __device__ int size_class(const BlockMaskParams& p) const {
    return int(int64(p.map.key_blocks - count) * (size_classes - 1) / p.map.key_blocks);
  }
};

// Kernel: one CTA per head sorts the query tiles by `size_class()`, in any order within a class.
__device__ inline void order_tiles(const BlockMaskParams& p) {
  __shared__ int ends[size_classes];
  const int64 first = int64(blockIdx.x) * p.query_tiles;
  ends[threadIdx.x] = 0;
  __syncthreads();
  for (int tile = threadIdx.x; tile < p.query_tiles; tile += threads) {
    atomicAdd(ends + Extent(p, first + tile).size_class(p), 1);
  }
  __syncthreads();
  for (int distance = 1; distance < size_classes; distance *= 2) {
    const int before = int(threadIdx.x) >= distance ? ends[threadIdx.x - distance] : 0;
    __syncthreads();
    ends[threadIdx.x] += before;
    __syncthreads();
  }
  for (int tile = threadIdx.x; tile < p.query_tiles; tile += threads) {
    const Extent extent(p, first + tile);
    const int position = atomicAdd(ends + extent.size_class(p), -1) - 1;
    p.map.tiles()[first + position] = {tile, extent.begin, extent.end};
  }
}

}  // namespace block_mask
