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

// A row tile, Br rows of a sequence, consists of parts; a key block is Bc keys. The k-th bit of a
// part's words is that of key block k.
struct BlockMap {
  unsigned* visited;   // (batches, heads, row tiles, parts, words): blocks with a pair that is seen
  unsigned* full;      // alike: those of which the mask hides no pair; the band's edge may cut them
  MappedTile* tiles;   // (batches, heads, row tiles): those that visit most blocks first
  int64 batch_stride;  // in row tiles; 0 where all share one map
  int64 head_stride;
  int words;  // of a part
  int key_blocks;

  __device__ int64 row_tile(int batch, int head, int tile) const {
    return batch * batch_stride + head * head_stride + tile;
  }

  // The tile of a head that comes so many places behind its largest.
  __device__ MappedTile tile_at(int batch, int head, int place) const {
    return tiles[row_tile(batch, head, place)];
  }
};

// The blocks of one row tile.
template <int Parts>
struct MappedBlocks {
  const unsigned* visited;
  const unsigned* full;
  int words;

  __device__ MappedBlocks(const BlockMap& map, int batch, int head, int tile) : words(map.words) {
    const int64 at = map.row_tile(batch, head, tile) * Parts * words;
    visited = map.visited + at;
    full = map.full + at;
  }

  // The parts, a bit each, that visit a block, and for which it is full.
  __device__ unsigned visited_by(int block) const { return parts_of(visited, block); }
  __device__ unsigned full_for(int block) const { return parts_of(full, block); }

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

 private:
  __device__ unsigned visited_of_any(int word) const {
    unsigned bits = 0;
#pragma unroll
    for (int part = 0; part < Parts; ++part) bits |= visited[part * words + word];
    return bits;
  }

  __device__ unsigned parts_of(const unsigned* of, int block) const {
    unsigned bits = 0;
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      bits |= (of[part * words + block / 32] >> block % 32 & 1) << part;
    }
    return bits;
  }
};
