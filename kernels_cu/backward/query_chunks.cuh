// Chunks of queries: several CTAs divide the query heads of a KV tile, or the query tiles of each
// head, and dk and dv of the tile are sums over these CTAs. They add in the order of the chunks, so
// that results are bitwise equal if a call is repeated:
//
//   first chunk   stores its sums                                     releases the semaphore
//   next chunks   wait for the semaphore, load the sums, add, store   release the semaphore
//   last chunk    waits, loads the sums, adds, and writes dk and dv
//
// A CTA waits only for CTAs of smaller blockIdx (tile_coord.cuh), as for dq (dq/semaphore.cuh).
#pragma once

#include "backward/dq/semaphore.cuh"
#include "backward/packed_tiles.cuh"
#include "backward/tile_coord.cuh"
#include "score/mask.cuh"

// Returns the number of query heads of a chunk, and the first one.
template <class Config>
__device__ int heads_of_chunk(const GradientParams& p) {
  return p.heads_q / (Config::splits_queries ? p.heads_kv * p.head_chunks : p.heads_kv);
}
template <class Config>
__device__ int first_head_of_chunk(const GradientParams& p, const GradientTileCoord& coord) {
  const int group = p.heads_q / p.heads_kv;
  if constexpr (!Config::splits_queries) return coord.head * group;
  return coord.head * group + coord.head_chunk * heads_of_chunk<Config>(p);
}

// Range of query tiles.
struct ChunkTiles {
  int begin;
  int end;
};

// Returns the query tiles of a chunk among [begin, end), those that attend to the CTA's KV tile. The
// first chunk has the query tiles that CTAs process first: the last ones if `FromLast`.
//
// In the dq order of a query tile, a CTA's predecessor has a KV tile whose range begins and ends
// later (or earlier, if `FromLast`). It thus reaches the query tile in the same chunk or in an
// earlier one, whose CTAs have smaller blockIdx.
template <class Config, bool FromLast>
__device__ ChunkTiles tiles_of_chunk(const GradientParams& p, const GradientTileCoord& coord,
                                     int begin, int end) {
  if constexpr (!Config::splits_queries) return {begin, end};
  // 64 bits, because the product of the numbers of tiles and of chunks may exceed 32.
  const auto before = [&](int chunk) {
    return int(int64(end - begin) * chunk / p.tile_chunks);
  };
  const int first = before(coord.tile_chunk), next = before(coord.tile_chunk + 1);
  if (FromLast) return {end - next, end - first};
  return {begin + first, begin + next};
}

#if __CUDA_ARCH__ >= 800

// Adds the dk and dv of `threads` threads to those of the earlier chunks. A CTA has `parties` groups
// of that many threads, which add independently of one another, each in the layout of its registers.
template <class Config, int parties, int threads>
struct QueryChunkSums {
  const GradientParams& p;
  const GradientTileCoord& coord;
  const Sequence& sequence;

  // Returns whether the CTA processes the last chunk. The registers then have the sums of all chunks.
  // `sync` synchronizes the group. `for_each(function)` calls the function with a reference to each
  // four registers of a thread and their index; `fours` is the number of these calls.
  template <int fours, class Sync, class ForEach>
  __device__ bool merge(int party, Sync sync, ForEach for_each) const {
    const int chunks = p.head_chunks * p.tile_chunks;
    const int chunk = coord.head_chunk * p.tile_chunks + coord.tile_chunk;
    const bool is_first = chunk == 0, is_last = chunk == chunks - 1;
    if (chunks == 1) return true;
    const int slot = parties * tile_slot() + party;
    int* const semaphore = static_cast<int*>(p.kv_sums) + slot;
    float* const sums = static_cast<float*>(p.kv_sums) + p.kv_semaphores +
                        (int64(slot) * fours * threads + threadIdx.x % threads) * 4;
    if (!is_first) {
      if (threadIdx.x % threads == 0) semaphore_wait(semaphore, chunk, -1);
      sync();
    }
    for_each([&](float(&four)[4], int index) {
      float* const place = sums + int64(index) * threads * 4;
      if (!is_first) {
        float before[4];
        ptx::ld_global_cg_v4(before, place);
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] += before[c];
      }
      if (!is_last) ptx::st_global_v4(place, four);
    });
    if (is_last) return true;
    sync();
    if (threadIdx.x % threads == 0) semaphore_release(semaphore);
    return false;
  }

 private:
  __device__ int tile_slot() const {
    const int tile = coord.begin / Config::Bc;
    if (Config::has_seqlens && p.cu_seqlens_k != nullptr) {
      return coord.head * count_tile_slots<Config::Bc>(p.total_k, p.batch) +
             first_tile_slot<Config::Bc>(sequence.k_first, coord.batch) + tile;
    }
    return (coord.batch * p.heads_kv + coord.head) * ceil_div(p.seqlen_k, Config::Bc) + tile;
  }
};

#endif  // __CUDA_ARCH__ >= 800
