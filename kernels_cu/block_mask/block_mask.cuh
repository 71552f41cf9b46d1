// Block mask: which blocks of the score matrix a mask leaves empty, partial or full. `build.cu`
// builds it and attention kernels read it. cupy_flash/gpu/block_mask_layout.py has its layout.
#pragma once

using int64 = long long;

// A query tile, and its range [begin, end) of key blocks from the first to the last nonempty one.
struct alignas(16) MaskedTile {
  int tile;
  int begin;
  int end;
};

// Visible (query, key) pairs in a block of 64 rows and at most 128 * Words keys. Each entry holds
// the bits for one thread of four warps that hold the scores as accumulator fragments
// (tile/fragments.cuh). Bit n of bits[half] is for the thread's n-th key and for the row 8 * half
// below its first row.
template <int Words>
struct alignas(8 * Words) VisiblePairs {
  static constexpr int threads = 128;
  unsigned bits[2][Words];

  // Return the first row and the first key of the scores that a thread holds, within the block.
  __device__ static int first_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ static int first_key(int thread) { return thread % 4 * 2; }
  // Returns the distance from a thread's first key to its n-th key.
  __device__ static int step(int n) { return n / 2 * 8 + n % 2; }
};

// Block mask in device memory. The rows of a query tile are divided into row groups; a block is a
// row group times a key block of Bc keys. Bit k of a row group's words is for key block k. The last
// `slots` partial blocks of each row group have a slot that stores their visible pairs; slot 0 is
// that of the last partial block.
struct BlockMask {
  static constexpr int max_slots = 16;  // maximum number of slots per row group

  unsigned char* memory;  // the arrays below, stored consecutively; `*_offset` are byte offsets
  int64 full_offset;
  int64 slots_after_offset;
  int64 tiles_offset;
  int64 pairs_offset;
  int64 batch_stride;  // in query tiles; 0 if all batches have the same mask
  int64 head_stride;
  int words;  // number of 32-bit words per row group
  int key_blocks;
  int slots;  // number of slots per row group
  int lists;  // number of lists of query tiles (query_tile_lists.cuh)

  // Array (batches, heads, query tiles, row groups, words): the bit of each block that has a
  // visible pair is set.
  __device__ unsigned* nonempty() const { return reinterpret_cast<unsigned*>(memory); }
  // Same shape: the bit of each block whose pairs are all visible is set. Pairs outside of the
  // causal or window band do not count, so attention masks these by position.
  __device__ unsigned* full() const { return reinterpret_cast<unsigned*>(memory + full_offset); }
  // Same shape: number of blocks of the row group that have slots and are in later words.
  __device__ unsigned char* slots_after() const { return memory + slots_after_offset; }
  // Array (batches, heads, query tiles): query tiles sorted by their number of nonempty key blocks,
  // in descending order.
  __device__ MaskedTile* tiles() const {
    return reinterpret_cast<MaskedTile*>(memory + tiles_offset);
  }
  // Visible pairs of partial blocks, in an array (batches, heads, query tiles, row groups, slots,
  // threads). `row_group` counts over all batches, heads and query tiles.
  template <class TilePairs>
  __device__ TilePairs* visible_pairs(int64 row_group, int slot) const {
    return reinterpret_cast<TilePairs*>(memory + pairs_offset) +
           (row_group * slots + slot) * TilePairs::threads;
  }

  __device__ int64 query_tile_index(int batch, int head, int tile) const {
    return batch * batch_stride + head * head_stride + tile;
  }

  // Returns the query tile at index `position` of a head's sorted tiles.
  __device__ MaskedTile sorted_tile(int batch, int head, int position) const {
    return tiles()[query_tile_index(batch, head, position)];
  }
};

// Block mask of one query tile.
template <int RowGroups>
struct MaskedBlocks {
  const unsigned* nonempty;
  const unsigned* full;
  const unsigned char* slots_after;
  int words;
  int slots;

  __device__ MaskedBlocks(const BlockMask& map, int batch, int head, int tile)
      : words(map.words), slots(map.slots) {
    const int64 offset = map.query_tile_index(batch, head, tile) * RowGroups * words;
    nonempty = map.nonempty() + offset;
    full = map.full() + offset;
    slots_after = map.slots_after() + offset;
  }

  // Returns 1 + the slot of a block's visible pairs, or 0 if these are not stored.
  __device__ int slot_of(int row_group, int block) const {
    const int word = row_group * words + block / 32;
    const unsigned from_block = (nonempty[word] & ~full[word]) >> block % 32;
    const int slot = slots_after[word] + __popc(from_block);
    return from_block % 2 && slot <= slots ? slot : 0;
  }

  __device__ bool is_nonempty(int row_group, int block) const {
    return bit(nonempty, row_group, block);
  }
  __device__ bool is_full(int row_group, int block) const { return bit(full, row_group, block); }

  // Returns the first key block in [begin, end) that is nonempty for any row group, or `end`.
  __device__ int first_nonempty(int begin, int end) const {
    if (begin >= end) return end;
    int word = begin / 32;
    unsigned bits = nonempty_word(word) & (0xffffffffu << begin % 32);
    while (bits == 0) {
      if (++word * 32 >= end) return end;
      bits = nonempty_word(word);
    }
    return min(end, word * 32 + __ffs(bits) - 1);
  }

  // Returns the last key block before `end` that is nonempty for any row group, or -1.
  __device__ int last_nonempty_before(int end) const {
    int word = (end - 1) >> 5;
    if (end <= 0) return -1;
    // Keep the bits of the word up to bit (end - 1) % 32.
    unsigned bits = nonempty_word(word) & (0xffffffffu >> (31 - (end - 1) % 32));
    while (bits == 0) {
      if (--word < 0) return -1;
      bits = nonempty_word(word);
    }
    return word * 32 + 31 - __clz(bits);
  }

  // Returns the bits of the key blocks in a word that are nonempty for any row group.
  __device__ unsigned nonempty_word(int word) const {
    unsigned bits = 0;
#pragma unroll
    for (int row_group = 0; row_group < RowGroups; ++row_group) {
      bits |= nonempty[row_group * words + word];
    }
    return bits;
  }

 private:
  __device__ bool bit(const unsigned* bits, int row_group, int block) const {
    return bits[row_group * words + block / 32] >> block % 32 & 1;
  }
};
