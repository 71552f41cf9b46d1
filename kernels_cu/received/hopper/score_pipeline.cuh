// Products of one tile of rows and many others on Hopper (sm_90a), for kernels that need scores but
// no output: S = L R^T, where L is a tile of Q or K, and R goes through tiles of the other one.
//
// One thread of the producer warpgroup loads tiles by TMA. Each consumer warpgroup computes 64 rows
// of S, and processes them before it issues its next product. While some consumers process scores,
// the tensor cores compute those of others:
//
//   producer thread     L  R0 R1 R2 R3 ...   next L  R0 ...
//   numbers warp           N0 N1 N2 N3 ...           N0 ...   (one float per row of R, optional)
//   tensor cores              S0 of A, S0 of B, S0 of C, S0 of D, S1 of A, ...
//   consumer A                        P0 ..................               P1 ...
//
// The phase of full(stage) ends when R and N of a stage are there, that of empty(stage) when all
// consumer warps have processed the scores. The phase of left_full(stage) ends when L is there, that
// of left_empty(stage) when all consumer warps have finished the work item.
#pragma once

#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"
#include "tile/tma_tile.cuh"

#if __CUDA_ARCH__ == 900

struct ScoreMaps {
  TensorMap q;
  TensorMap k;
};

// Rows of L, and the tiles of R for each of some heads, in the order in which they are loaded.
struct ScoreWork {
  int batch;
  int left_head;
  int left_row;  // first row of L
  int first_head, last_head;
  int first_tile, last_tile;  // tiles of R

  __device__ bool is_empty() const { return first_tile >= last_tile; }
};

// One of the tiles of R.
struct ScoreTile {
  int head, tile;

  __device__ static ScoreTile first(const ScoreWork& work) {
    return {work.first_head, work.first_tile};
  }
  __device__ void advance(const ScoreWork& work) {
    if (++tile == work.last_tile) {
      tile = work.first_tile;
      ++head;
    }
  }
  __device__ bool is_end(const ScoreWork& work) const { return head == work.last_head; }
};

// `LeftRows` and `RightRows` are the rows of a tile of L and of R. With `HasNumbers`, the kernel
// has a warp that calls load_numbers().
template <class Config, int LeftRows, int RightRows, bool HasNumbers>
struct ScorePipeline {
  using Element = typename Config::Element;
  static constexpr bool has_numbers = HasNumbers;
  using Left = TmaTile<LeftRows, Config::head_dim>;
  using Right = TmaTile<RightRows, Config::head_dim>;
  static constexpr int stages = Config::stages;
  static constexpr int left_stages = Config::left_stages;
  static constexpr int consumers = LeftRows / 64;
  static constexpr int k_steps = (Config::head_dim + 15) / 16;
  using Scores = float[RightRows / 2];

  static_assert(LeftRows % 64 == 0 && consumers >= 1 && consumers <= 4,
                "64 rows for each consumer");
  static_assert(RightRows % 16 == 0 && RightRows <= 256, "whole wgmma instructions");

  // Shared memory: the rings of L, of R and of numbers, and the barriers.
  static constexpr int ring_offset = left_stages * Left::bytes;
  static constexpr int numbers_offset = ring_offset + stages * Right::bytes;
  static constexpr int barrier_offset =
      numbers_offset + HasNumbers * stages * RightRows * int(sizeof(float));
  static_assert(barrier_offset + 2 * (stages + left_stages) * 8 == Config::shared_memory,
                "as the host planned");

  const unsigned shared;
  PipelineState<stages> ring = {};
  PipelineState<left_stages> left_ring = {};

  __device__ explicit ScorePipeline(unsigned shared) : shared(shared) {}

  // Called by one thread, before all threads of the CTA synchronize.
  __device__ void init_barriers() const {
    for (int stage = 0; stage < stages; ++stage) {
      ptx::mbarrier_init(full(stage), HasNumbers ? 2 : 1);
      ptx::mbarrier_init(empty(stage), 4 * consumers);
    }
    for (int stage = 0; stage < left_stages; ++stage) {
      ptx::mbarrier_init(left_full(stage), 1);
      ptx::mbarrier_init(left_empty(stage), 4 * consumers);
    }
    ptx::fence_mbarrier_init();
  }

  // Loads the tiles of a work item. Called by one thread.
  __device__ void load(const ScoreWork& work, const TensorMap* left_map,
                       const TensorMap* right_map) {
    const unsigned filled = left_full(left_ring.index);
    ptx::mbarrier_wait(left_empty(left_ring.index), left_ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(filled, Left::bytes);
    load_boxes<Left>(left_address(left_ring.index), left_map, 0, work.left_row, work.left_head,
                     work.batch, filled, ptx::l2_evict_first);
    left_ring.advance();
    for (ScoreTile tile = ScoreTile::first(work); !tile.is_end(work); tile.advance(work)) {
      ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full(ring.index), Right::bytes);
      load_boxes<Right>(stage_address(ring.index), right_map, 0, tile.tile * RightRows, tile.head,
                        work.batch, full(ring.index), ptx::l2_evict_last);
      ring.advance();
    }
  }

  // Stores number(head, row) for each row of R. Called by one warp.
  template <class Number>
  __device__ void load_numbers(const ScoreWork& work, Number number) {
    constexpr int count = (RightRows + 31) / 32;
    const int lane = threadIdx.x % 32;
    for (ScoreTile tile = ScoreTile::first(work); !tile.is_end(work); tile.advance(work)) {
      // The loads overlap the wait for the stage.
      float of_rows[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        of_rows[i] = number(tile.head, tile.tile * RightRows + 32 * i + lane);
      }
      ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (RightRows % 32 == 0 || 32 * i + lane < RightRows) {
          numbers(ring.index)[32 * i + lane] = of_rows[i];
        }
      }
      arrive_warp(full(ring.index));
      ring.advance();
    }
  }

  // Calls process(scores, tile, numbers) for each of the tiles [first_tile, last_tile) of R of each
  // head, and skips the other tiles of the work item. Called by a consumer warpgroup, of index
  // `consumer`.
  template <class Process>
  __device__ void multiply(const ScoreWork& work, int consumer, int first_tile, int last_tile,
                           Process process) {
    ptx::mbarrier_wait(left_full(left_ring.index), left_ring.phase);
    const unsigned left = left_address(left_ring.index) + 64 * consumer * Left::box_row_bytes;
    Scores scores;
    for (ScoreTile tile = ScoreTile::first(work); !tile.is_end(work); tile.advance(work)) {
      ptx::mbarrier_wait(full(ring.index), ring.phase);
      if (tile.tile >= first_tile && tile.tile < last_tile) {
        compute_scores(left, scores);
        process(scores, tile, numbers(ring.index));
      }
      arrive_warp(empty(ring.index));
      ring.advance();
    }
    arrive_warp(left_empty(left_ring.index));
    left_ring.advance();
  }

 private:
  __device__ unsigned full(int stage) const { return shared + barrier_offset + 8 * stage; }
  __device__ unsigned empty(int stage) const { return full(stages + stage); }
  __device__ unsigned left_full(int stage) const { return full(2 * stages + stage); }
  __device__ unsigned left_empty(int stage) const { return left_full(left_stages + stage); }
  __device__ unsigned left_address(int stage) const { return shared + stage * Left::bytes; }
  __device__ unsigned stage_address(int stage) const {
    return shared + ring_offset + stage * Right::bytes;
  }
  __device__ static float* numbers(int stage) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<float*>(shared_memory + numbers_offset) + stage * RightRows;
  }

  // Computes S = L R^T for the current stage; `left` is the address of the consumer's rows of L.
  __device__ void compute_scores(unsigned left, Scores& scores) const {
    const unsigned long long a = Left::k_along_columns() + left / 16;
    const unsigned long long b = Right::k_along_columns() + stage_address(ring.index) / 16;
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      Wgmma<Element, RightRows>::multiply(scores, a + Left::column_step(step) / 16,
                                          b + Right::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores);
  }
};

// Runs a kernel with one producer warpgroup and the consumers. `Kernel` has the types `Config` and
// `Pipeline`, and these members:
//
//   items()            number of work items of the grid, in order of decreasing length
//   item(index)        work item, whose work() is its `ScoreWork`
//   left_map, right_map
//
// A work item has the function consume(pipeline, consumer) and, if the pipeline has numbers,
// number(head, row). A CTA takes work items as HopperCta::tile_of() does.
template <class Kernel>
__device__ void run_score_kernel(const Kernel& kernel) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Config = typename Kernel::Config;
  using Pipeline = typename Kernel::Pipeline;
  Pipeline pipeline(ptx::shared_address(shared_memory));
  const auto for_each_item = [&](auto process) {
    const unsigned items = kernel.items();
    for (unsigned round = 0;; ++round) {
      const unsigned item =
          round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      // An odd round may begin past the last item, and end before it.
      if (item < items) process(kernel.item(item));
      if ((round + 1) * gridDim.x >= items) return;
    }
  };
  if (threadIdx.x == 0) {
    pipeline.init_barriers();
    ptx::prefetch_tensormap(kernel.left_map);
    ptx::prefetch_tensormap(kernel.right_map);
  }
  __syncthreads();
  // The shuffle tells the compiler that the value is uniform within a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if (threadIdx.x == 0) {
      for_each_item([&](const auto& item) {
        const ScoreWork work = item.work();
        if (!work.is_empty()) pipeline.load(work, kernel.left_map, kernel.right_map);
      });
    }
    if constexpr (Pipeline::has_numbers) {
      if (threadIdx.x / 32 == 1) {
        for_each_item([&](const auto& item) {
          const ScoreWork work = item.work();
          if (work.is_empty()) return;
          pipeline.load_numbers(work, [&](int head, int row) { return item.number(head, row); });
        });
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    for_each_item([&](const auto& item) { item.consume(pipeline, warpgroup - 1); });
  }
}

#endif  // __CUDA_ARCH__ == 900
