// Chunks of queries: several CTAs have the same KV tile, and each processes a chunk of its queries.
// A chunk is a part of the query heads of the KV head, a part of the query tiles of each head, or
// both. dk and dv of the KV tile are sums over the chunks. The CTAs add them in the order of the
// chunks, so that results are bitwise equal if a call is repeated. The sums are in the workspace,
// and each KV tile has a semaphore that counts the chunks that have been added:
//
//   chunk 0             chunk 1                        last chunk
//   -----------------   ----------------------------   -----------------------------
//   stores its sums
//   releases  ------->  acquires
//                       loads the sums, adds, stores
//                       releases  ------------------>  acquires
//                                                      loads the sums, adds
//                                                      writes dk and dv
//
// A CTA waits only for CTAs of smaller blockIdx (tile_coord.cuh), as for dq (dq/semaphore.cuh).
#pragma once

#include "backward/dq/semaphore.cuh"
#include "scheduler/packed_tiles.cuh"
#include "backward/tile_coord.cuh"
#include "score/mask.cuh"

// Return the number of query heads of a chunk, and the index of the first of them.
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

// Range [begin, end) of query tiles.
struct ChunkTiles {
  int begin;
  int end;
};

// Returns the query tiles of a chunk. The query tiles [begin, end) attend to the CTA's KV tile, and
// the chunks divide them. Chunk 0 has the query tiles that are processed first: the last ones if
// `from_last`, otherwise the first ones.
//
// This division does not make CTAs wait for CTAs of larger blockIdx. In the dq order of a query
// tile, the predecessor of a CTA has another KV tile, whose range of query tiles begins and ends
// later (or earlier, if `from_last`). The query tile is therefore in the same chunk of that range,
// or in an earlier one, and CTAs of earlier chunks have smaller blockIdx.
template <class Config>
__device__ ChunkTiles tiles_of_chunk(const GradientTileCoord& coord, int begin, int end,
                                     bool from_last) {
  if constexpr (!Config::splits_queries) return {begin, end};
  // The product of the numbers of tiles and of chunks may exceed 32 bits.
  const auto before = [&](int chunk) {
    return int(int64(end - begin) * chunk / coord.tile_chunks);
  };
  const int first = before(coord.tile_chunk), next = before(coord.tile_chunk + 1);
  if (from_last) return {end - next, end - first};
  return {begin + first, begin + next};
}

#if __CUDA_ARCH__ >= 800

// Adds dk and dv of a chunk to those of the earlier chunks. A CTA has `parties` groups of `threads`
// threads. Each group has a semaphore of its own and adds independently of the other groups. The
// sums are stored in the order of the threads' registers.
template <class Config, int parties, int threads>
struct QueryChunkSums {
  const GradientParams& p;
  const GradientTileCoord& coord;
  const Sequence& sequence;

  // Adds the sums of the earlier chunks to the registers of the group of index `party`. Returns
  // whether the CTA processes the last chunk: the registers then hold the sums of all chunks, and
  // the caller writes dk and dv. `sync` synchronizes the group. `for_each(function)` calls the
  // function `fours` times, with a reference to four registers of the thread and the index of the
  // call.
  template <int fours, class Sync, class ForEach>
  __device__ bool merge(int party, Sync sync, ForEach for_each) const {
    const int chunks = p.head_chunks * coord.tile_chunks;
    const int chunk = coord.tile_chunk * p.head_chunks + coord.head_chunk;
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
  // Returns the index of the KV tile among those whose queries are divided.
  __device__ int tile_slot() const {
    const int tile = coord.begin / Config::Bc;
    if constexpr (Config::packed) {
      return coord.head * count_tile_slots<Config::Bc>(p.total_k, p.batch) +
             first_tile_slot<Config::Bc>(sequence.k_first, coord.batch) + tile;
    }
    const int head = coord.batch * p.heads_kv + coord.head;
    // Without chunks of heads, the KV tiles before the last section are not divided.
    const int whole_tiles = p.head_chunks == 1 ? p.last_section : 0;
    return head * ceil_div(p.seqlen_k, Config::Bc) + tile - whole_tiles;
  }
};

#endif  // __CUDA_ARCH__ >= 800
