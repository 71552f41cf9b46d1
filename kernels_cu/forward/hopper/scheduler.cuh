// Warps of the producer warpgroup other than the producer warp, for work outside the main loop.
#pragma once

#include "forward/hopper/cta.cuh"
#include "scheduler/varlen_order.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"

#if __CUDA_ARCH__ == 900

// Scheduler warp. In variable-length batches, it fetches work tiles ahead of the producer. It also
// writes the output of fully masked rows and, in float32, of rows that attend to one key. This is
// its only task in dense batches, where nothing is scheduled.
template <class Config>
struct HopperScheduler {
  using Element = typename Config::Element;
  using Cta = HopperCta<Config>;
  using WorkTile = typename Cta::WorkTile;

  // Number of keys whose K and V, of one head, take 32 MiB. They then stay in L2, which has 50 MiB.
  static constexpr int section_keys =
      (32 << 20) / (Config::head_dim + Config::head_dim_v) / int(sizeof(Element));

  const Cta& cta;
  PipelineState<1> work_tile_state = {};
  int work_tile_slot = 0;  // index in the ring of work tiles

  __device__ void schedule_tiles() {
    const VarlenOrder order = Cta::order_of(cta.p);
    const bool is_first = threadIdx.x % 32 == 0;
    for (unsigned round = 0;; ++round) {
      WorkTile& next = *cta.work_tile_at(work_tile_slot);
      // The CTAs of a pair take the same tiles without communication.
      const auto fetch = [&] { return Cta::cta_ranks == 1 ? order.fetch() : Cta::tile_of(round); };
      fetch_work_tile<Config>(cta.p, order, fetch, section_keys, next, is_first);
      __syncwarp();
      if (!next.is_end_of_work() && (Config::causal || !next.has_keys())) {
        write_degenerate_rows(next);
        __syncwarp();
        if (!next.has_keys()) continue;
      }
      if (is_first) {
        ptx::mbarrier_wait(cta.work_tile_empty(), work_tile_state.phase ^ 1);
        ptx::mbarrier_arrive(cta.work_tile_full());
      }
      if (next.is_end_of_work()) return;
      work_tile_state.advance();
      work_tile_slot = Cta::next_work_tile_slot(work_tile_slot);
      // A CTA that fetches a work tile too early withholds it from CTAs that may become idle first.
      if (next.kv_tile_count() > Cta::work_tile_prefetch) {
        ptx::mbarrier_wait(cta.work_tile_empty(), work_tile_state.phase ^ 1);
      }
    }
  }

  // Writes the output of query tiles without a visible key, which the main loop skips.
  __device__ void write_masked_tiles() const {
    for (unsigned round = 0;; ++round) {
      const WorkTile next = cta.work_tile_of(round);
      if (next.is_end_of_work()) return;
      if (!next.has_keys()) write_degenerate_rows(next);
    }
  }

  // Waits for the consumers, then overwrites the first rows of each query tile that attend to at
  // most `max_degenerate_keys` keys.
  __device__ void overwrite_degenerate_rows() const {
    Cta::consumers_done.sync();
    for (unsigned round = 0;; ++round) {
      const WorkTile next = cta.work_tile_of(round);
      if (next.is_end_of_work()) return;
      if (next.has_keys()) write_degenerate_rows(next);
    }
  }

  __device__ void write_degenerate_rows(const WorkTile& work_tile) const {
    const TileCoord& coord = work_tile.coord;
    const int lane = threadIdx.x % 32;
    const int q_end = min(coord.q_begin + Config::Br, work_tile.sequence(cta.p).seqlen_q);
    // These rows are rare, and the producer warps have few registers: loops are not unrolled.
#pragma unroll 1
    for (int row = coord.q_begin; row < q_end; ++row) {
      if (work_tile.has_keys() && !cta.is_written_by_scheduler(work_tile, row)) return;
      if constexpr (max_degenerate_keys<Element> > 0) {
        if (work_tile.has_keys() && work_tile.template mask<Config>(cta.p).visible_end(row) > 0) {
          write_value(work_tile, row);
          continue;
        }
      }
      if constexpr (has_statistics<Config>) {
        if (lane == 0 && Cta::cta_rank() == 0) cta.write_statistics(work_tile, row, {});
      }
      if (lane == 0 && Cta::cta_rank() == 0 && (Config::split_keys || cta.p.lse != nullptr)) {
        float lse = -SoftmaxMath<float>::infinity();
        if constexpr (Config::split_keys && Partials<Config>::lse_is_pair) {
          cta.write_log_sum_exp(work_tile, row, ExponentSum<float>{lse, lse});
        } else {
          if constexpr (!Config::split_keys) apply_sink<Config>(cta.p, coord.head, lse);
          cta.write_log_sum_exp(work_tile, row, lse);
        }
      }
      const int first = Cta::first_column_v(),
                end = min(first + Cta::columns_v, Config::head_dim_v);
#pragma unroll 1
      for (int column = first + lane; column < end; column += 32) {
        if constexpr (Config::split_keys) {
          cta.partial_row(coord, row)[column] = 0;
        } else {
          cta.output_row(work_tile, row)[column] = {};
        }
      }
    }
  }

  // Sets a row that attends to one key to the value of that key.
  __device__ void write_value(const WorkTile& work_tile, int row) const {
    const TileCoord& coord = work_tile.coord;
    const Row<Element> value = {cta.p.v.template head<Element>(coord.batch, coord.head_kv), true};
    Element* out = cta.output_row(work_tile, row);
#pragma unroll 1
    for (int column = threadIdx.x % 32; column < Config::head_dim_v; column += 32) {
      out[column] = degenerate_value(1, out[column], value, column);
    }
  }
};

// Warp that zeroes rows of V past the end of a sequence. Their probabilities are 0, but 0 times an
// infinity or NaN would be NaN.
template <class Config>
struct HopperTailClearer {
  using Cta = HopperCta<Config>;

  const Cta& cta;
  PipelineState<Cta::tails> tail = {};

  __device__ void clear_tails() {
    while (true) {
      ptx::mbarrier_wait(cta.tail_loaded(tail.index), tail.phase);
      const typename Cta::Tail loaded = *cta.tail(tail.index);
      if (loaded.stage < 0) return;
      clear_tail<typename Cta::ValueTile>(cta.stage_address(loaded.stage), loaded.rows);
      arrive_warp(cta.full(loaded.stage));
      tail.advance();
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
