// Gradient of a bias on Hopper (sm_90a). S and dP are computed by wgmma, and dS is summed in
// registers.
//
// A CTA computes one tile of 128 x 128 elements of the gradient after another. For each, it
// iterates in a fixed order over the score tiles that are summed into it (inputs/bias_tiles.cuh).
// Two consumer warpgroups have 64 query rows each. The operands of a product arrive in slots, which
// are the stages of a ring buffer. A slot holds 64 columns of both operands, so its size is
// independent of head_dim:
//
//   warp              waits for            does                                arrives at
//   loader, a lane    empty                loads 64 columns of q and k, or of  full
//                                            dout and v
//   bias, a lane      bias_empty           loads the bias of a gradient tile   bias_full
//   consumers, two    full, bias_full      S, dP, sums += P (dP - delta)       empty, bias_empty
//     warpgroups
//
// In a cluster of two, the CTAs have consecutive rows of the same keys and process the same score
// tiles at the same time. L2 delivers operands more slowly than wgmma multiplies them, so one CTA
// loads k or v of a slot for both. The CTAs alternate from slot to slot:
//
//   CTA 0, loader                                    CTA 1, loader
//   slot 0: q, and multicast of k to both CTAs       slot 0: q
//   slot 1: q                                        slot 1: q, and multicast of k to both CTAs
//
// Consumers therefore release a slot by arriving at `empty` of both CTAs.
//
// Up to `run_length` score tiles are added in float32. A longer sum is divided into runs of that
// length, which are added with compensation in the workspace (`HopperBiasRuns`).
#pragma once

#include "backward/hopper/column_exchange.cuh"
#include "backward/hopper/cta.cuh"
#include "backward/hopper/products.cuh"
#include "backward/inputs/bias_tiles.cuh"
#include "backward/inputs/bias_work.cuh"
#include "backward/inputs/compensated_sum.cuh"
#include "backward/params.cuh"
#include "backward/softmax_backward.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/tensor_multicast.cuh"
#include "ptx/wgmma.cuh"
#include "score/capture.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"
#include "tile/tma_tile.cuh"

#if __CUDA_ARCH__ == 900

// Layout of shared memory, barriers, and numbers of tiles.
template <class Config>
struct HopperBiasCta {
  using Element = typename Config::Element;
  static constexpr int size = 128;  // number of rows, and of keys, of a tile
  static constexpr int consumers = 2;
  static constexpr int ranks = Config::bias_ranks;  // CTAs of a cluster
  static constexpr int slots = Config::bias_slots;
  static constexpr bool streams_bias = Config::bias_streamed;

  // A slot holds 64 columns of the rows (q or dout), then 64 columns of the keys (k or v).
  using Operand = TmaTile<size, 64>;
  static constexpr int slot_bytes = 2 * Operand::bytes;
  // Tile of the bias: the rows of one consumer.
  using BiasTile = TmaTile<64, size>;

  static constexpr int bias_offset = slots * slot_bytes;
  static constexpr int lines_offset =
      bias_offset + (streams_bias ? consumers * BiasTile::bytes : 0);
  // If rows are broadcast, each consumer warp has a line: the sums over its rows, for each key.
  static constexpr int lines_bytes = Config::bias_keeps_rows ? 0 : 4 * consumers * size * 4;
  static constexpr int barrier_offset = lines_offset + lines_bytes;
  static constexpr int barriers = 2 * slots + 2 * consumers;
  static constexpr int sizes_offset = barrier_offset + 8 * barriers, sizes_bytes = 64;
  static_assert(sizeof(BiasWorkSizes) <= sizes_bytes, "fits in sizes_bytes");
  static_assert(Config::padded_dim % 64 == 0 && Config::padded_dim_v % 64 == 0,
                "the tensor maps have boxes of 64 columns");
  static_assert(sizes_offset + sizes_bytes == Config::bias_memory, "as the host planned");
  static constexpr int block_rows = size * ranks;  // rows of a cluster's tile

  const GradientParams& p;
  const GradientMaps& maps;
  const unsigned shared;
  const Mask<Config> mask;

  __device__ HopperBiasCta(const GradientParams& p, const GradientMaps& maps, unsigned shared)
      : p(p), maps(maps), shared(shared), mask(mask_of<Config>(p, sequence(0), 0)) {}

  // Index of the CTA in its cluster.
  __device__ static int rank() { return ranks == 1 ? 0 : blockIdx.z; }

  __device__ Sequence sequence(int batch) const { return sequence_of<Config>(p, batch); }

  // ---- Shared memory.

  __device__ unsigned slot_address(int slot) const { return shared + slot * slot_bytes; }
  __device__ unsigned rows_descriptor(int slot, int consumer) const {
    return matrix_address<ranks>(slot_address(slot) + consumer * 64 * Operand::box_row_bytes) / 16;
  }
  __device__ unsigned keys_descriptor(int slot) const {
    return matrix_address<ranks>(slot_address(slot) + Operand::bytes) / 16;
  }
  __device__ unsigned bias_address(int consumer) const {
    return shared + bias_offset + consumer * BiasTile::bytes;
  }
  __device__ static unsigned char* memory() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return shared_memory;
  }

  __device__ static BiasWorkSizes& work_sizes() {
    return *reinterpret_cast<BiasWorkSizes*>(memory() + sizes_offset);
  }
  __device__ void init_work_sizes() const {
    const BiasAxes<Config> axes(p);
    work_sizes() = BiasWorkSizes::of(axes.output_tiles(block_rows, size),
                                     axes.summed_tiles(block_rows, size), p.dbias.parts);
  }

  // ---- Barriers.

  __device__ unsigned barrier(int index) const { return shared + barrier_offset + index * 8; }
  __device__ unsigned full(int slot) const { return barrier(slot); }
  __device__ unsigned empty(int slot) const { return barrier(slots + slot); }
  __device__ unsigned bias_full(int consumer) const { return barrier(2 * slots + consumer); }
  __device__ unsigned bias_empty(int consumer) const {
    return barrier(2 * slots + consumers + consumer);
  }

  __device__ void init_barriers() const {
    for (int slot = 0; slot < slots; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), 4 * consumers * ranks);
    }
    for (int consumer = 0; consumer < consumers; ++consumer) {
      ptx::mbarrier_init(bias_full(consumer), 1);
      ptx::mbarrier_init(bias_empty(consumer), 4);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ static void sync_consumers() { NamedBarrier<128 * consumers>{1}.sync(); }
};

// Work of a CTA. The numbers of tiles are in shared memory, because consumers have no registers for
// them.
template <class Config>
struct HopperBiasWork
    : BiasWork<Config, HopperBiasCta<Config>::block_rows, HopperBiasCta<Config>::size> {
  using Cta = HopperBiasCta<Config>;
  using Base = BiasWork<Config, Cta::block_rows, Cta::size>;

  __device__ explicit HopperBiasWork(const Cta& cta)
      : Base(Cta::work_sizes(), cta.mask, cta.p.seqlen_q, blockIdx.x) {}

  __device__ void next_item() { Base::next_item(gridDim.x); }
  // Returns the first row of the CTA in the score tile of its cluster.
  __device__ int row() const { return Base::first_row() + Cta::rank() * Cta::size; }
  __device__ int key() const { return Base::first_key(); }
};

// Run by one lane. Loads the operands of all score tiles.
template <class Config>
struct HopperBiasLoader {
  using Cta = HopperBiasCta<Config>;
  using Operand = typename Cta::Operand;

  const Cta& cta;
  PipelineState<Cta::slots> ring = {};

  __device__ void load_all() {
    const int group = cta.p.heads_q / cta.p.heads_kv;
    for (HopperBiasWork<Config> work(cta); work.has_item(); work.next_item()) {
      for (; work.has_tile(); work.next_tile()) {
        const int head_kv = work.head() / group;
        load<Config::head_dim>(cta.maps.q, cta.maps.k, work, head_kv);
        load<Config::head_dim_v>(cta.maps.dout, cta.maps.v, work, head_kv);
      }
    }
  }

 private:
  template <int Dim>
  __device__ void load(const TensorMap& rows, const TensorMap& keys,
                       const HopperBiasWork<Config>& work, int head_kv) {
#pragma unroll 1
    for (int column = 0; column < Dim; column += 64) {
      const unsigned slot = cta.slot_address(ring.index), full = cta.full(ring.index);
      ptx::mbarrier_wait(cta.empty(ring.index), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Cta::slot_bytes);
      // The tensor maps are those of the main kernel, so a box has the rows of its tiles.
#pragma unroll
      for (int i = 0; i < Cta::size; i += Config::Br) {
        ptx::cp_async_bulk_tensor_4d(slot + i * Operand::box_row_bytes, &rows, column,
                                     work.row() + i, work.head(), work.batch(), full,
                                     ptx::l2_evict_normal);
      }
      const unsigned target = slot + Operand::bytes;
#pragma unroll
      for (int i = 0; i < Cta::size; i += Config::Bc) {
        if constexpr (Cta::ranks == 1) {
          ptx::cp_async_bulk_tensor_4d(target + i * Operand::box_row_bytes, &keys, column,
                                       work.key() + i, head_kv, work.batch(), full,
                                       ptx::l2_evict_normal);
        } else if (ring.index % 2 == Cta::rank()) {
          ptx::cp_async_bulk_tensor_4d_multicast(target + i * Operand::box_row_bytes, &keys, column,
                                                 work.key() + i, head_kv, work.batch(), full,
                                                 (1 << Cta::ranks) - 1, ptx::l2_evict_normal);
        }
      }
      ring.advance();
    }
  }
};

// Run by one lane. Loads the bias of each gradient tile that has score tiles.
template <class Config>
struct HopperBiasTileLoader {
  using Cta = HopperBiasCta<Config>;
  using BiasTile = typename Cta::BiasTile;

  const Cta& cta;
  int phase = 0;

  __device__ void load_all() {
    const TensorMap* const map = &static_cast<const BiasGradientMaps&>(cta.maps).bias;
    for (HopperBiasWork<Config> work(cta); work.has_item(); work.next_item()) {
      if (!work.has_tile()) continue;
      const int key = work.output.keys * Cta::size;
      const int row = work.output.rows * Cta::block_rows + Cta::rank() * Cta::size;
      // The bias comes from DRAM. The prefetch loads it into L2 while the consumers still read the
      // bias of the previous gradient tile.
#pragma unroll
      for (int i = 0; i < Cta::consumers * BiasTile::boxes; ++i) {
        ptx::cp_async_bulk_prefetch_tensor_4d(
            map, key + i % BiasTile::boxes * BiasTile::box_columns, row + i / BiasTile::boxes * 64,
            work.output.heads, work.output.batch);
      }
#pragma unroll
      for (int consumer = 0; consumer < Cta::consumers; ++consumer) {
        const unsigned full = cta.bias_full(consumer);
        ptx::mbarrier_wait(cta.bias_empty(consumer), phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, BiasTile::bytes);
        load_boxes<BiasTile>(cta.bias_address(consumer), map, key, row + 64 * consumer,
                             work.output.heads, work.output.batch, full, ptx::l2_evict_first);
      }
      phase ^= 1;
    }
  }
};

// Bias of one of a lane's rows in shared memory. The lane has two of every eight keys. `row` points
// to the first of these keys, at the address that it would have without the swizzle.
template <class Config>
struct HopperStreamedBias {
  using Element = typename Config::Element;
  using Tile = typename HopperBiasCta<Config>::BiasTile;

  const unsigned char* row;
  int phase;  // offset that the swizzle combines by XOR with the chunk's offset, in bytes

  template <class Load>
  __device__ float bias(int step, Load) const {
    const int chunk = step / 8;
    const unsigned two = *reinterpret_cast<const unsigned*>(row + chunk / 8 * Tile::box_bytes +
                                                            (chunk % 8 * 16 ^ phase));
    return widen(Element{static_cast<unsigned short>(step % 2 ? two >> 16 : two)});
  }
};

// Bias of a row, if the bias is broadcast along the keys.
template <class Config, class AnyParams = GradientParams>
struct HopperRowBias {
  const AnyParams& p;
  int batch;
  int head;
  int row;

  template <class Load>
  __device__ auto bias(int, Load) const {
    return p.mods.bias.at(batch, head, row, 0);
  }
};

// Function object for `SoftmaxBackward` that returns the bias of a lane's upper or lower row
// (`half`).
template <class Config>
struct HopperBiasRows {
  using Cta = HopperBiasCta<Config>;
  using Tile = typename Cta::BiasTile;
  static constexpr bool checks_bounds = true;

  const unsigned char* tile;  // bias of the consumer's rows in shared memory
  const GradientParams& p;
  int batch;
  int head;
  int first_row;  // first row of the lane

  __device__ auto operator()(int half) const {
    if constexpr (Config::bias_streamed) {
      const int lane = threadIdx.x % 32;
      const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * half;
      return HopperStreamedBias<Config>{tile + row * Tile::box_row_bytes + lane % 4 * 4,
                                        row % 8 * 16};
    } else if constexpr (!Config::bias_keeps_keys) {
      return HopperRowBias<Config>{p, batch, head, first_row + 8 * half};
    } else {
      return LoadOnDemand();
    }
  }
};

// Compensated sums of a consumer thread in the workspace, for more than `run_length` score tiles. A
// run is the float32 sum of `run_length` score tiles. Each thread reads only what it has written.
template <class Config>
struct HopperBiasRuns {
  using Cta = HopperBiasCta<Config>;
  static constexpr int run_length = 64;
  static constexpr int count = 64;  // sums of a thread
  static constexpr int threads = 128 * Cta::consumers;
  using Sum = CompensatedSum<float>;

  Sum* const first;
  bool has_runs = false;

  __device__ HopperBiasRuns(const GradientParams& p, int thread)
      : first(static_cast<Sum*>(p.bias_runs) +
              int64(blockIdx.x * Cta::ranks + Cta::rank()) * threads * count + thread) {}

  // Adds a run to the compensated sums, and clears the run.
  __device__ void add(float (&run)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      first[i * threads] = sum_with(run[i], i);
      run[i] = 0;
    }
    has_runs = true;
  }

  // Adds the compensated sums to the last run, so that `run` holds the total.
  __device__ void finish(float (&run)[count]) {
    if (!has_runs) return;
#pragma unroll
    for (int i = 0; i < count; ++i) run[i] = sum_with(run[i], i).total();
    has_runs = false;
  }

 private:
  __device__ Sum sum_with(float x, int i) const {
    Sum sum;
    if (has_runs) sum = first[i * threads];
    sum.add(x);
    return sum;
  }
};

template <class Config, class Gradient>
struct HopperBiasConsumer {
  using Element = typename Config::Element;
  using Cta = HopperBiasCta<Config>;
  using Work = HopperBiasWork<Config>;
  using Runs = HopperBiasRuns<Config>;
  using Product = float[64];
  static constexpr int size = Cta::size;
  static constexpr int chunks = ceil_div(Config::head_dim, 64);
  static constexpr int chunks_v = ceil_div(Config::head_dim_v, 64);
  // Number of 64-column chunks of dP that are issued before the exponentials, and overlap them.
  static constexpr int chunks_ahead = chunks_v < 2 ? chunks_v : 2;
  static_assert(Cta::slots > chunks_ahead, "slots of these chunks and of the last one of S");

  const Cta& cta;
  const int consumer;
  const int thread;
  const float scale_log2;
  PipelineState<Cta::slots> ring = {};  // next slot to be read
  PipelineState<Cta::slots> read = {};  // next slot to be released
  int bias_phase = 0;
  Runs runs;
  RowStats<float> stats[2];  // row statistics of the lane's two rows
  Product sums;

  __device__ HopperBiasConsumer(const Cta& cta, int consumer)
      : cta(cta),
        consumer(consumer),
        thread(threadIdx.x % 128),
        scale_log2(signed_scale<Config, double>(cta.p) * SoftmaxMath<double>::log2_e),
        runs(cta.p, consumer * 128 + threadIdx.x % 128) {}

  __device__ void run() {
    for (Work work(cta); work.has_item(); work.next_item()) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] = 0;
      if (work.has_tile()) {
        add_tiles(work);
        runs.finish(sums);
      }
      if (cta.p.dbias.parts > 1) {
        const BiasGradient& gradient = cta.p.dbias;
        const int64 elements =
            int64(gradient.batch) * gradient.heads * gradient.rows * gradient.keys;
        write(static_cast<float*>(cta.p.bias_parts) + work.part() * elements, work.output);
      } else {
        write(static_cast<Gradient*>(cta.p.dbias.data), work.output);
      }
    }
  }

 private:
  // ---- Position of the lane in the tile: rows lane_row() and lane_row() + 8, and two of every
  // ---- eight keys, starting at lane_key().

  __device__ int lane() const { return thread % 32; }
  __device__ int warp() const { return thread / 32; }
  __device__ int lane_row() const { return consumer * 64 + warp() * 16 + lane() / 4; }
  __device__ int lane_key() const { return lane() % 4 * 2; }

  // ---- Sums of dS.

  __device__ void add_tiles(Work& work) {
    for (int length = 0;;) {
      // The statistics arrive while the products run.
      load_stats(work);
      Product scores, gradients;
      start<Config::head_dim, 0, chunks>(scores, [&](int chunk) {
        if (chunk > 0) finish_chunk<1>();
      });
      start<Config::head_dim_v, 0, chunks_ahead>(gradients, [](int) {});
      finish_chunk<chunks_ahead>();
      ptx::pin(scores);
      compute_p(scores, work);
      work.next_tile();
      if (!work.has_tile()) release_bias();
      start<Config::head_dim_v, chunks_ahead, chunks_v>(gradients,
                                                        [&](int) { finish_chunk<chunks_ahead>(); });
      ptx::wgmma_wait_group<0>();
      ptx::pin(gradients);
#pragma unroll
      for (int i = 0; i < chunks_ahead; ++i) release();
      add_ds(scores, gradients);
      if (!work.has_tile()) return;
      if (++length == Runs::run_length) {
        runs.add(sums);
        length = 0;
      }
    }
  }

  // Loads the row statistics of a score tile.
  __device__ void load_stats(const Work& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stats[half] = row_stats_of<Config>(cta.p, cta.sequence(work.batch()), work.head(),
                                         work.row() + lane_row() + 8 * half);
    }
  }

  // Issues the 64-column chunks [First, End) of a product of the consumer's rows and the keys.
  // Calls `after(chunk)` after each chunk.
  template <int Dim, int First, int End, class After>
  __device__ void start(Product& product, After after) {
    constexpr int k_steps = round_up(Dim, 16) / 16;
#pragma unroll
    for (int chunk = First; chunk < End; ++chunk) {
      ptx::mbarrier_wait(cta.full(ring.index), ring.phase);
      if (chunk == 0) ptx::pin(product);
      ptx::wgmma_fence();
      const unsigned long long rows =
          Cta::Operand::k_along_columns() + cta.rows_descriptor(ring.index, consumer);
      const unsigned long long keys =
          Cta::Operand::k_along_columns() + cta.keys_descriptor(ring.index);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (4 * chunk + step >= k_steps) break;
        constexpr int step_units = Cta::Operand::column_step(1) / 16;
        Wgmma<Element, size>::multiply(product, rows + step * step_units, keys + step * step_units,
                                       chunk + step > 0);
      }
      ptx::wgmma_commit_group();
      ring.advance();
      after(chunk);
    }
  }

  // Waits until at most `Pending` chunks are in flight, and releases the slot of the oldest chunk
  // that has not been released.
  template <int Pending>
  __device__ void finish_chunk() {
    ptx::wgmma_wait_group<Pending>();
    release();
  }

  // Releases a slot to the loaders of all CTAs of the cluster.
  __device__ void release() {
    const unsigned empty = cta.empty(read.index);
    if constexpr (Cta::ranks == 1) {
      arrive_warp(empty);
    } else {
      __syncwarp();
      if (lane() < Cta::ranks) ptx::mbarrier_arrive_at_cta(ptx::map_to_cta(empty, lane()));
    }
    read.advance();
  }

  // Returns whether some pairs of the consumer's rows and the keys are masked or do not exist.
  __device__ bool is_masked(const Work& work) const {
    const int first = work.row() + consumer * 64, last = first + 63, end = work.key() + size;
    return end > cta.p.seqlen_k || last >= cta.p.seqlen_q || cta.mask.visible_end(first) < end ||
           cta.mask.visible_begin(last) > work.key();
  }

  // Converts S to P.
  __device__ void compute_p(Product& scores, const Work& work) const {
    if constexpr (Cta::streams_bias) ptx::mbarrier_wait(cta.bias_full(consumer), bias_phase);
    const Sequence sequence = cta.sequence(work.batch());
    using Backward = SoftmaxBackward<Config, 2, 32, GradientParams, HopperBiasRows<Config>>;
    const Backward softmax_backward = {
        cta.p, cta.mask, sequence, work.batch(), work.head(), scale_log2, 1, 0,
        {Cta::memory() + Cta::bias_offset + consumer * Cta::BiasTile::bytes, cta.p, work.batch(),
         work.head(), work.row() + lane_row()}};
    const auto run = [&](auto masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // `opaque` keeps the compiler from loading the bias of both rows at once, for which there
        // are not enough registers.
        const int key = ptx::opaque(work.key() + lane_key());
        softmax_backward.template compute_p<masked.value>(
            [&](int r) { return work.row() + lane_row() + 8 * r; }, key,
            [&](int r) { return stats[r]; },
            [&](int r, int n) -> float& { return scores[n / 2 * 4 + 2 * r + n % 2]; },
            [](int n) { return n / 2 * 8 + n % 2; }, half, half + 1);
      }
    };
    is_masked(work) ? run(Const<true>()) : run(Const<false>());
  }

  __device__ void release_bias() {
    if constexpr (Cta::streams_bias) {
      // The reads of the bias must complete before TMA overwrites it.
      ptx::fence_proxy_async();
      arrive_warp(cta.bias_empty(consumer));
      bias_phase ^= 1;
    }
  }

  // Adds dS = P (dP - delta) to the sums. A masked pair has P = 0. A selection skips it, because
  // its dP may be NaN.
  __device__ void add_ds(const Product& scores, const Product& gradients) {
    static_assert(Config::may_mask_pairs, "a bias of -inf masks its pair");
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const float gradient = gradients[i] - stats[i / 2 % 2].delta;
      bool has_gradient = scores[i] != 0;
      if constexpr (zeroes_one_key_ds<Config>) {
        has_gradient = has_gradient && !(scores[i] > p_of_one_key<Element>);
      }
      if (has_gradient) sums[i] = fma(scores[i], gradient, sums[i]);
    }
  }

  // ---- Results.

  template <class Result>
  __device__ void write(Result* result, const ScoreTiles& output) const {
    const BiasGradient& gradient = cta.p.dbias;
    result += (int64(output.batch) * gradient.heads + output.heads) * gradient.rows * gradient.keys;
    const int row = output.rows * Cta::block_rows + Cta::rank() * size + lane_row();
    const int first_key = output.keys * size;
    if constexpr (!Config::bias_keeps_rows) {
      write_line(result, first_key);
    } else if constexpr (!Config::bias_keeps_keys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_keys(half);
        if (lane() % 4 == 0 && row + 8 * half < gradient.rows) {
          result[row + 8 * half] = narrow<Result>(sum);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write_row(result + int64(row + 8 * half) * gradient.keys, half, first_key,
                  row + 8 * half < gradient.rows);
      }
    }
  }

  // Writes the lane's elements of a row of the tile, if the row exists. Called by all lanes.
  template <class Result>
  __device__ void write_row(Result* row, int half, int first_key, bool exists) const {
    const int keys = cta.p.dbias.keys;
    const bool is_aligned = keys % 4 == 0;
    if constexpr (sizeof(Result) == 2) {
      const int lane_column = lane() % 2 * 8 + lane() % 4 / 2 * 4;
#pragma unroll
      for (int i = 0; i < size / 16; ++i) {
        const float* two = sums + 8 * i + 2 * half;
        const Vector<Result, 4> four = exchange_columns<Result>(pack<Result>(two[0], two[1]),
                                                                pack<Result>(two[4], two[5]));
        const int key = first_key + 16 * i + lane_column;
        if (!exists) continue;
        if (is_aligned) {
          store_columns<1, 8>(row + key, four, keys - key);
        } else {
          store_columns<1, 2>(row + key, four, keys - key);
        }
      }
    } else {
      if (!exists) return;
#pragma unroll
      for (int j = 0; j < size / 8; ++j) {
        const float* two = sums + 4 * j + 2 * half;
        const int key = first_key + 8 * j + lane_key();
        if (is_aligned && key < keys) {
          const Vector<Result, 2> pair = {narrow<Result>(two[0]), narrow<Result>(two[1])};
          *reinterpret_cast<Vector<Result, 2>*>(row + key) = pair;
        } else {
          if (key < keys) row[key] = narrow<Result>(two[0]);
          if (key + 1 < keys) row[key + 1] = narrow<Result>(two[1]);
        }
      }
    }
  }

  // Writes the sums over the rows of both consumers: one for each key or, if keys are broadcast,
  // too, one for all keys.
  template <class Result>
  __device__ void write_line(Result* result, int first_key) const {
    float* const lines = reinterpret_cast<float*>(Cta::memory() + Cta::lines_offset);
    float* const line = lines + (consumer * 4 + warp()) * size;
    if constexpr (Config::bias_keeps_keys) {
#pragma unroll
      for (int j = 0; j < size / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float sum = sum_of_rows(sums[4 * j + c] + sums[4 * j + 2 + c]);
          if (lane() < 4) line[8 * j + lane_key() + c] = sum;
        }
      }
    } else {
      const float sum = sum_of_rows(sum_of_keys(0) + sum_of_keys(1));
      if (lane() == 0) *line = sum;
    }
    Cta::sync_consumers();
    const int key = consumer * 128 + thread;
    const int count = Config::bias_keeps_keys ? min(size, cta.p.dbias.keys - first_key) : 1;
    if (key < count) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < 4 * Cta::consumers; ++warp) sum += lines[warp * size + key];
      result[first_key + key] = narrow<Result>(sum);
    }
    // The next tile's sums overwrite the lines.
    Cta::sync_consumers();
  }

  // Returns the sum over the keys of one of the lane's rows, in all lanes of the row.
  __device__ float sum_of_keys(int half) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < size / 8; ++j) {
      sum += sums[4 * j + 2 * half] + sums[4 * j + 2 * half + 1];
    }
    return sum_of_lanes(sum);
  }
  // Returns the sum over the lanes of a warp that hold the same keys of different rows.
  __device__ static float sum_of_rows(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  }
};

template <class Config, class Gradient>
__device__ void compute_hopper_bias_gradient(const GradientMaps& maps, const GradientParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Cta = HopperBiasCta<Config>;
  const Cta cta(p, maps, ptx::shared_address(shared_memory));
  if (threadIdx.x == 0) {
    cta.init_barriers();
    cta.init_work_sizes();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
    ptx::prefetch_tensormap(&maps.dout);
  }
  // The peer CTA also uses the barriers.
  sync_start<Cta::ranks>();
  // The shuffle tells the compiler that `warp` is uniform within a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::bias_producer_registers>();
    const bool is_first = threadIdx.x % 32 == 0;
    if (warp == 0 && is_first) HopperBiasLoader<Config>{cta}.load_all();
    if constexpr (Cta::streams_bias) {
      if (warp == 1 && is_first) HopperBiasTileLoader<Config>{cta}.load_all();
    }
  } else {
    ptx::setmaxnreg_inc<Config::bias_consumer_registers>();
    HopperBiasConsumer<Config, Gradient>(cta, warp / 4 - 1).run();
  }
  // A CTA must not exit while its peer CTA still loads into its slots or arrives at its barriers.
  if constexpr (Cta::ranks > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

template <class Config, class Input, class Offset, int Rank, bool ContiguousLast>
__device__ void dispatch_hopper_bias_gradient(
    const GradientMaps& maps, const GradientParams& p,
    const Capture<Input, Offset, Rank, ContiguousLast>&) {
  using Gradient = typename GradientType<Config, Input>::type;
  compute_hopper_bias_gradient<Config, Gradient>(maps, p);
}

template <class Config>
__device__ void hopper_bias_gradients(const GradientMaps& maps, const GradientParams& p) {
  dispatch_hopper_bias_gradient<Config>(maps, p, p.mods.bias);
}

#endif  // __CUDA_ARCH__ == 900
