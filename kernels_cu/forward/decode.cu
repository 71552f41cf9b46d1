// Fused attention forward for few query rows and many keys, as in token generation: float16 and
// bfloat16 on sm_80 and newer. It reads memory once and does little else.
//
// The query heads that share a key/value head are rows of one tile, or of few, so each key is read
// once for all of a tile's. The keys are shared out over thread blocks (shares.cuh), and a block's
// over its warps, which all hold the same rows: each warp streams tiles of Bc keys through a ring
// of its own, waits for nobody, and has a partial result at the end (Flash-Decoding, Dao et al.
// 2023). The block merges those of its warps. In a cluster of blocks the first merges what the
// others send to its shared memory, or each of them a piece of the columns. What several clusters,
// or blocks without one, have of the same rows they leave in device memory; of each few neighbours
// the last to arrive merges theirs, then goes on with what other such groups have, up to the whole.
//
// Heads of more columns than a warp has registers for belong to teams of warps, each of which has
// the columns' parts of the same keys (decode/team.cuh). Where the values are columns of their keys
// (multi-head latent attention, DeepSeek-V2, 2024) a tile is read once and multiplied twice.
//
// A cache of 8 bits is read as it is: each warp makes 16-bit numbers of it in registers, which hold
// all of them exactly, and multiplies scores and probabilities by the scales (decode/scales.cuh).
#pragma once

#include "forward/decode/block.cuh"
#include "forward/decode/cluster.cuh"
#include "forward/decode/merge.cuh"
#include "forward/decode/warp.cuh"
#include "grid/unowned_rows.cuh"
#include "params.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
__device__ void decode_forward(const typename CacheOf<Config>::Arguments& params) {
  constexpr bool in_cluster = DecodeBlock<Config>::in_cluster;
  DecodeWarp<Config> warp(params);
  const DecodeBlock<Config>& block = warp;
  const DecodeMerge<Config> merge(block);
  DecodeCluster<Config> cluster{block};
  if constexpr (in_cluster) cluster.announce();
  if constexpr (Config::page_size > 0) block.prefetch_table();
  // Packed queries have fixed splits. The last warp clears the rows, as it is idle while the first
  // one finds the work range of the block.
  if constexpr (Config::sequences && !Config::balanced) {
    if (block.warp == Config::warps - 1) {
      UnownedRows<Config>{params}.clear_all(blockIdx.x, gridDim.x);
    }
  }
  block.take_share();
  while (block.state.has_part) {
    warp.attend([&] {
      if (threadIdx.x != 0) return;
      block.find_others();
      merge.memory.prefetch_counter();
      if constexpr (in_cluster) cluster.expect_sent();
    });
    cluster.meet();
    warp.leave_result();
    __syncthreads();
    merge.merge_warps();
    // Before the rings and the state are used again.
    __syncthreads();
    if (!block.state.goes_on) break;
    block.find_next_part();
  }
  cluster.meet();
  if (in_cluster && cluster.is_merged_here()) merge.merge_sent();
}

#endif  // __CUDA_ARCH__ >= 800
