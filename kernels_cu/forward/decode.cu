// Fused attention forward for few query rows and many keys, as in decoding: float16 and bfloat16 on
// sm_80 and newer. The kernel is bound by memory bandwidth, and reads the KV cache once.
//
// The query heads of a KV head are rows of one query tile, so that each key is read once for all of
// them. Each CTA has a work range, i.e. a range of the keys (scheduler/kv_partition.cuh), which its
// warps divide. All warps hold the same query rows. Each warp streams KV tiles of Bc keys through a
// ring of its own and ends with a partial result, independently of other warps (Flash-Decoding, Dao
// et al. 2023). The CTA merges the partial results of its warps. In a cluster, one CTA receives and
// merges the results of all CTAs, or each CTA receives and merges one slice of the columns. Results
// of several clusters, or of CTAs without clusters, are merged as a tree through global memory: the
// last CTA of a merge group to arrive merges the group.
//
// If a head is too wide for one warp's registers, several warps process the same keys, each with a
// slice of the columns (decode/column_warps.cuh). In MLA (DeepSeek-V2, 2024), V is a prefix of K's
// columns, so a KV tile is read once and multiplied twice.
//
// An 8-bit KV cache is copied to shared memory unconverted. Each warp converts it to 16-bit numbers
// in registers, which is exact, and applies the scales to S and P (decode/scales.cuh).
#pragma once

#include "forward/decode/cta.cuh"
#include "forward/decode/cluster.cuh"
#include "forward/decode/merge.cuh"
#include "forward/decode/warp.cuh"
#include "scheduler/unowned_rows.cuh"
#include "params.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
__device__ void decode_forward(const typename CacheOf<Config>::Arguments& params) {
  constexpr bool in_cluster = DecodeCta<Config>::in_cluster;
  DecodeWarp<Config> warp(params);
  const DecodeCta<Config>& cta = warp;
  const DecodeMerge<Config> merge(cta);
  DecodeCluster<Config> cluster{cta};
  if constexpr (in_cluster) cluster.init_receive_barrier();
  if constexpr (Config::page_size > 0) cta.prefetch_table();
  // Packed queries are never `balanced`. The last warp clears output rows that belong to no
  // sequence, since it is idle while warp 0 computes the work range of the CTA.
  if constexpr (Config::has_seqlens && !Config::balanced) {
    if (cta.warp == Config::warps - 1) {
      UnownedRows<Config>{params}.clear_all(blockIdx.x, gridDim.x);
    }
  }
  cta.init_work_range();
  while (cta.state.has_tile) {
    warp.attend([&] {
      if (threadIdx.x != 0) return;
      cta.set_merge_info();
      merge.memory.prefetch_counter();
      if constexpr (in_cluster) cluster.expect_results();
    });
    cluster.sync_cluster();
    warp.write_result();
    __syncthreads();
    merge.merge_warps();
    // All warps must finish merging before the rings and `state` are overwritten.
    __syncthreads();
    if (!cta.state.has_next) break;
    cta.next_tile();
  }
  cluster.sync_cluster();
  if (in_cluster && cluster.merges_here()) merge.merge_received();
}

#endif  // __CUDA_ARCH__ >= 800
