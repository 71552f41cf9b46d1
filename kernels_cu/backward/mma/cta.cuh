// CTA of the `mma` gradient kernel: its KV tile, the query tiles that it iterates over, how its
// warps divide the work, the layout of shared memory, and the loads.
#pragma once

#include "backward/preprocess/clean.cuh"
#include "backward/preprocess/preswizzle.cuh"
#include "backward/mma/operands.cuh"
#include "backward/listed_tiles.cuh"
#include "backward/params.cuh"
#include "backward/preprocess/float32_fp16x2.cuh"
#include "backward/preprocess/preprocess.cuh"
#include "backward/query_chunks.cuh"
#include "backward/softmax_backward.cuh"
#include "backward/tile_coord.cuh"
#include "ptx/base.cuh"
#include "ptx/cta_mbarrier.cuh"
#include "score/mask.cuh"
#include "tile/copy.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MmaGradientCta {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using Component = typename Components<Element>::type;  // element type in shared memory
  static constexpr int components = Components<Element>::count;
  static constexpr bool has_components = components > 1;
  static constexpr bool wants_q = Config::wants_q;
  static constexpr bool wants_k = Config::wants_k;
  static constexpr bool wants_v = Config::wants_v;
  static constexpr bool wants_ds = wants_q || wants_k;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int stages = Config::stages;
  static constexpr int warps = Config::warps;
  static constexpr int threads = 32 * warps;
  static constexpr int key_warps = Config::key_warps;
  static constexpr int query_warps = warps / key_warps;
  static_assert(key_warps * query_warps == warps, "all warps process equally large parts");

  // Number of keys of a warp, and of queries whose scores it computes at once (`columns`).
  static constexpr int warp_keys = Bc / key_warps;
  static constexpr int row_tiles = warp_keys / 16;
  static constexpr int columns = Config::columns;
  static constexpr int passes = Br / (columns * query_warps);
  static_assert(warp_keys * key_warps == Bc && row_tiles * 16 == warp_keys, "whole fragments");
  static_assert(passes * columns * query_warps == Br, "whole passes");

  // Whether all left operands of dv and dk pass through shared memory. An operand has at least 16
  // queries. If a warp computes the scores of eight queries, an operand consists of the scores of
  // two warps.
  static constexpr bool shares_operands = columns == 8;
  static constexpr int operand_columns = shares_operands ? 16 : columns;
  static constexpr int steps = operand_columns / 16;
  static_assert(steps * 16 == operand_columns && Br % operand_columns == 0, "whole operands");

  // A dq tile is divided among the warps by rows and by columns.
  static constexpr int dq_row_warps = Config::dq_row_warps;
  static constexpr int dq_column_warps = warps / dq_row_warps;
  static constexpr int dq_row_tiles = Br / 16 / dq_row_warps;
  static constexpr int dq_steps = Config::dq_steps;  // number of 16-column steps summed at once

  static constexpr int dim = Config::padded_dim;
  static constexpr int dim_v = Config::padded_dim_v;

  // Whether warps with the same keys work in pairs: one warp computes S and the other dP for the
  // queries of both, and they exchange halves. One large product reads less than two small ones.
  // A warp reads at least 16 queries at once, so warps that keep eight queries are always paired.
  static constexpr bool paired = Config::paired && (wants_ds || shares_operands);
  static_assert(!paired || query_warps % 2 == 0, "query warps work in pairs");
  static_assert(paired || !shares_operands, "warps that keep eight queries work in pairs");

  // Whether a warp divides the P, or the dS, that it computes at once by a second unit, chosen from
  // their maximum (`choose_unit()`). Sinks may make P and dS far smaller than the bounds that the
  // first units follow from, and slopes of scores have no bound.
  static constexpr bool refines_p = has_components && wants_v && Config::sinks;
  static constexpr bool refines_ds =
      has_components && wants_ds && (Config::sinks || changes_slope<typename Config::Mods>());
  static constexpr int units_per_operand = key_warps * (Br / columns);

  using Scores = float[row_tiles][columns / 8][4];
  using Layout = SwizzledRows<Component, components * dim>;     // of q and k
  using LayoutV = SwizzledRows<Component, components * dim_v>;  // of v and dout
  using Pairs = Exchange<Component, components * Br>;           // of P^T and dS^T: keys by queries
  using Columns = ColumnSlice<Component, Layout, dim, query_warps>;
  using ColumnsV = ColumnSlice<Component, LayoutV, dim_v, query_warps>;
  using DqColumns = ColumnSlice<Component, Layout, dim, dq_column_warps>;
  using Fragments = DqFragments<Br, dim, dq_row_warps, dq_column_warps>;

  // Whether some queries may attend to only some of their sequence's keys.
  static constexpr bool is_bounded = Config::causal || Config::modified;

  // Shared memory: k and v; dS^T; P^T if several warps have the same keys; stages of q, dout and
  // row statistics; with eight warps, an mbarrier. For float32, k and v, and each stage, are
  // preswizzled tiles with scales at the end, and second units follow the scales of k and v.
  using Stats = RowStats<float>;
  using Preswizzled = PreswizzledTiles<Config>;
  static constexpr int scales_bytes =
      has_components ? Preswizzled::KvTile::bytes - Preswizzled::KvTile::scales_offset : 0;
  static constexpr int row_bytes = Layout::row_bytes + LayoutV::row_bytes;
  static constexpr int keys_bytes = Bc * row_bytes + scales_bytes;
  static constexpr int units_offset = Preswizzled::KvTile::scales_offset + int(sizeof(KeyScales));
  static_assert(units_offset + (refines_p + refines_ds) * units_per_operand * int(sizeof(float)) <=
                    Preswizzled::KvTile::bytes,
                "scale factors fit the preswizzled tile");
  static constexpr int pairs_bytes = Bc * Pairs::Layout::row_bytes;
  static constexpr bool exchanges_p = query_warps > 1 && wants_v;
  static constexpr bool exchanges_ds = wants_q || (query_warps > 1 && wants_k);
  static constexpr int stage_bytes = Br * (row_bytes + int(sizeof(Stats))) + scales_bytes;
  static constexpr int stages_offset = keys_bytes + (1 + (query_warps > 1)) * pairs_bytes;
  static constexpr int barrier_offset = stages_offset + stages * stage_bytes;
  // Whether the CTA probably has an SM for itself. Its warps must then overlap what they compute
  // with each other's products. Otherwise, another CTA multiplies meanwhile.
  static constexpr bool is_alone = warps == 8;
  static_assert(barrier_offset % 8 == 0 &&
                    barrier_offset + (is_alone ? 16 : 0) == Config::shared_memory,
                "as the host planned");
  // Whether thread 0 operates the semaphore of a dq tile while the other warps multiply. It arrives
  // at an mbarrier when the CTA may add. Otherwise, all threads wait for thread 0 at a CTA barrier.
  static constexpr bool overlaps_semaphore = wants_q && is_alone;

  template <int Rows, int Dim, class TileLayout>
  using Copy = RowCopy<TileLayout, Element, Rows, Dim, threads, Config::alignment>;

  const GradientParams& p;
  const GradientTileCoord coord;
  const Sequence sequence;
  const Mask<Config> mask;
  unsigned char* const memory;
  const unsigned shared;
  const float scale_log2;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const QueryTileRange tiles;
  int full_end;

  __device__ QueryTileRange tiles_of(QueryTileRange range) const {
    const ChunkTiles tiles = tiles_of_chunk<Config>(coord, range.begin, range.end, true);
    range.begin = tiles.begin;
    range.end = tiles.end;
    return range;
  }

  __device__ MmaGradientCta(const GradientParams& p, const GradientTileCoord& coord,
                            const Sequence& sequence, unsigned char* memory)
      : p(p),
        coord(coord),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        memory(memory),
        shared(ptx::shared_address(memory)),
        scale_log2(signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e),
        tiles(tiles_of(query_tile_range<Br>(
            mask, coord.begin, min(coord.begin + Bc, sequence.seqlen_k), sequence.seqlen_q))),
        full_end(tiles.full_end) {
    // Modifications must not be evaluated for missing rows, so a partial last tile needs the mask.
    if (Config::modified && sequence.seqlen_q % Br != 0) {
      full_end = min(full_end, sequence.seqlen_q / Br);
    }
  }

  __device__ int key_warp() const { return warp / query_warps; }
  __device__ int query_warp() const { return warp % query_warps; }

  // ---- Sequence of query tiles. With `Config::block_mask`, `ListedCta` replaces these functions.

  // A step processes one query tile of one head.
  struct Step {
    int head;
    int tile;
  };
  __device__ bool has_steps() const { return tiles.begin < tiles.end; }
  __device__ Step first_step() const {
    return {first_head_of_chunk<Config>(p, coord), tiles.end - 1};
  }
  __device__ bool is_last(const Step& step) const {
    if (step.tile != tiles.begin) return false;
    // A comparison of products instead of a quotient: this runs in every step.
    const unsigned chunks = Config::splits_queries ? p.head_chunks : 1;
    const unsigned chunk = coord.head * chunks + (Config::splits_queries ? coord.head_chunk : 0);
    return (step.head + 1u) * p.heads_kv * chunks == (chunk + 1) * p.heads_q;
  }
  __device__ Step next_step(const Step& step) const {
    if (step.tile > tiles.begin) return {step.head, step.tile - 1};
    return {step.head + 1, tiles.end - 1};
  }

  // Returns the CTA's index in the dq order of a step's query tile, which starts at the first key
  // that the query tile attends to.
  __device__ int order_index(const Step& step) const {
    return coord.begin / Bc - (Config::window_left ? mask.visible_begin(step.tile * Br) / Bc : 0);
  }

  // Returns whether a step needs the mask. The mask is also needed past the last key. Missing keys
  // are zeros, so their scores are 0, and their P may be infinite. Infinity times 0 would make dq
  // NaN.
  __device__ bool is_masked(const Step& step) const {
    return coord.begin + Bc > sequence.seqlen_k ||
           (is_bounded && (step.tile < tiles.full_begin || step.tile >= full_end));
  }

  // ---- Addresses.

  // Return the address of a head's first row of q or dout, and of the tile's first row of k or v.
  __device__ const Element* queries(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(sequence.q_batch, head) +
           sequence.q_first * tensor.row_stride;
  }
  __device__ const Element* keys(const Tensor& tensor) const {
    return tensor.head<const Element>(sequence.k_batch, coord.head) +
           (int64(sequence.k_first) + coord.begin) * tensor.row_stride;
  }

  __device__ unsigned keys_address() const { return shared; }
  __device__ unsigned values_address() const { return shared + Bc * Layout::row_bytes; }
  __device__ unsigned ds_address() const { return shared + keys_bytes; }
  __device__ unsigned p_address() const { return ds_address() + pairs_bytes; }
  __device__ unsigned queries_address(int stage) const {
    return shared + stages_offset + stage * stage_bytes;
  }
  __device__ unsigned dout_address(int stage) const {
    return queries_address(stage) + Br * Layout::row_bytes;
  }
  __device__ unsigned stats_address(int stage) const {
    return queries_address(stage) + Br * row_bytes;
  }
  // Returns the address of the mbarrier of `overlaps_semaphore`. Each query tile is a phase.
  __device__ unsigned semaphore_held() const { return shared + barrier_offset; }

  // ---- Loads.

  template <int Rows, int Dim, class TileLayout>
  __device__ static void start(unsigned target, const Element* source, const Tensor& tensor,
                               int left) {
    using TileCopy = Copy<Rows, Dim, TileLayout>;
    TileCopy::template start<true>(target, TileCopy::source(source, tensor.row_stride),
                                   tensor.row_stride, left);
  }

  template <class Tile>
  __device__ static void start_tile(unsigned target, const char* source) {
#pragma unroll
    for (int first = 0; first < Tile::bytes; first += 16 * threads) {
      const int offset = first + 16 * int(threadIdx.x);
      if (first + 16 * threads > Tile::bytes && offset >= Tile::bytes) break;
      ptx::cp_async<16>(target + offset, source + offset, 16);
    }
  }

  __device__ void load_keys() {
    if constexpr (has_components) {
      start_tile<typename Preswizzled::KvTile>(
          keys_address(),
          Preswizzled::kv_tile_address(p, sequence, coord.batch, coord.head, coord.begin / Bc));
    } else {
      const int left = sequence.seqlen_k - coord.begin;
      start<Bc, Config::head_dim, Layout>(keys_address(), keys(p.k), p.k, left);
      if constexpr (wants_ds) {
        start<Bc, Config::head_dim_v, LayoutV>(values_address(), keys(p.v), p.v, left);
      }
    }
  }

  // Waits for the loads of k, v and the first query tile, and cleans k. All threads must pass a
  // barrier before they read k.
  __device__ void clean_keys() {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    for (int offset = 16 * int(threadIdx.x); offset < Bc * Layout::row_bytes;
         offset += 16 * threads) {
      clean_chunk<Element>(keys_address() + offset);
    }
  }

  // Clears the rows of q and dout in a stage for which `clears_q()` and `clears_dout()` are true.
  __device__ void clean_queries(int stage) {
    const auto* stats = reinterpret_cast<const Stats*>(memory + (stats_address(stage) - shared));
    bool any_cleared = false;
    for (int row = threadIdx.x; row < Br; row += threads) any_cleared |= clears_q(stats[row]);
    if (!__syncthreads_or(any_cleared)) return;
    // The rows of dout follow those of q.
    constexpr unsigned zeros[4] = {};
    for (int offset = 16 * int(threadIdx.x); offset < Br * row_bytes; offset += 16 * threads) {
      constexpr int q_bytes = Br * Layout::row_bytes;
      const bool clears = offset < q_bytes
                              ? clears_q(stats[offset / Layout::row_bytes])
                              : clears_dout(stats[(offset - q_bytes) / LayoutV::row_bytes]);
      if (clears) ptx::st_shared_v4(queries_address(stage) + offset, zeros);
    }
    __syncthreads();
  }

  // Whether half of the warps load q of the next tile before their first product, and the others
  // load dout after theirs. Of the two warps of a scheduler, one then multiplies while the other
  // computes addresses.
  static constexpr bool staggers_loads = is_alone && stages > 1 && !has_components;
  __device__ bool loads_early() const { return warp < warps / 2; }

  // Starts all loads of a query tile.
  __device__ void load(int stage, int head, int tile) {
    if constexpr (has_components) {
      start_tile<typename Preswizzled::QueryTile>(
          queries_address(stage),
          Preswizzled::query_tile_address(p, sequence, coord.batch, head, tile));
    } else {
      load_q<threads>(stage, head, tile, threadIdx.x);
      load_dout<threads>(stage, head, tile, threadIdx.x);
    }
    ptx::cp_async_commit_group();
  }
  // Start the loads of half of the warps if `staggers_loads`.
  __device__ void load_early(int stage, int head, int tile) {
    load_q<threads / 2>(stage, head, tile, threadIdx.x);
    ptx::cp_async_commit_group();
  }
  __device__ void load_late(int stage, int head, int tile) {
    load_dout<threads / 2>(stage, head, tile, threadIdx.x - threads / 2);
    ptx::cp_async_commit_group();
  }

 private:
  template <int Threads>
  __device__ void load_q(int stage, int head, int tile, unsigned thread) {
    start_rows<Threads, Config::head_dim, Layout>(queries_address(stage), p.q, head, tile, thread);
  }
  // Starts the loads of dout and of the row statistics.
  template <int Threads>
  __device__ void load_dout(int stage, int head, int tile, unsigned thread) {
    start_rows<Threads, Config::head_dim_v, LayoutV>(dout_address(stage), p.dout, head, tile,
                                                     thread);
    const int first = tile * Br;
    const int left = sequence.seqlen_q - first;
    const Stats* stats = row_stats<Config>(p) + lse_index<Config>(p, sequence, head, first);
#pragma unroll
    for (int first_row = 0; first_row < Br; first_row += Threads) {
      const int i = first_row + int(thread);
      if (Br % Threads != 0 && i >= Br) break;
      ptx::cp_async<sizeof(Stats)>(stats_address(stage) + i * int(sizeof(Stats)),
                                   stats + (i < left ? i : 0), i < left ? sizeof(Stats) : 0);
    }
  }
  template <int Threads, int Dim, class TileLayout>
  __device__ void start_rows(unsigned target, const Tensor& tensor, int head, int tile,
                             unsigned thread) {
    using TileCopy = RowCopy<TileLayout, Element, Br, Dim, Threads, Config::alignment>;
    const Element* source = queries(tensor, head) + tile * Br * tensor.row_stride;
    TileCopy::template start<true>(target, TileCopy::source(source, tensor.row_stride, thread),
                                   tensor.row_stride, sequence.seqlen_q - tile * Br, thread);
  }
};

template <class Config>
using MmaCta = typename CtaWithSteps<Config, MmaGradientCta<Config>>::type;

#endif  // __CUDA_ARCH__ >= 800
