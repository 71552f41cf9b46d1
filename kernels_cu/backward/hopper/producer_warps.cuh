// Warps of the producer warpgroup: one lane loads tiles, one warp copies row statistics, and two
// lanes add dq sums to memory.
#pragma once

#include "backward/preprocess/clean.cuh"
#include "backward/hopper/listed_tiles.cuh"
#include "backward/dq/semaphore.cuh"
#include "ptx/ordered_add.cuh"
#include "score/softmax.cuh"

#if __CUDA_ARCH__ == 900

// Run by one lane. Issues TMA loads of k and v, and of tiles of q, dout and the bias as stages
// become free. The bias of a query tile comes last: at head_dim 64, both stages of the bias hold
// the same query tile, so they become free later than the stages of q and dout.
template <class Config>
struct HopperGradientLoader {
  using Cta = HopperCta<Config>;
  using Step = typename Cta::Step;

  const Cta& cta;
  PipelineState<Config::q_stages> q_ring = {};
  PipelineState<Config::dout_stages> dout_ring = {};
  PipelineState<Cta::streams_bias ? Config::bias_stages : 1> bias_ring = {};

  __device__ void run() {
    const Sequence& sequence = cta.sequence;
    if constexpr (Cta::fetches_kv_tiles) {
      ptx::mbarrier_wait(cta.kv_empty(), cta.kv_ring.phase ^ 1);
    }
    load<typename Cta::KeyTile>(cta.keys_address(), &cta.maps.k, sequence.k_first + cta.coord.begin,
                                cta.coord.head, sequence.k_batch,
                                cta.inspects_keys() ? cta.keys_arrived() : cta.keys_full());
    if constexpr (Cta::exchanges_ds) load_peer_keys();
    Step step = cta.first_step();
    load_queries(step);
    load<typename Cta::ValueTile>(cta.values_address(), &cta.maps.v,
                                  sequence.k_first + cta.coord.begin, cta.coord.head,
                                  sequence.k_batch, cta.values_full());
    load_douts(step);
    if constexpr (Cta::streams_bias) load_bias(step);
    while (!cta.is_last(step)) {
      step = cta.next_step(step);
      load_queries(step);
      load_douts(step);
      if constexpr (Cta::streams_bias) load_bias(step);
    }
  }

 private:
  // In a pair of KV tiles, loads the columns of the peer CTA's keys that the peer's dS is
  // multiplied with.
  __device__ void load_peer_keys() const {
    static_assert(!Config::has_seqlens, "TMA clears the rows past the end of the sequence");
    using Tile = typename Cta::PeerKeyTile;
    const int rank = Cta::rank();
    const int row = cta.coord.begin + (1 - 2 * rank) * Config::Bc;
    ptx::mbarrier_arrive_expect_tx(cta.keys_full(), Tile::bytes);
    load_boxes<Tile>(cta.peer_keys_address(), &cta.maps.k, rank * Tile::columns, row,
                     cta.coord.head, cta.sequence.k_batch, cta.keys_full(), ptx::l2_evict_normal);
  }

  __device__ void load_queries(const Step& step) {
    const int stage = q_ring.index;
    ptx::mbarrier_wait(cta.q_empty(stage), q_ring.phase ^ 1);
    const unsigned barrier =
        choose_barrier(step, cta.q_full(stage), cta.inspects ? cta.q_arrived(stage) : 0);
    if constexpr (Config::stores_pairs) load_pairs(cta.p, step, stage, barrier);
    load<typename Cta::QueryTile>(cta.queries_address(stage), &cta.maps.q, row_of(step), step.head,
                                  cta.sequence.q_batch, barrier);
    q_ring.advance();
  }

  // Loads the visible pairs of a masked step. Call it before the arrival at `barrier`, which then
  // also expects these bytes. A template, because `p.block_mask` exists only in translation units
  // with modifications.
  template <class AnyParams>
  __device__ void load_pairs(const AnyParams& p, const Step& step, int stage,
                             unsigned barrier) const {
    if (!cta.is_masked(step)) return;
    ptx::mbarrier_expect_tx(barrier, Cta::pairs_bytes);
    ptx::cp_async_bulk(cta.pairs_address(stage),
                       QueryTileLists{p.block_mask}.pairs(step.index, Cta::pairs_bytes),
                       Cta::pairs_bytes, barrier);
  }

  __device__ void load_douts(const Step& step) {
    const int stage = dout_ring.index;
    ptx::mbarrier_wait(cta.dout_empty(stage), dout_ring.phase ^ 1);
    load<typename Cta::DoutTile>(cta.dout_address(stage), &cta.maps.dout, row_of(step), step.head,
                                 cta.sequence.q_batch,
                                 choose_barrier(step, cta.dout_full(stage),
                                                cta.inspects ? cta.dout_arrived(stage) : 0));
    dout_ring.advance();
  }

  __device__ void load_bias(const Step& step) {
    using Tile = typename Cta::BiasTile;
    const TensorMap* const map = &static_cast<const BiasGradientMaps&>(cta.maps).bias;
#pragma unroll
    for (int row = 0; row < Config::Br; row += Config::columns) {
      const unsigned full = cta.bias_full(bias_ring.index);
      ptx::mbarrier_wait(cta.bias_empty(bias_ring.index), bias_ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Tile::bytes);
      load_boxes<Tile>(cta.bias_address(bias_ring.index), map, cta.coord.begin,
                       row_of(step) + row, step.head, cta.sequence.q_batch, full,
                       Config::bias_is_shared ? ptx::l2_evict_normal : ptx::l2_evict_first);
      bias_ring.advance();
    }
  }

  // Returns the barrier at which the load of a tile arrives: `arrived` if the row statistics warp
  // inspects the tile, otherwise `full`. In the second case, arrives at `arrived`, too, so that its
  // phase is always that of the stage.
  __device__ unsigned choose_barrier(const Step& step, unsigned full, unsigned arrived) const {
    if constexpr (!Cta::inspects) return full;
    if (cta.inspects_tile(step)) return arrived;
    ptx::mbarrier_arrive(arrived);
    return full;
  }

  __device__ int row_of(const Step& step) const {
    return cta.sequence.q_first + step.tile * Config::Br;
  }

  template <class Tile>
  __device__ static void load(unsigned target, const TensorMap* map, int row, int head, int batch,
                              unsigned barrier) {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::bytes);
    load_boxes<Tile>(target, map, Cta::column_part() * Tile::columns, row, head, batch, barrier,
                     ptx::l2_evict_normal);
  }
};

// Run by one warp. Copies row statistics to the stages of q. Clears a tile's rows past the end of
// the sequence, and rows of q and dout that attend to no key.
template <class Config>
struct HopperRowStatsLoader {
  using Cta = HopperCta<Config>;
  using Step = typename Cta::Step;
  static constexpr int Br = Config::Br;
  static constexpr int rows_per_lane = Br / 32;

  const Cta& cta;
  PipelineState<Config::q_stages> q_ring = {};
  PipelineState<Config::dout_stages> dout_ring = {};

  __device__ void run() {
    if (cta.inspects_keys()) {
      clear_tail<typename Cta::KeyTile>(cta.keys_arrived(), 0, cta.keys_address(),
                                        cta.sequence.seqlen_k - cta.coord.begin);
      arrive_warp(cta.keys_full());
    }
    for (Step step = cta.first_step();; step = cta.next_step(step)) {
      load(step);
      if (cta.is_last(step)) break;
    }
  }

 private:
  __device__ void load(const Step& step) {
    int left = cta.sequence.seqlen_q - step.tile * Br;
    // This keeps the compiler from hoisting parts of the addresses of rows that are cleared, which
    // would be spilled.
    if constexpr (Cta::inspects) left = ptx::opaque(left);
    const auto* source = row_stats<Config>(cta.p) +
                         lse_index<Config>(cta.p, cta.sequence, step.head, step.tile * Br);
    RowStats<float> row_stats_of_lane[rows_per_lane];
#pragma unroll
    for (int i = 0; i < rows_per_lane; ++i) {
      const int row = i * 32 + threadIdx.x % 32;
      row_stats_of_lane[i] = {SoftmaxMath<float>::infinity(), 0};
      if (row < left) row_stats_of_lane[i] = source[row];
    }
    ptx::mbarrier_wait(cta.q_empty(q_ring.index), q_ring.phase ^ 1);
    cta.store_step(step, q_ring.index);
    float* stats = cta.stats(q_ring.index);
#pragma unroll
    for (int i = 0; i < rows_per_lane; ++i) {
      const int row = i * 32 + threadIdx.x % 32;
      stats[row] = row_stats_of_lane[i].lse_log2;
      stats[Br + row] = Cta::column_part() == 0 ? -row_stats_of_lane[i].delta : 0;
    }
    const bool inspects = cta.inspects_tile(step);
    if (inspects) {
      clear<typename Cta::QueryTile>(cta.q_arrived(q_ring.index), q_ring.phase,
                                     cta.queries_address(q_ring.index), left,
                                     [&](int i) { return clears_q(row_stats_of_lane[i]); });
    }
    arrive_warp(cta.q_full(q_ring.index));
    if (inspects && !Cta::inspects_all) arrive_warp(cta.q_full(q_ring.index));
    q_ring.advance();
    if (inspects) {
      clear<typename Cta::DoutTile>(cta.dout_arrived(dout_ring.index), dout_ring.phase,
                                    cta.dout_address(dout_ring.index), left,
                                    [&](int i) { return clears_dout(row_stats_of_lane[i]); });
      arrive_warp(cta.dout_full(dout_ring.index));
    }
    if constexpr (Cta::inspects) dout_ring.advance();
  }

  // Waits for the load of a tile of q or dout, and clears its rows from `rows` on. If
  // `Config::inspects`, also clears each of the lane's rows, i, for which `clears(i)` is true.
  template <class Tile, class Clears>
  __device__ static void clear(unsigned arrived, int phase, unsigned tile, int rows,
                               Clears clears) {
    clear_tail<Tile>(arrived, phase, tile, rows);
    if constexpr (Config::inspects) {
#pragma unroll
      for (int i = 0; i < rows_per_lane; ++i) {
        const int row = i * 32 + threadIdx.x % 32;
        if (row < rows && clears(i)) Tile::clear_row(tile, row);
      }
      ptx::fence_proxy_async();
    }
  }

  // Waits for the load of a tile, and clears its rows from `rows` on.
  template <class Tile>
  __device__ static void clear_tail(unsigned arrived, int phase, unsigned tile, int rows) {
    ptx::mbarrier_wait(arrived, phase);
    if (rows * Tile::box_row_bytes < Tile::box_bytes) ::clear_tail<Tile>(tile, rows);
  }
};

// Run by two lanes, of two warps, on alternate query tiles. Adds the consumers' dq sums to those in
// memory when the semaphore allows it. An add takes longer than its reads of shared memory, and a
// release of the semaphore longer still, so the two lanes overlap them. The first CTA of the dq
// order stores its sums, so that no kernel needs to clear memory. The last one, if `last_writes`,
// loads the earlier sums for its consumers instead.
//
//   lane 0   semaphore, sums_full | copy, sums_empty | wait for add, release | semaphore ...
//   lane 1                        ... semaphore, sums_full | copy, sums_empty | wait for add ...
template <class Config>
struct HopperGradientAdder {
  using Cta = HopperCta<Config>;
  using Step = typename Cta::Step;

  const Cta& cta;
  const int lane_index;
  int index = 0;
  int phase = 0;

  __device__ void run() {
    for (Step step = cta.first_step();; step = cta.next_step(step)) {
      if (index == lane_index) add(step);
      index ^= 1;
      if (cta.is_last(step)) break;
    }
  }

 private:
  __device__ void add(const Step& step) {
    const DqSums<Config> all(cta.p);
    int* semaphore = all.semaphore(cta.p, cta.sequence, cta.coord.batch, step.head, step.tile);
    float* target = all.template sums<Cta::tile_floats>(cta.p, cta.sequence, cta.coord.batch,
                                                        step.head, step.tile) +
                    Cta::first_float();
    const int order_index = cta.order_index(step);
    while (!Cta::may_add(ptx::ld_acquire_gpu(semaphore), order_index)) {
    }
    ptx::fence_proxy_async_global();
    if (Cta::last_writes && cta.is_last_cta(step)) {
      load_earlier_sums(target, order_index);
    } else {
      add_sums(target, order_index);
      semaphore_release(semaphore);
    }
    phase ^= 1;
  }

  static constexpr int sums_bytes(int consumer) {
    return 64 * Cta::dq_columns(consumer) * int(sizeof(float));
  }

  __device__ void add_sums(float* target, int order_index) {
#pragma unroll
    for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
      ptx::mbarrier_wait(cta.sums_full(consumer, lane_index), phase);
      const int bytes = sums_bytes(consumer);
      float* part = target + Cta::dq_offset(consumer);
      if (order_index == 0) {
        ptx::cp_async_bulk_store(part, cta.sums_address(consumer), bytes);
      } else {
        ptx::cp_reduce_async_bulk_add(part, cta.sums_address(consumer), bytes);
      }
      ptx::cp_async_bulk_commit_group();
    }
    static_assert(Cta::consumers == 2, "one wait per consumer");
    ptx::cp_async_bulk_wait_group_read<1>();
    ptx::mbarrier_arrive(cta.sums_empty(0));
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(cta.sums_empty(1));
    // The wait above covers reads of shared memory, this one the additions in global memory.
    ptx::cp_async_bulk_wait_group();
    ptx::fence_proxy_async_global();
  }

  // Loads the earlier sums into the buffer. Consumers arrive at `sums_full` after reading them.
  __device__ void load_earlier_sums(const float* source, int order_index) {
#pragma unroll
    for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
      // Wait until the other lane has released the buffer of the previous tile.
      ptx::mbarrier_wait(cta.sums_empty(consumer), lane_index ^ 1);
      if (order_index == 0) {
        ptx::mbarrier_arrive(cta.earlier_sums_full(consumer));
      } else {
        const int bytes = sums_bytes(consumer);
        ptx::mbarrier_arrive_expect_tx(cta.earlier_sums_full(consumer), bytes);
        ptx::cp_async_bulk(cta.sums_address(consumer), source + Cta::dq_offset(consumer), bytes,
                           cta.earlier_sums_full(consumer));
      }
    }
#pragma unroll
    for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
      ptx::mbarrier_wait(cta.sums_full(consumer, lane_index), phase);
      ptx::mbarrier_arrive(cta.sums_empty(consumer));
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
