// Builds a block mask for the backward pass, where a CTA owns a KV tile and iterates over query
// tiles. The kernels run one after another and communicate through the block mask:
//
//   build (build.cu)   evaluates the mask   ->  bits of nonempty blocks and of full blocks
//   list_query_tiles   reads these bits     ->  a list of query tiles for each KV tile
//   store_pairs        reads the lists,     ->  visible pairs of entries that are not full, and
//                      evaluates the mask       the keys that have a visible pair
//
// The list of a KV tile contains the query tiles that have a visible pair with it, in ascending
// order. Lists have equal space, and the entries after the last one are `no_entry`:
//
//   KV tile 0   tile 0 | tile 1 | tile 3, ends_list | no_entry
//           1   tile 3, ends_list | no_entry | no_entry | no_entry
//
// An entry also holds an index in the dq order (backward/listed_tiles.cuh). The query heads of a KV
// head use the same list. If their masks differ, the list contains the query tiles that any of
// these heads needs, so that all of them have the same dq order.
#include "block_mask/build.cu"
#include "block_mask/query_tile_lists.cuh"

namespace block_mask {

// Blocks of the query heads that use the lists of one batch entry and KV head.
struct ListedBlocks {
  const BlockMaskParams& p;
  int64 first_head;  // index of the first of these heads among those of all batch entries

  __device__ ListedBlocks(const BlockMaskParams& p, int64 list_head)
      : p(p), first_head(list_head * p.heads_per_list) {}

  // Returns a word of bits: whether a block of the query tile is nonempty for any of the heads.
  __device__ unsigned nonempty(int tile, int word) const {
    unsigned any = 0;
    for (int head = 0; head < p.heads_per_list; ++head) {
      any |= p.map.nonempty()[index(head, tile, word)];
    }
    return any;
  }
  // Returns a word of bits: whether a block of the query tile is full for all of the heads.
  __device__ unsigned full(int tile, int word) const {
    unsigned all = ~0u;
    for (int head = 0; head < p.heads_per_list; ++head) {
      all &= p.map.full()[index(head, tile, word)];
    }
    return all;
  }

 private:
  __device__ int64 index(int head, int tile, int word) const {
    return ((first_head + head) * p.query_tiles + tile) * p.map.words + word;
  }
};

// Returns whether all pairs of a query tile and a key block exist and are inside the band.
__device__ inline bool is_inside_band(const BlockMaskParams& p, const BatchHead& batch_head,
                                      int tile, int key_block) {
  const Block block(p, batch_head, tile, key_block);
  return (tile + 1) * p.group_rows <= batch_head.sequence.seqlen_q &&
         (key_block + 1) * p.Bc <= batch_head.sequence.seqlen_k &&
         int64(block.j_low) >= int64(block.i_high) - p.left &&
         int64(block.j_high) <= int64(block.i_low) + p.right;
}

// Returns the entry of a query tile that has a visible pair with the key block.
__device__ inline QueryTileEntry list_entry(const BlockMaskParams& p, const ListedBlocks& blocks,
                                            const BatchHead& batch_head, int tile,
                                            int key_block) {
  const int word = key_block / 32, bit = key_block % 32;
  const unsigned nonempty = blocks.nonempty(tile, word);
  // CTAs of later keys add to dq first.
  int later = __popc(nonempty >> bit) - 1;
  for (int i = word + 1; i < p.map.words; ++i) later += __popc(blocks.nonempty(tile, i));
  unsigned earlier = nonempty & ((1u << bit) - 1);
  for (int i = 0; i < word && earlier == 0; ++i) earlier = blocks.nonempty(tile, i);
  QueryTileEntry entry = {};
  entry.tile = tile;
  entry.order_index = later;
  entry.is_full =
      (blocks.full(tile, word) >> bit & 1) && is_inside_band(p, batch_head, tile, key_block);
  entry.is_last_cta = earlier == 0;
  return entry;
}

// Kernel with one warp per list. Each lane tests one query tile at a time. A ballot gives the lanes
// the positions of their entries in the list.
__device__ inline void list_query_tiles(const BlockMaskParams& p) {
  const int64 list = int64(blockIdx.x) * warps + threadIdx.x / lanes;
  const int64 list_head = list / p.map.key_blocks;
  const int key_block = list % p.map.key_blocks;
  if (list >= p.map.lists) return;
  const ListedBlocks blocks(p, list_head);
  const BatchHead first_head(p, int(blocks.first_head));
  const int lane = threadIdx.x % lanes;
  auto* entries = reinterpret_cast<QueryTileEntry*>(QueryTileLists{p.map}.words() + list * p.query_tiles);
  int count = 0;
  for (int first = 0; first < p.query_tiles; first += lanes) {
    const int tile = first + lane;
    const bool is_listed = tile < p.query_tiles &&
                           (blocks.nonempty(tile, key_block / 32) >> key_block % 32 & 1);
    const unsigned listed = __ballot_sync(all_lanes, is_listed);
    if (is_listed) {
      entries[count + __popc(listed & ((1u << lane) - 1))] =
          list_entry(p, blocks, first_head, tile, key_block);
    }
    count += __popc(listed);
  }
  for (int i = count + lane; i < p.query_tiles; i += lanes) {
    QueryTileLists{p.map}.words()[list * p.query_tiles + i] = no_entry;
  }
  __syncwarp();
  if (lane == 0 && count > 0) entries[count - 1].ends_list = 1;
  if (lane < p.Bc / 32) {
    QueryTileLists{p.map}.visible_keys(list, p.query_tiles, p.Bc)[lane] = 0;
  }
}

// Kernel with one CTA per entry. Each thread evaluates the 32 pairs of one word at a time. It runs
// only if the query heads of a KV head have the same mask.
__device__ inline void store_pairs(const BlockMaskParams& p) {
  using Pairs = TransposedPairs;
  const int64 list = blockIdx.x / p.query_tiles;
  const unsigned listed = QueryTileLists{p.map}.words()[blockIdx.x];
  QueryTileEntry entry;
  memcpy(&entry, &listed, sizeof(entry));
  if (listed == no_entry) return;
  unsigned* visible_keys = QueryTileLists{p.map}.visible_keys(list, p.query_tiles, p.Bc);
  if (entry.is_full) {
    if (threadIdx.x < p.Bc / 32) atomicOr(visible_keys + threadIdx.x, ~0u);
    return;
  }
  const BatchHead batch_head(p, int(list / p.map.key_blocks));
  const int key_block = list % p.map.key_blocks;
  const int words = p.group_rows * p.Bc / 32;
  unsigned* target = QueryTileLists{p.map}.pairs(blockIdx.x, words * int(sizeof(unsigned)));
  for (int word = threadIdx.x; word < words; word += threads) {
    const int thread = word % Pairs::threads, block = word / Pairs::threads;
    const int key_blocks = p.Bc / Pairs::side;
    const int row = entry.tile * p.group_rows + block / key_blocks * Pairs::side +
                    Pairs::first_row(thread);
    const int j =
        key_block * p.Bc + block % key_blocks * Pairs::side + Pairs::first_key(thread);
    unsigned bits = 0;
    for (int r = 0; r < 16; ++r) {
      const int i = row + Pairs::row_step(r) + batch_head.q_offset;
      const auto mod_row = batch_head.mod_row(p, i);
      const auto keys = Mods::keys(p.mods, mod_row, j);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key = j + 8 * n;
        const bool is_inside = i - batch_head.q_offset < batch_head.sequence.seqlen_q &&
                               key < batch_head.sequence.seqlen_k &&
                               int64(key) >= int64(i) - p.left && int64(key) <= int64(i) + p.right;
        const bool is_visible = Mods::is_visible(p.mods, mod_row, keys, 8 * n);
        bits |= unsigned(is_inside & is_visible) << Pairs::bit(r, n);
      }
    }
    target[word] = bits;
    for (int n = 0; n < 2; ++n) {
      const int offset = j + 8 * n - key_block * p.Bc;
      if (bits & Pairs::bits_of_key(n)) atomicOr(visible_keys + offset / 32, 1u << offset % 32);
    }
  }
}

}  // namespace block_mask
