// Common state of the threads of a CTA of the decode kernel: its shared memory, its current
// partial tile and the query rows of that tile. A partial tile (`PartialTile`) is a query tile of
// one KV head with a range of its keys. Row r of all query tiles of a KV head is query r / group of
// query head r % group in the group of that KV head.
#pragma once

#include "forward/decode/scales.cuh"
#include "forward/decode/column_warps.cuh"
#include "params.cuh"
#include "ptx/base.cuh"
#include "ptx/stream.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"
#include "tile/products_8bit.cuh"
#include "tile/warp_columns.cuh"
#include "scheduler/sequences.cuh"
#include "scheduler/kv_partition.cuh"

#if __CUDA_ARCH__ >= 800

// Class of the matrix products for a 16-bit or 8-bit cache, and the type to which P is rounded.
template <class Config, int row_tiles, bool quantized>
struct DecodeProducts {
  using type = Products16Bit<WarpColumnsConfig<Config>, row_tiles>;
  using Probability = typename Config::Element;
};
template <class Config, int row_tiles>
struct DecodeProducts<Config, row_tiles, true> {
  using type = Products8Bit<WarpColumnsConfig<Config>, row_tiles>;
  using Probability = half_t;
};

template <class Config>
struct DecodeCta {
  using Element = typename Config::Element;
  using Stored = typename CacheOf<Config>::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int warps = Config::warps;
  static constexpr int stages = Config::stages;
  static constexpr int row_tiles = Br / 16;
  static constexpr int group = Config::group;  // query heads per KV head
  using ProductsOf = DecodeProducts<Config, row_tiles, Config::quantized>;
  using Products = typename ProductsOf::type;
  using KeyLayout = typename Products::KeyLayout;
  using ValueLayout = typename Products::ValueLayout;
  using QueryLayout = SwizzledRows<Element, Products::columns>;
  using ColumnWarps = DecodeColumnWarps<Config>;

  static_assert(Br == 16 || Br == 32, "a warp holds all rows");
  static_assert(Bc == 16 || Bc == 32, "a lane looks up the page of at most one row");
  static_assert(Config::q_in_registers, "queries are kept in registers");
  static_assert(stages >= 2, "at least double buffering");

  // Shared memory: one ring per warp, whose stages hold keys, values and scales. If V is a prefix
  // of K's columns (MLA), V is read from the stage of K.
  static constexpr int key_bytes = Bc * KeyLayout::row_bytes;
  static constexpr int values_offset = Config::values_in_keys ? 0 : key_bytes;
  static constexpr int scales_offset = values_offset + Bc * ValueLayout::row_bytes;
  static constexpr int stage_bytes = scales_offset + DecodeScales<Config>::bytes;
  static constexpr int ring_bytes = stages * stage_bytes;
  static constexpr int key_warp_bytes = ColumnWarps::size * ring_bytes;
  static constexpr int rings_bytes = ColumnWarps::key_warps * key_warp_bytes;

  static_assert(Br * QueryLayout::row_bytes <= stage_bytes, "queries are loaded through a stage");

  // A partial result is one record of floats per row: output columns, base of the probabilities,
  // and their sum. The largest score and the moment (score/statistics.cuh) follow if the call
  // returns row statistics. The records overwrite the rings of the warps that computed them.
  static constexpr int columns = Products::columns_v;  // columns per warp
  static constexpr int record_columns = ColumnWarps::size * columns;
  // The state of a row takes 2 to 4 floats. Padding to 8 avoids bank conflicts: writing 16 rows of
  // each of 8 warps takes 730 instead of 990 cycles (H100).
  static constexpr int record = record_columns + 8;
  // Number of 4-column chunks of a record that hold output columns.
  static constexpr int output_chunks = round_up(Config::head_dim_v, 16) / 4;
  // Sizes of a slice of the columns, which one CTA of a cluster merges (decode/merge_slice.cuh).
  static constexpr bool in_cluster = Config::cluster > 0;
  static constexpr int slices = in_cluster ? Config::cluster : 1;
  static constexpr int slice_chunks = (output_chunks + slices - 1) / slices;
  static constexpr int slice_record = 4 * slice_chunks + 4;
  static_assert(slice_record <= record, "a slice fits in the space of a whole result");
  static_assert(Br * record * 4 <= key_warp_bytes, "a partial result fits");
  static_assert(MergeGroup::fan_in <= Br, "a row of each result of a merge group fits");

  // Order in shared memory: the rings, buffers through which column warps sum their scores, receive
  // buffers for the results of other CTAs of a cluster (all columns or a slice), and `State`.
  static constexpr int receive_floats = Config::receive_rows * record;
  static constexpr int receive_offset = rings_bytes + ColumnWarps::bytes;
  static constexpr int state_offset = receive_offset + Config::cluster * receive_floats * 4;

  // State of the current partial tile, kept in shared memory to save registers. `results_barrier`
  // counts the bytes that other CTAs of a cluster send.
  struct alignas(16) State {
    unsigned long long results_barrier;
    unsigned long long policy;  // L2 cache policy of KV loads
    WorkRange work_range;
    PartialTile partial_tile;
    bool has_tile;
    bool has_next;  // whether the work range continues after `partial_tile`
    float scale_log2;
  };
  static_assert(state_offset + int(sizeof(State)) == Config::shared_memory, "as the host planned");

  using Arguments = typename CacheOf<Config>::Arguments;
  const Arguments& p;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int lane_seqlen;  // seqused_k[lane], or 0
  State& state;
  const PartialTile& partial_tile;

  __device__ DecodeCta(const Arguments& params)
      : p(params),
        lane_seqlen(load_lane_seqlen(params)),
        state(*reinterpret_cast<State*>(shared_floats() + state_offset / 4)),
        partial_tile(state.partial_tile) {}

  __device__ static float* shared_floats() {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    return reinterpret_cast<float*>(shared_memory);
  }
  __device__ static float* receive_buffer() { return shared_floats() + receive_offset / 4; }
  __device__ static unsigned results_barrier() {
    return ptx::shared_address(shared_floats()) + state_offset;
  }

  // Loads one sequence length per lane. This comes first, since the work range depends on them.
  __device__ static int load_lane_seqlen(const Params& p) {
    const int lane = threadIdx.x % 32;
    int used = 0;
    if (Config::has_seqlens && Config::balanced && p.seqused_k != nullptr && lane < p.batch) {
      used = ptx::ld_global(p.seqused_k + lane);
    }
    return used;
  }

  // Computes the work range of the CTA and the keys of its first partial tile, on which all loads
  // depend. set_merge_info() computes the rest later.
  __device__ void init_work_range() const {
    if (warp == 0) {
      WorkRange work_range;
      KvPartitioner<Config> partitioner(p, work_range, lane_seqlen);
      partitioner.init_work_range();
      if (lane == 0) {
        state.partial_tile.count = 0;
        if constexpr (!Config::small_kv) state.policy = policy_of(partitioner);
        store_next_tile(partitioner);
        state.work_range = work_range;
      }
    }
    // An otherwise idle thread computes the scale.
    if (threadIdx.x == 32 % (32 * warps)) state.scale_log2 = exponent_scale<Config, float>(p);
    __syncthreads();
  }
  // Advances to the next partial tile of the work range.
  __device__ void next_tile() const {
    if (threadIdx.x == 0) {
      WorkRange work_range = state.work_range;
      KvPartitioner<Config> partitioner(p, work_range, lane_seqlen);
      partitioner.advance(partial_tile);
      store_next_tile(partitioner);
      state.work_range = work_range;
    }
    __syncthreads();
  }
  // Fills in the members of `partial_tile` that describe the other partial tiles of its query tile.
  // One thread calls this while the first keys are being loaded; the next barrier publishes the
  // result.
  __device__ void set_merge_info() const {
    WorkRange work_range = state.work_range;
    const KvPartitioner<Config> partitioner(p, work_range, lane_seqlen);
    partitioner.set_merge_info(state.partial_tile);
    state.has_next = partitioner.has_next(partial_tile);
  }

  // Returns the L2 policy for K and V, which are read once. With few bytes of K and V, it is
  // evict_first, so that loads need not wait until dirty lines leave L2 (24 instead of 26 us for
  // 32 MiB). With many, it is 0, no policy: 476 us for 2 GiB, 566 us with evict_normal (H200).
  __device__ unsigned long long policy() const {
    if constexpr (Config::small_kv) {
      const unsigned long long evict_first = ptx::l2_evict_first_policy();
      __builtin_assume(evict_first != 0);
      return evict_first;
    } else {
      return state.policy;
    }
  }

  // Returns the L2 policy, chosen at run time from the total number of keys; 0 means no policy.
  __device__ static unsigned long long policy_of(const KvPartitioner<Config>& partitioner) {
    // Number of keys, counted for each KV head, whose K and V take 320 MiB.
    constexpr int v_columns = Config::values_in_keys ? 0 : Config::head_dim_v;
    constexpr int bytes_per_key = (Config::head_dim + v_columns) * int(sizeof(Stored));
    constexpr int64 small_keys = (int64(320) << 20) / bytes_per_key;
    return partitioner.total_keys() < small_keys ? ptx::l2_evict_first_policy() : 0;
  }

  // Stores the next partial tile, if any, in `state.partial_tile`.
  __device__ void store_next_tile(KvPartitioner<Config>& partitioner) const {
    PartialTile next;
    state.has_tile = partitioner.get_tile(next);
    if (!state.has_tile) return;
    state.partial_tile.batch = next.batch;
    state.partial_tile.head_kv = next.head_kv;
    state.partial_tile.row_tile = next.row_tile;
    state.partial_tile.sequence = next.sequence;
    state.partial_tile.begin = next.begin;
    state.partial_tile.end = next.end;
  }

  // Prefetches the block table to L2 while warp 0 computes the work range. Which pages this CTA
  // needs is not known yet, so all CTAs together prefetch the table, one cache line per thread.
  __device__ void prefetch_table() const {
    if (warp == 0) return;
    constexpr int cache_line = 128 / sizeof(int);
    constexpr int lines_per_cta = 32 * (warps - 1);
    const int64 cta = (int64(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int64 first = (cta * lines_per_cta + threadIdx.x - 32) * cache_line;
    if (first < (p.batch - 1) * p.block_table_stride + p.max_pages) {
      ptx::prefetch_l2(p.block_table + first);
    }
  }

  __device__ int first_row() const { return partial_tile.row_tile * Br; }
  __device__ int tile_rows() const {
    return min(Br, partial_tile.sequence.seqlen_q * group - first_row());
  }

  // Returns the query index in the sequence for a row. head_of() returns its head in the group.
  __device__ int query_of(int row) const { return (first_row() + row) / group; }
  __device__ int head_of(int row) const { return (first_row() + row) % group; }

  __device__ int q_offset() const {
    return Config::has_seqlens
               ? partial_tile.sequence.template q_offset<Config>(p, partial_tile.batch)
               : first_position<Config>(p, partial_tile.batch, p.q_offset);
  }
  __device__ Mask<Config, group> mask() const {
    return {partial_tile.sequence.seqlen_k, q_offset(), {p, partial_tile.batch}};
  }
  __device__ int visible_end(int row) const { return mask().visible_end(first_row() + row); }
  __device__ int visible_begin(int row) const { return mask().visible_begin(first_row() + row); }

  // Returns the coordinates of a row for modifications.
  __device__ ScoreRow score_row(int row) const {
    const Sequence& sequence = partial_tile.sequence;
    return {partial_tile.batch, partial_tile.head_kv * group + head_of(row),
            query_of(row),      q_offset(),
            sequence.q_first,   sequence.k_first};
  }
};

#endif  // __CUDA_ARCH__ >= 800
