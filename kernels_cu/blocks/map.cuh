// Which blocks of the score matrix a mask leaves something of, as `block_map.cu` found them and
// kernels read them. cupy_flash/gpu/block_maps.py lays the same struct out.
#pragma once

using int64 = long long;

// Of a row tile, Br rows of a sequence, and a key block, Bc keys: the k-th bit of a row tile's
// words is that of key block k.
struct BlockMap {
  unsigned* visited;   // (batches, heads, row tiles, words): blocks with a pair that is seen
  unsigned* full;      // alike: those of which the mask hides no pair; the band's edge may cut them
  int* counts;         // (batches, heads, row tiles): blocks that are visited
  int64 batch_stride;  // in row tiles; 0 where all share one map
  int64 head_stride;
  int words;  // of a row tile
  int key_blocks;

  __device__ int64 row_tile(int batch, int head, int tile) const {
    return batch * batch_stride + head * head_stride + tile;
  }
};

// The blocks of one row tile.
struct MappedBlocks {
  const unsigned* visited;
  const unsigned* full;
  int count;

  __device__ MappedBlocks(const BlockMap& map, int batch, int head, int tile) {
    const int64 at = map.row_tile(batch, head, tile);
    visited = map.visited + at * map.words;
    full = map.full + at * map.words;
    count = map.counts[at];
  }

  __device__ bool is_visited(int block) const { return visited[block / 32] >> block % 32 & 1; }
  __device__ bool is_full(int block) const { return full[block / 32] >> block % 32 & 1; }

  // The first one visited from `begin` on; `end` if there is none before.
  __device__ int first_from(int begin, int end) const {
    if (begin >= end) return end;
    int word = begin / 32;
    unsigned bits = visited[word] & (0xffffffffu << begin % 32);
    while (bits == 0) {
      if (++word * 32 >= end) return end;
      bits = visited[word];
    }
    return min(end, word * 32 + __ffs(bits) - 1);
  }

  // The last one visited before `end`, or -1; blocks are taken from the last to the first.
  __device__ int last_before(int end) const {
    int word = (end - 1) >> 5;
    if (end <= 0) return -1;
    // Its bits up to that of end - 1.
    unsigned bits = visited[word] & (0xffffffffu >> (31 - (end - 1) % 32));
    while (bits == 0) {
      if (--word < 0) return -1;
      bits = visited[word];
    }
    return word * 32 + 31 - __clz(bits);
  }
};
