// Which blocks of the score matrix a mask leaves something of, as `block_map.cu` found them and
// kernels read them. cupy_flash/gpu/block_maps.py lays the same struct out.
#pragma once

using int64 = long long;

// A row tile, and the blocks between the first and the last that it visits, none if begin == end.
struct alignas(16) MappedTile {
  int tile;
  int begin;
  int end;
};

// Which pairs a mask shows of a block of 64 rows and at most 128 * Words keys: what a thread needs
// of four warps that hold its scores as fragments (tile/fragments.cuh). The n-th bit of a half is
// that of the n-th key that the thread holds, of the row 8 * half below its first.
template <int Words>
struct alignas(8 * Words) ShownPairs {
  static constexpr int threads = 128;
  unsigned bits[2][Words];

  // Where the rows and keys begin that a thread holds, in the block.
  __device__ static int first_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ static int first_key(int thread) { return thread % 4 * 2; }
  // How far behind its first its n-th key lies.
  __device__ static int step(int n) { return n / 2 * 8 + n % 2; }
};

// A row tile, Br rows of a sequence, consists of parts; a key block is Bc keys. The k-th bit of a
// part's words is that of key block k. Of blocks that a part visits and that are not full, the last
// few of each part have their pairs kept, in slots from the last block on.
struct BlockMap {
  static constexpr int most_slots = 16;  // of a part

  unsigned char* memory;  // of the parts below, one behind the other
  int64 full_at;
  int64 behind_at;
  int64 tiles_at;
  int64 shown_at;
  int64 batch_stride;  // in row tiles; 0 where all share one map
  int64 head_stride;
  int words;  // of a part
  int key_blocks;
  int slots;  // of a part

  // (batches, heads, row tiles, parts, words): blocks with a pair that is seen.
  __device__ unsigned* visited() const { return reinterpret_cast<unsigned*>(memory); }
  // Alike: those of which the mask hides no pair; the band's edge may cut them.
  __device__ unsigned* full() const { return reinterpret_cast<unsigned*>(memory + full_at); }
  // Alike: how many blocks of the words behind have slots.
  __device__ unsigned char* behind() const { return memory + behind_at; }
  // (batches, heads, row tiles): those that visit most blocks first.
  __device__ MappedTile* tiles() const {
    return reinterpret_cast<MappedTile*>(memory + tiles_at);
  }
  // (batches, heads, row tiles, parts, slots, threads): the pairs that are kept; here of a part,
  // counted over all.
  template <class Shown>
  __device__ Shown* shown_in(int64 part, int slot) const {
    return reinterpret_cast<Shown*>(memory + shown_at) + (part * slots + slot) * Shown::threads;
  }

  __device__ int64 row_tile(int batch, int head, int tile) const {
    return batch * batch_stride + head * head_stride + tile;
  }

  // The tile of a head that comes so many places behind its largest.
  __device__ MappedTile tile_at(int batch, int head, int place) const {
    return tiles()[row_tile(batch, head, place)];
  }
};

// The blocks of one row tile.
template <int Parts>
struct MappedBlocks {
  const unsigned* visited;
  const unsigned* full;
  const unsigned char* behind;
  int words;
  int slots;

  __device__ MappedBlocks(const BlockMap& map, int batch, int head, int tile)
      : words(map.words), slots(map.slots) {
    const int64 at = map.row_tile(batch, head, tile) * Parts * words;
    visited = map.visited() + at;
    full = map.full() + at;
    behind = map.behind() + at;
  }

  // Where the pairs of a part's block are kept, from 1 on; 0 for nowhere.
  __device__ int slot_of(int part, int block) const {
    const int word = part * words + block / 32;
    const unsigned from_block = (visited[word] & ~full[word]) >> block % 32;
    const int slot = behind[word] + __popc(from_block);
    return from_block % 2 && slot <= slots ? slot : 0;
  }

  __device__ bool is_visited(int part, int block) const { return bit(visited, part, block); }
  __device__ bool is_full(int part, int block) const { return bit(full, part, block); }

  // The first one that any part visits from `begin` on; `end` if there is none before.
  __device__ int first_from(int begin, int end) const {
    if (begin >= end) return end;
    int word = begin / 32;
    unsigned bits = visited_of_any(word) & (0xffffffffu << begin % 32);
    while (bits == 0) {
      if (++word * 32 >= end) return end;
      bits = visited_of_any(word);
    }
    return min(end, word * 32 + __ffs(bits) - 1);
  }

  // The last one visited before `end`, or -1; blocks are taken from the last to the first.
  __device__ int last_before(int end) const {
    int word = (end - 1) >> 5;
    if (end <= 0) return -1;
    // Its bits up to that of end - 1.
    unsigned bits = visited_of_any(word) & (0xffffffffu >> (31 - (end - 1) % 32));
    while (bits == 0) {
      if (--word < 0) return -1;
      bits = visited_of_any(word);
    }
    return word * 32 + 31 - __clz(bits);
  }

  // The blocks of a word that any part visits.
  __device__ unsigned visited_of_any(int word) const {
    unsigned bits = 0;
#pragma unroll
    for (int part = 0; part < Parts; ++part) bits |= visited[part * words + word];
    return bits;
  }

 private:
  __device__ bool bit(const unsigned* of, int part, int block) const {
    return of[part * words + block / 32] >> block % 32 & 1;
  }
};
