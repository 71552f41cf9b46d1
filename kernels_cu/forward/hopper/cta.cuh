// Common state of the warps of a CTA of the Hopper kernel: rings of tiles in shared memory with
// their barriers, the work tiles in flight, and the addresses of results.
#pragma once

#include "forward/hopper/float8/float8.cuh"
#include "forward/hopper/operand.cuh"
#include "scheduler/varlen_order.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/sequences.cuh"
#include "scheduler/split_kv.cuh"
#include "scheduler/work_tile.cuh"
#include "params.cuh"
#include "ptx/sm90a.cuh"
#include "score/degenerate_rows.cuh"
#include "tile/element.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"
#include "tile/tma_tile.cuh"

struct TensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
};

// Tensor maps of kernels that load a bias by TMA.
struct BiasedTensorMaps : TensorMaps {
  TensorMap bias;
};

// Tensor maps of MLA kernels; `q_rest` and `k_rest` cover the columns after the first head_dim_v.
struct MlaTensorMaps : TensorMaps {
  TensorMap q_rest;
  TensorMap k_rest;
};

#if __CUDA_ARCH__ == 900

// Returns how many columns of a head each of its `cta_ranks` CTAs has. The last CTA may have fewer.
__host__ __device__ constexpr int hopper_columns(int dim, int cta_ranks) {
  return cta_ranks == 1 ? dim : round_up(ceil_div(dim, cta_ranks), 16);
}

template <class Config>
struct HopperCta {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int consumers = Br / 64;
  // Number of component tiles stored consecutively for each tile: 3 for float32, otherwise 1.
  static constexpr int components = HopperOperand<Element>::components;
  // Number of CTAs that split head_dim (`peer_exchange.cuh`): 2 for heads wider than 256, else 1.
  static constexpr int cta_ranks = Config::head_dim > 256 || Config::head_dim_v > 256 ? 2 : 1;
  static constexpr int columns = hopper_columns(Config::head_dim, cta_ranks);
  static constexpr int columns_v = hopper_columns(Config::head_dim_v, cta_ranks);
  // MLA: V is a prefix of K's columns, and one stage holds both. Each CTA also has half of the
  // columns of K that are not in V.
  static constexpr bool values_in_keys = Config::values_in_keys;
  static constexpr int columns_rest = values_in_keys ? columns - columns_v : 0;
  using Output = typename HopperOutput<Element>::type;
  using Tiles = HopperTiles<Config, columns, columns_v>;
  using QueryTile = typename Tiles::QueryTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  static constexpr bool transposes_values = HopperOperand<Element>::transposes_values;
  using BiasTile = TmaTile<Br, Bc>;
  static constexpr bool streams_bias = Config::bias_stages > 0;

  static constexpr int q_stage_bytes = components * QueryTile::bytes;
  static constexpr int stage_bytes =
      components * (KeyTile::bytes > ValueTile::bytes ? KeyTile::bytes : ValueTile::bytes);
  static_assert(Br % 64 == 0 && consumers >= 1 && consumers <= 3, "64 rows for each consumer");
  static_assert(Bc % 16 == 0 && Bc <= 256, "both products consist of whole wgmma instructions");
  static_assert(!Config::has_seqlens || !Config::split_keys || values_in_keys,
                "with sequences, keys are split only for MLA");
  static_assert(!values_in_keys || (cta_ranks > 1 && components == 1 && !Config::skips_tiles),
                "MLA needs CTA pairs and 16-bit elements without modifications");
  static_assert(!values_in_keys || (columns_v % 32 == 0 && columns_rest % 32 == 0),
                "V columns and the other columns form whole boxes");
  static_assert(Config::page_size % Bc == 0, "a KV tile belongs to one page");
  static_assert((components == 1 && !transposes_values) ||
                    (!Config::has_seqlens && !Config::split_keys && !Config::modified),
                "float32 and float8 support only equal lengths without splits or modifications");

  using WorkTile = HopperWorkTile<Config>;
  // Entries in the ring of work tiles. The entry of a work tile is read again when its output is
  // written. If the next work tile has a single KV tile, or if all of Q is in registers, the query
  // stage of that next tile may be reloaded before then. In variable-length batches, the scheduler
  // warp writes up to two more work tiles, one of which the producer has fetched.
  static constexpr int work_tile_slots = Config::q_stages + 2 + 2 * Config::has_seqlens;

  // V tile with the last keys of a sequence. The rows after them belong to other sequences.
  struct Tail {
    int stage;  // stage in the ring; -1 after the last tail
    int rows;  // number of rows that belong to the sequence
  };
  // Entries in the ring of tails: one per stage, and the end marker.
  static constexpr int tails = Config::has_seqlens ? Config::stages + 1 : 0;

  // Which consumers need a KV tile, and whether they must mask it. Used if consumers skip KV tiles:
  // the producer then publishes one `KvTileInfo` with each K tile.
  struct KvTileInfo {
    int kv_tile;
    unsigned bits;

    static constexpr unsigned all_consumers = (1u << consumers) - 1;
    static constexpr unsigned first = 1 << 30, end = 1u << 31;
    static_assert(BlockMask::max_slots < 256, "a slot number has eight bits");
    // Returns the bits for one consumer: whether it needs the KV tile, whether the block mask
    // leaves all its pairs of query and key visible (`is_full`, unrelated to the barriers), and the
    // slot in which the block mask stores the visible pairs, counted from 1 (0 if it stores none).
    __device__ static unsigned bits_of(int consumer, bool is_needed, bool is_full,
                                       unsigned pairs_slot) {
      return (unsigned(is_needed) | unsigned(is_full) << 3) << consumer | pairs_slot
                                                                              << (6 + 8 * consumer);
    }
    __device__ static KvTileInfo create(int kv_tile, unsigned bits, bool begins_query_tile) {
      return {kv_tile, bits | (begins_query_tile ? first : 0)};
    }
    __device__ static KvTileInfo end_of_work() { return {-1, end}; }

    __device__ bool is_needed_by(int consumer) const { return bits >> consumer & 1; }
    __device__ bool is_full(int consumer) const { return bits >> (3 + consumer) & 1; }
    __device__ int pairs_slot(int consumer) const { return bits >> (6 + 8 * consumer) & 255; }
    __device__ bool begins_query_tile() const { return bits & first; }
    __device__ bool is_end() const { return bits & end; }
  };
  static constexpr int kv_tile_infos = Config::skips_tiles ? Config::stages : 0;

  // Visible pairs of a partially masked KV tile, for each consumer. They arrive with K and are read
  // before the stage of K is released. K and V alternate in the ring of tiles, so stages / 2 + 1
  // entries suffice: when a stage is free for K, K of this many KV tiles before has been released.
  using TilePairs = VisiblePairs<Bc <= 128 ? 1 : 2>;
  static constexpr int visible_pairs_bytes = TilePairs::threads * int(sizeof(TilePairs));
  static constexpr int visible_pairs_slots = Config::block_mask ? Config::stages / 2 + 1 : 0;

  // Number of receive buffers of each consumer warp for scores of the peer CTA. MLA has one: with
  // two, shared memory would have space for two stages of 64 keys instead of three.
  static constexpr int peer_buffers = cta_ranks > 1 ? (values_in_keys ? 1 : 2) : 0;
  static constexpr int peer_warp_bytes = 16 * Bc * int(sizeof(float));

  // Order in shared memory: rings of query tiles, of K and V tiles, of the bias and of visible
  // pairs, receive buffers, barriers, then work tiles, `Tail` and `KvTileInfo` entries.
  static constexpr int ring_offset = Config::q_stages * q_stage_bytes;
  static constexpr int bias_offset = ring_offset + Config::stages * stage_bytes;
  static constexpr int visible_pairs_offset = bias_offset + Config::bias_stages * BiasTile::bytes;
  static constexpr int peer_offset =
      visible_pairs_offset + visible_pairs_slots * consumers * visible_pairs_bytes;
  static constexpr int barrier_offset =
      peer_offset + peer_buffers * 4 * consumers * peer_warp_bytes;
  static constexpr int ring_barriers = 2 * (Config::stages + Config::q_stages);
  static constexpr int sequence_barriers = Config::has_seqlens ? 2 + tails : 0;
  static constexpr int peer_barriers = cta_ranks > 1 ? 2 * 4 * consumers : 0;
  static constexpr int barriers =
      ring_barriers + sequence_barriers + 2 * Config::bias_stages + peer_barriers;
  static constexpr int work_tile_offset = barrier_offset + barriers * 8;
  static constexpr int tail_offset = work_tile_offset + work_tile_slots * int(sizeof(WorkTile));
  static constexpr int kv_tile_info_offset = tail_offset + tails * int(sizeof(Tail));
  static_assert(kv_tile_info_offset + kv_tile_infos * int(sizeof(KvTileInfo)) ==
                    Config::shared_memory,
                "as the host planned");

  const Params& p;
  const TensorMaps& maps;
  const unsigned shared;

  // Addresses of barriers. The phase of full(stage) ends when the bytes of the stage have arrived,
  // and that of empty(stage) when all consumer warps have released the stage.

  __device__ unsigned full(int stage) const { return shared + barrier_offset + stage * 8; }
  __device__ unsigned empty(int stage) const { return full(Config::stages + stage); }
  __device__ unsigned q_full(int stage) const { return full(2 * Config::stages + stage); }
  __device__ unsigned q_empty(int stage) const { return q_full(Config::q_stages + stage); }
  // The scheduler warp arrives at work_tile_full() to pass a work tile to the producer, which
  // arrives at work_tile_empty() to request one. The phase of tail_loaded() ends when a V tile with
  // a `Tail` has been loaded.
  __device__ unsigned work_tile_full() const { return full(ring_barriers); }
  __device__ unsigned work_tile_empty() const { return full(ring_barriers + 1); }
  __device__ unsigned tail_loaded(int index) const { return full(ring_barriers + 2 + index); }

  __device__ unsigned bias_full(int stage) const {
    return full(ring_barriers + sequence_barriers + stage);
  }
  __device__ unsigned bias_empty(int stage) const { return bias_full(Config::bias_stages + stage); }

  // Barrier for the scores that the peer CTA sends to a consumer warp.
  __device__ unsigned peer_full(int buffer, int warp) const {
    return full(barriers - peer_barriers + buffer * 4 * consumers + warp);
  }
  // With one buffer: the barrier at which the peer CTA arrives after it has read what it received.
  __device__ unsigned peer_read(int warp) const { return peer_full(1, warp); }

  __device__ void init_barriers() const {
    // Each consumer warp arrives to release a stage.
    constexpr int warps = 4 * consumers;
    for (int stage = 0; stage < Config::stages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), warps);
    }
    for (int stage = 0; stage < Config::q_stages; ++stage) {
      ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init(q_empty(stage), warps);
    }
    for (int stage = 0; stage < Config::bias_stages; ++stage) {
      ptx::mbarrier_init(bias_full(stage), 1);
      ptx::mbarrier_init(bias_empty(stage), warps);
    }
    if constexpr (Config::has_seqlens) {
      ptx::mbarrier_init(work_tile_full(), 1);
      ptx::mbarrier_init(work_tile_empty(), 1);
      for (int index = 0; index < tails; ++index) ptx::mbarrier_init(tail_loaded(index), 1);
    }
    // The last barriers are peer_full() and peer_read(); full(index) is the address of barrier
    // number `index` of all.
    for (int index = barriers - peer_barriers; index < barriers; ++index) {
      ptx::mbarrier_init(full(index), 1);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ WorkTile* work_tile_at(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<WorkTile*>(shared_memory + work_tile_offset) + index;
  }

  __device__ Tail* tail(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Tail*>(shared_memory + tail_offset) + index;
  }

  __device__ KvTileInfo* kv_tile_info(int stage) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<KvTileInfo*>(shared_memory + kv_tile_info_offset) + stage;
  }

  __device__ static int next_work_tile_slot(int index) {
    return index + 1 == work_tile_slots ? 0 : index + 1;
  }

  __device__ unsigned stage_address(int stage) const {
    return shared + ring_offset + stage * stage_bytes;
  }

  __device__ unsigned bias_address(int stage) const {
    return shared + bias_offset + stage * BiasTile::bytes;
  }

  __device__ unsigned peer_address(int buffer, int warp) const {
    return shared + peer_offset + (buffer * 4 * consumers + warp) * peer_warp_bytes;
  }

  // Returns an address as matrix descriptors hold it, in units of 16 bytes. In a cluster, the upper
  // bits of an address hold the CTA rank. They are dropped, since in a descriptor they would change
  // the stride between TMA boxes.
  __device__ static unsigned descriptor_address(unsigned address) {
    constexpr unsigned window_bytes = 1 << 18;
    return (cta_ranks == 1 ? address : address % window_bytes) / 16;
  }

  __device__ unsigned visible_pairs_address(int stage, int consumer) const {
    return shared + visible_pairs_offset + (stage * consumers + consumer) * visible_pairs_bytes;
  }

  __device__ const TilePairs& visible_pairs(int stage, int consumer) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<const TilePairs*>(
        shared_memory + visible_pairs_offset)[(stage * consumers + consumer) * TilePairs::threads +
                                              threadIdx.x % TilePairs::threads];
  }

  // Returns the index of this CTA among those that split head_dim.
  __device__ static int cta_rank() { return cta_ranks == 1 ? 0 : blockIdx.z; }
  __device__ static int first_column_v() { return cta_rank() * columns_v; }
  // Returns the number of output columns from the first one of this CTA to the end of the head.
  __device__ static int columns_left_v() { return Config::head_dim_v - first_column_v(); }
  static constexpr bool has_whole_columns_v = cta_ranks * columns_v == Config::head_dim_v;

  // Returns the work tile number of this CTA, or CTA pair, in a round over the grid. Within a
  // section, tiles are in order of decreasing length (tile_coord.cuh). Odd rounds run backwards, so
  // that the CTA with the longest tile of one round gets the shortest tile of the next.
  __device__ static unsigned tile_of(unsigned round) {
    const unsigned index = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + index;
  }

  __device__ WorkTile work_tile_of(unsigned round) const {
    // Unsigned: there are up to 2^31 - 1 tiles, and a round may run past the last one.
    const unsigned tiles = ceil_div(p.seqlen_q, Br) * p.batch * p.heads_q * p.num_splits;
    const unsigned tile = tile_of(round);
    if (tile >= tiles) return WorkTile::end_of_work();
    const TileCoord coord = tile_coord<Br>(p, tile);
    if constexpr (Config::block_mask) {
      return masked_work_tile(p, coord);
    } else {
      return WorkTile::create(p, coord, key_tiles(p, coord));
    }
  }

  __device__ static KvTileRange key_tiles(const Params& p, const TileCoord& coord) {
    const int q_end = min(coord.q_begin + Br, p.seqlen_q);
    return kv_tile_range<Bc, Config::split_keys>(Mask<Config>(p, coord.batch), coord.q_begin, q_end,
                                                 coord.split, p.num_splits);
  }

  // Returns a work tile for a block mask, which lists the query tiles of a head sorted by length.
  // `keys` is a range of KV tiles.
  template <class AnyParams>
  __device__ static WorkTile masked_work_tile(const AnyParams& p, TileCoord coord) {
    const int position = ceil_div(p.seqlen_q, Br) - 1 - coord.q_begin / Br;
    const MaskedTile sorted = p.block_mask.sorted_tile(coord.batch, coord.head, position);
    coord.q_begin = sorted.tile * Br;
    KvTileRange keys = key_tiles(p, coord);
    keys.begin = max(keys.begin, sorted.begin);
    keys.end = max(keys.begin, min(keys.end, sorted.end));
    if constexpr (Config::split_keys) {
      const MaskedBlocks<consumers> blocks = masked_blocks(p, coord);
      keys.begin = blocks.first_nonempty(keys.begin, keys.end);
      if (keys.begin < keys.end) keys.end = blocks.last_nonempty_before(keys.end) + 1;
    }
    return WorkTile::create(p, coord, keys);
  }

  template <class AnyParams>
  __device__ static MaskedBlocks<consumers> masked_blocks(const AnyParams& p,
                                                          const TileCoord& coord) {
    return {p.block_mask, coord.batch, coord.head, coord.q_begin / Br};
  }

  // The producer requests the next work tile from the scheduler warp when it loads the KV tile that
  // comes `work_tile_prefetch` tiles before the last one of the current work tile.
  static constexpr int work_tile_prefetch = 2;

  // CTA pairs take query tiles by index, not from a counter. Each CTA sorts the sequences itself.
  static constexpr bool builds_order = Config::has_seqlens && cta_ranks > 1;

  // Returns the order of the sequences, in the workspace after partial results and other orders.
  __device__ static VarlenOrder order_of(const Params& p) {
    const VarlenOrder order(p);
    if constexpr (builds_order) {
      return order.offset_by(partial_words(p) +
                             (blockIdx.z * gridDim.x + blockIdx.x) * VarlenOrder::words(p.batch));
    } else if constexpr (Config::split_keys) {
      return order.offset_by(partial_words(p));
    } else {
      return order;
    }
  }

  // Returns the number of 32-bit words of partial results in the workspace; 0 if KV is not split.
  __device__ static int64 partial_words(const Params& p) {
    if constexpr (!Config::split_keys) return 0;
    return p.num_splits * Partials<Config>(p).rows * Partials<Config>::numbers;
  }

  // The threads that sort the sequences. TMA later overwrites the shared memory that they use.
  struct OrderBuilders {
    static constexpr bool deterministic = true;
    __device__ static unsigned threads() { return 128; }
    __device__ static void sync() { NamedBarrier<128>{1 + consumers}.sync(); }
  };
  __device__ void build_order() const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    order_of(p).template build<Br, OrderBuilders>(p, reinterpret_cast<int*>(shared_memory));
    ptx::fence_proxy_async();
    OrderBuilders::sync();
  }

  __device__ int64 lse_index(const WorkTile& work_tile, int row) const {
    const TileCoord& coord = work_tile.coord;
    if constexpr (Config::has_seqlens) {
      return Partials<Config>::row_index(p, work_tile.sequence(p), coord.batch, coord.head, row);
    } else {
      return Partials<Config>::row_index(p, coord.batch, coord.head, row);
    }
  }

  // Writes the log-sum-exp of a row of a KV split in the form of an `ExponentSum`.
  __device__ void write_log_sum_exp(const WorkTile& work_tile, int row,
                                    const ExponentSum<float>& sum) const {
    Partials<Config>(p).set(p, work_tile.coord.split, lse_index(work_tile, row), sum);
  }
  __device__ void write_log_sum_exp(const WorkTile& work_tile, int row, float lse) const {
    const TileCoord& coord = work_tile.coord;
    const Partials<Config> partials(p);
    const int64 index = lse_index(work_tile, row);
    if (Config::split_keys) {
      *partials.lse_row(coord.split, index) = lse;
    } else {
      static_cast<float*>(p.lse)[index] = lse;
    }
  }

  __device__ void write_statistics(const WorkTile& work_tile, int row,
                                   const RowSummary<float>& summary) const {
    const int64 index = lse_index(work_tile, row);
    if constexpr (Config::split_keys) {
      Partials<Config>(p).set_statistics(p, work_tile.coord.split, index, summary);
    } else {
      ::write_statistics<Config>(p, index, summary);
    }
  }

  // The row index needs no sequence: with sequences, only MLA splits keys, and its queries are not
  // packed.
  __device__ float* partial_row(const TileCoord& coord, int row) const {
    const Partials<Config> partials(p);
    return partials.out_row(coord.split, partials.row_index(p, coord.batch, coord.head, row));
  }

  __device__ Output* output_row(const WorkTile& work_tile, int row) const {
    const Sequence& sequence = work_tile.sequence(p);
    return p.out.head<Output>(sequence.q_batch, work_tile.coord.head) +
           (sequence.q_first + row) * p.out.row_stride;
  }

  // Returns whether the scheduler warp writes an output row. Consumers compute a fully masked row
  // as 0 times values that other rows attend to, which may be NaN. For a float32 row that attends
  // to one key, p v / p may differ from v. In variable-length batches, consumers do not write such
  // rows; otherwise the scheduler warp overwrites them at the end. With modifications, consumers
  // write all rows, as only they know which rows a function or an array masks. Windows and prefixes
  // are modifications, too, although they mask by position.
  __device__ bool is_written_by_scheduler(const WorkTile& work_tile, int row) const {
    return !Config::modified &&
           work_tile.template mask<Config>(p).visible_end(row) <= max_degenerate_keys<Element>;
  }
  __device__ bool scheduler_writes_rows() const {
    return Config::causal && !Config::has_seqlens && !Config::modified &&
           p.q_offset < max_degenerate_keys<Element>;
  }
  // At this barrier, the scheduler warp waits for the consumers before it overwrites their rows.
  static constexpr NamedBarrier<128 * consumers + 32> consumers_done = {1 + consumers};
};

#endif  // __CUDA_ARCH__ == 900
