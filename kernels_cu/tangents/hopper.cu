// Tangents of attention on Hopper (sm_90a) for dense float16 and bfloat16. The forward pass has
// computed `out` and `lse`.
//
// A CTA holds Br query rows, 64 for each consumer warpgroup, and iterates over the KV tiles of Bc
// keys, from the last to the first. A dot marks a tangent:
//
//   S = Q K^T,  S. = Q. K^T + Q K.^T,  P and H from these (row.cuh),  O. += H V + P V.
//
// One thread of the producer warpgroup loads K, V and their tangents of a tile into one stage.
// While a consumer computes P and H, the tensor cores compute the products of the others:
//
//   consumer 0      S0 S.0         P H        O.0 S1 S.1         P H
//   consumer 1              S0 S.0       P H              O.0 S1 S.1
//
// As much of Q is in registers as there is space for: the tensor cores need the whole bandwidth of
// shared memory if both operands of S and S. are there. P and H never leave the registers.
#pragma once

#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_coord.cuh"
#include "tangents/fragments.cuh"
#include "tile/fragments.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"
#include "tile/tma_tile.cuh"

#if __CUDA_ARCH__ == 900

struct TangentMaps {
  TensorMap q, k, v;
  TensorMap q_tangent, k_tangent, v_tangent;
};

template <class Config>
struct HopperTangents {
  using Element = typename Config::Element;
  using Fragments = TangentFragments<Config, 1>;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int stages = Config::stages;
  static constexpr int consumers = Br / 64;
  static_assert(Br % 64 == 0 && Bc % 16 == 0, "whole wgmma instructions");

  // Whether q, k and v have tangents. If q and k have none, the scores have none, and H is 0.
  static constexpr bool moves_q = Config::moves_q;
  static constexpr bool moves_k = Config::moves_k;
  static constexpr bool moves_v = Config::moves_v;
  static constexpr bool moves_scores = moves_q || moves_k;

  using QueryTile = TmaTile<Br, Config::head_dim>;
  using KeyTile = TmaTile<Bc, Config::head_dim>;
  using ValueTile = TmaTile<Bc, Config::head_dim_v>;
  static constexpr int k_steps = (Config::head_dim + 15) / 16;
  static constexpr int kept_steps = Config::q_steps;  // 16-column steps of Q kept in registers
  static constexpr int columns_v = Fragments::columns_v;
  using Queries = unsigned[kept_steps ? 4 * kept_steps : 1];
  static_assert(kept_steps <= k_steps, "steps of 16 columns");

  // Shared memory: q and its tangent, stages of k, v and their tangents, barriers, and a word.
  static constexpr int ring_offset = (1 + moves_q) * QueryTile::bytes;
  static constexpr int k_tangent_offset = KeyTile::bytes;
  static constexpr int v_offset = k_tangent_offset + moves_k * KeyTile::bytes;
  static constexpr int v_tangent_offset = v_offset + moves_scores * ValueTile::bytes;
  static constexpr int stage_bytes = v_tangent_offset + moves_v * ValueTile::bytes;
  static constexpr int barrier_offset = ring_offset + stages * stage_bytes;
  static constexpr int restart_offset = barrier_offset + (2 * stages + 2) * 8;
  static_assert(restart_offset + 8 == Config::shared_memory, "as the host planned");

  const TangentParams& p;
  const TangentMaps& maps;
  const TileCoord coord;
  const unsigned shared;
  PipelineState<stages> ring = {};

  // The phase of full(stage) ends when the stage has been loaded, that of empty(stage) when all
  // consumer warps have used it, that of decided() when all of them have summed their rows.
  __device__ unsigned full(int stage) const { return shared + barrier_offset + 8 * stage; }
  __device__ unsigned empty(int stage) const { return full(stages + stage); }
  __device__ unsigned q_full() const { return full(2 * stages); }
  __device__ unsigned decided() const { return full(2 * stages + 1); }
  __device__ unsigned stage_address(int stage) const {
    return shared + ring_offset + stage * stage_bytes;
  }
  // Whether the rows of some consumer must be summed again.
  __device__ static volatile int& restarts() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return *reinterpret_cast<volatile int*>(shared_memory + restart_offset);
  }

  __device__ void init_barriers() const {
    for (int stage = 0; stage < stages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), 4 * consumers);
    }
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init(decided(), 4 * consumers);
    ptx::fence_mbarrier_init();
    restarts() = 0;
  }

  // Loads all tiles. Called by one thread.
  __device__ void produce(const KvTileRange& tiles) {
    if (tiles.begin >= tiles.end) return;
    ptx::mbarrier_arrive_expect_tx(q_full(), (1 + moves_q) * QueryTile::bytes);
    load<QueryTile>(shared, maps.q, coord.q_begin, coord.head, q_full(), ptx::l2_evict_first);
    if constexpr (moves_q) {
      load<QueryTile>(shared + QueryTile::bytes, maps.q_tangent, coord.q_begin, coord.head,
                      q_full(), ptx::l2_evict_first);
    }
    load_tiles(tiles);
    if constexpr (moves_scores) {
      ptx::mbarrier_wait(decided(), 0);
      if (restarts()) load_tiles(tiles);
    }
  }

  __device__ void consume(int consumer) {
    Fragments fragments(p, coord, {coord.batch, 0, p.seqlen_q, coord.batch, 0, p.seqlen_k},
                        64 * consumer + threadIdx.x / 32 % 4 * 16);
    const KvTileRange& tiles = fragments.tiles;
    typename Fragments::Output out;
    clear(out);
    if (tiles.begin < tiles.end) {
      Queries queries;
      ptx::mbarrier_wait(q_full(), 0);
      copy_queries(consumer, queries);
      process_tiles(fragments, consumer, queries, out);
      if (moves_scores && must_restart(fragments)) {
        fragments.restart();
        process_tiles(fragments, consumer, queries, out);
        fragments.sum_rows();
      }
    }
    fragments.write(out);
  }

 private:
  template <class Tile>
  __device__ void load(unsigned target, const TensorMap& map, int row, int head, unsigned barrier,
                       unsigned long long policy) const {
    load_boxes<Tile>(target, &map, 0, row, head, coord.batch, barrier, policy);
  }

  __device__ void load_tiles(const KvTileRange& tiles) {
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      const unsigned target = stage_address(ring.index), barrier = full(ring.index);
      ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes);
      const auto load_keys = [&](int offset, const TensorMap& map) {
        load<KeyTile>(target + offset, map, tile * Bc, coord.head_kv, barrier,
                      ptx::l2_evict_last);
      };
      const auto load_values = [&](int offset, const TensorMap& map) {
        load<ValueTile>(target + offset, map, tile * Bc, coord.head_kv, barrier,
                        ptx::l2_evict_last);
      };
      load_keys(0, maps.k);
      if constexpr (moves_k) load_keys(k_tangent_offset, maps.k_tangent);
      if constexpr (moves_scores) load_values(v_offset, maps.v);
      if constexpr (moves_v) load_values(v_tangent_offset, maps.v_tangent);
      ring.advance();
    }
  }

  __device__ void copy_queries(int consumer, Queries& queries) const {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned address = shared + (64 * consumer + row) * QueryTile::box_row_bytes;
#pragma unroll
    for (int step = 0; step < kept_steps; ++step) {
      unsigned fragment[4];
      ptx::ldmatrix_x4(fragment,
                       address + QueryTile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[4 * step + i] = fragment[i];
    }
  }

  // Completes the sums of the rows. Returns whether those of any row of the CTA are inaccurate.
  __device__ bool must_restart(Fragments& fragments) const {
    if (__any_sync(~0u, fragments.sum_rows())) restarts() = 1;
    arrive_warp(decided());
    ptx::mbarrier_wait(decided(), 0);
    return restarts();
  }

  __device__ void process_tiles(Fragments& fragments, int consumer,
                                const Queries& queries,
                                typename Fragments::Output& out) {
    typename Fragments::Scores scores;    // S, then P
    typename Fragments::Scores tangents;  // S., then H
    unsigned probabilities[Bc / 4], changes[Bc / 4];
    const KvTileRange& tiles = fragments.tiles;
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      const bool is_first = tile == tiles.end - 1;
      ptx::mbarrier_wait(full(ring.index), ring.phase);
      start_scores(consumer, queries, flat(scores), flat(tangents));
      // The products with V of the previous tile are complete, too.
      ptx::wgmma_wait_group<0>();
      if (!is_first) arrive_warp(empty(ring.index == 0 ? stages - 1 : ring.index - 1));
      ptx::pin(flat(scores));
      ptx::pin(flat(tangents));
      fragments.compute_weights(scores, tangents, tile);
#pragma unroll
      for (int step = 0; step < Bc / 16; ++step) {
        pack_step(probabilities + 4 * step, scores[0] + 2 * step);
        pack_step(changes + 4 * step, tangents[0] + 2 * step);
      }
      start_values(probabilities, changes, flat(out), !is_first);
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin(flat(out));
    arrive_warp(empty(ring.index == 0 ? stages - 1 : ring.index - 1));
  }

  // Returns the fragments of 64 rows as the accumulators of wgmma.
  template <int count>
  __device__ static float (&flat(float (&fragments)[1][count][4]))[4 * count] {
    return reinterpret_cast<float(&)[4 * count]>(fragments);
  }

  __device__ static void pack_step(unsigned* operand, const float (*fragments)[4]) {
    unsigned words[4];
    Fragments::pack_operand(words, fragments);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[i] = words[i];
  }

  // Issues S = Q K^T and S. = Q. K^T + Q K.^T.
  __device__ void start_scores(int consumer, const Queries& queries,
                               float (&scores)[Bc / 2], float (&tangents)[Bc / 2]) const {
    using Product = Wgmma<Element, Bc>;
    const unsigned long long k = KeyTile::k_along_columns() + stage_address(ring.index) / 16;
    const unsigned long long q = QueryTile::k_along_columns() +
                                 (shared + consumer * 64 * QueryTile::box_row_bytes) / 16;
    // Adds the products of Q and some keys to the sums, or sets them.
    const auto multiply_queries = [&](float(&sums)[Bc / 2], unsigned long long keys, bool adds) {
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        const unsigned long long right = keys + KeyTile::column_step(step) / 16;
        if (step < kept_steps) {
          Product::multiply_k_contiguous(sums, queries + 4 * step, right, adds || step != 0);
        } else {
          Product::multiply(sums, q + QueryTile::column_step(step) / 16, right, adds || step != 0);
        }
      }
    };
    ptx::pin(scores);
    ptx::pin(tangents);
    ptx::wgmma_fence();
    multiply_queries(scores, k, false);
    if constexpr (moves_q) {
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        Product::multiply(tangents,
                          q + (QueryTile::bytes + QueryTile::column_step(step)) / 16,
                          k + KeyTile::column_step(step) / 16, step != 0);
      }
    }
    if constexpr (moves_k) multiply_queries(tangents, k + k_tangent_offset / 16, moves_q);
    ptx::wgmma_commit_group();
    // Without tangents of q and k, S. is 0.
    if constexpr (!moves_scores) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) tangents[i] = 0;
    }
  }

  // Issues O. += H V + P V., without the previous value unless `accumulate`.
  __device__ void start_values(const unsigned (&probabilities)[Bc / 4],
                               const unsigned (&changes)[Bc / 4], float (&out)[columns_v / 2],
                               bool accumulate) const {
    const auto multiply = [&](const unsigned (&weights)[Bc / 4], int offset, bool adds) {
      const unsigned long long values =
          ValueTile::k_along_rows() + (stage_address(ring.index) + offset) / 16;
#pragma unroll
      for (int step = 0; step < Bc / 16; ++step) {
        Wgmma<Element, columns_v>::multiply_n_contiguous(
            out, weights + 4 * step, values + ValueTile::row_step(step) / 16, step != 0 || adds);
      }
    };
    ptx::pin(out);
    ptx::wgmma_fence();
    if constexpr (moves_scores) multiply(changes, v_offset, accumulate);
    if constexpr (moves_v) multiply(probabilities, v_tangent_offset, moves_scores || accumulate);
    ptx::wgmma_commit_group();
  }
};

template <class Config>
__device__ void hopper_tangents(const TangentMaps& maps, const TangentParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Tangents = HopperTangents<Config>;
  Tangents tangents = {p, maps, tile_coord<Config::Br>(p, blockIdx.x),
                       ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    tangents.init_barriers();
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
  }
  __syncthreads();
  // The shuffle tells the compiler that the value is uniform within a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    const TileCoord& coord = tangents.coord;
    const int q_end = min(coord.q_begin + Config::Br, p.seqlen_q);
    if (threadIdx.x == 0) {
      tangents.produce(kv_tile_range<Config::Bc, false>(Mask<Config>(p, coord.batch),
                                                        coord.q_begin, q_end, 0, 1));
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    tangents.consume(warpgroup - 1);
  }
}

#endif  // __CUDA_ARCH__ == 900
