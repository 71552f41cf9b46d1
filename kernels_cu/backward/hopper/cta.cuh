// Common state of the warps of a CTA of the Hopper gradient kernel: the sequence of query tiles,
// the layout of shared memory, and the barriers.
//
//   thread or warp      waits for                      does                   arrives at
//   loader, a lane      q_empty, dout_empty,           issues TMA loads       q_full, dout_full,
//                         bias_empty                                            bias_full
//   statistics, a warp  q_empty                        copies row statistics  q_full
//   adders, two lanes   semaphore, sums_full           add dq to memory       sums_empty, semaphore
//                       semaphore, if last         load the earlier sums  earlier_sums_full
//   consumers, two      q_full, dout_full, each other  multiply               q_empty, dout_empty
//     warpgroups        bias_full                      compute P              bias_empty
//                       sums_empty                     write their dq sums    sums_full
//                       earlier_sums_full              write dq               sums_full
//
// For wide heads without a dq buffer (split_consumers.cuh), consumers add dq to memory, and two
// lanes operate the semaphore instead of the adders. If a CTA has many KV tiles, there are more
// barriers (kv_tiles.cuh).
//
// A tile may contain rows past the end of its sequence, which belong to other sequences or are
// padding, and query rows that attend to no key. The load of such a tile arrives at a separate
// barrier (`keys_arrived`, `q_arrived`, `dout_arrived`): the row statistics warp waits for it,
// clears those rows and then arrives at the consumers' barrier in the loader's place, because 0
// times NaN is NaN. Other tiles do not pass through that warp, which would delay them. Keys that no
// query attends to may hold NaN, too; consumers clean k before they multiply with it
// (preprocess/clean.cuh).
//
// For wide heads, two CTAs may form a cluster, of one of two kinds:
//
//   head dims              each CTA has                                the CTAs exchange
//   129 to 256 (a pair)    one of two consecutive KV tiles, all        dS (split_consumers.cuh)
//                            columns, and half of the columns of dq
//   257 to 512 (halves)    the same KV tile, and half of the columns   partial scores
//                            of q, k, v and dout                         (score_exchange.cuh)
#pragma once

#include "backward/dq/order.cuh"
#include "backward/params.cuh"
#include "backward/dq/accumulate.cuh"
#include "backward/kv_tile_list.cuh"
#include "backward/query_chunks.cuh"
#include "backward/tile_coord.cuh"
#include "ptx/cluster.cuh"
#include "ptx/sm90a.cuh"
#include "score/mask.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/tma_pipeline.cuh"
#include "tile/tma_tile.cuh"

struct GradientMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
};

// Tensor maps of a kernel if TMA loads the bias, too.
struct BiasGradientMaps : GradientMaps {
  TensorMap bias;
};

#if __CUDA_ARCH__ == 900

// Returns an address for use in matrix descriptors. In a cluster of several CTAs (`ranks`), the
// upper bits of an address hold the CTA's rank, which must not enter a descriptor.
template <int ranks>
__device__ unsigned matrix_address(unsigned address) {
  constexpr unsigned window_bytes = 1 << 18;
  return ranks == 1 ? address : address % window_bytes;
}

// Waits until all threads of a cluster of `ranks` CTAs have arrived. Does not order accesses to
// memory.
template <int ranks>
__device__ void wait_for_cluster() {
  if constexpr (ranks > 1) {
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

// Waits until all CTAs of a cluster have initialized their barriers, and until all threads of this
// CTA have initialized its shared memory. `fence_mbarrier_init` has made the barriers visible.
template <int ranks>
__device__ void sync_start() {
  __syncthreads();
  wait_for_cluster<ranks>();
}

// Layout of the dq sums of a query tile. The columns are divided into slabs of `SlabColumns`, which
// are stored consecutively, in the order of the consumers' accumulators. Each consumer has some of
// the rows or, if a tile has only 64 rows, some of the slabs. Has the members of `DqFragments`,
// whose warps are those of the kernel that converts the sums.
template <int Rows, int Columns, int SlabColumns, int consumers>
struct WarpgroupFragments {
  static constexpr bool by_rows = Rows == 64 * consumers;
  static_assert(by_rows || Rows == 64, "a consumer multiplies 64 rows");
  static constexpr int warps = 4 * consumers;
  static constexpr int row_warps = Rows / 16;
  static constexpr int row_tiles = 1;
  static constexpr int column_tiles = Columns / 8 * row_warps / warps;
  static constexpr int slab_tiles = (by_rows ? Columns : SlabColumns) / 8;
  static constexpr int64 floats = int64(Rows) * Columns;

  __device__ static int fragment_offset(int warp, int, int j, int lane) {
    const int tile = column(warp, j) / 8;
    const int first_tile = (tile / slab_tiles * row_warps + warp % row_warps) * slab_tiles;
    return ((first_tile + tile % slab_tiles) * 32 + lane) * 4;
  }
  __device__ static int row(int warp, int) { return warp % row_warps * 16; }
  __device__ static int column(int warp, int j) {
    return (warp / row_warps * column_tiles + j) * 8;
  }
};

// Tile coordinates of a CTA, and the query tiles that it iterates over. They are in shared memory
// if both head dims are 256 (468 instead of 451 TFLOP/s, H200, 16384 tokens), with lists of query
// tiles (50 bytes less spilled at head_dim 128), and with halves of the columns (up to 100 bytes
// less spilled). In other cases, they are in registers, because spilling a few registers is faster.
template <class Config>
struct HopperGradientBlockInfo : FirstHead<Config::fetches_kv_tiles> {
  static constexpr bool is_shared = Config::block_mask || Config::cta_ranks > 1 ||
                                    Config::padded_dim + Config::padded_dim_v == 512;

  // The KV tiles of a pair count as one.
  using Order = DqOrder<Config::Br, Config::pair * Config::Bc, Config>;

  GradientTileCoord coord;
  Sequence sequence;
  Mask<Config> mask;
  Order order;

  // `first` has the coordinates of the CTA or, in a pair, those of the first CTA of the pair. Both
  // CTAs of a pair iterate over the query tiles that attend to any of their keys.
  __device__ HopperGradientBlockInfo(const GradientParams& p, const GradientTileCoord& first,
                                     const Sequence& sequence)
      : coord(first),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        order(mask, coord.begin, sequence.seqlen_q) {
    const bool descends = Config::may_descend && in_last_section(p);
    const ChunkTiles tiles =
        tiles_of_chunk<Config>(coord, order.first_tile, order.end_tile, descends);
    order.first_tile = tiles.begin;
    order.end_tile = tiles.end;
    if constexpr (Config::pair > 1) coord.begin += blockIdx.z * Config::Bc;
  }
};

template <class Config>
struct HopperGradientCta {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  // For wide heads, both consumers have the same 64 keys (split_consumers.cuh); otherwise 64 each.
  static constexpr bool wide = Config::wide;
  static constexpr int consumers = wide ? 2 : Bc / 64;
  static constexpr bool wants_q = Config::wants_q;
  static constexpr bool wants_k = Config::wants_k;
  static constexpr bool wants_v = Config::wants_v;
  static constexpr bool wants_ds = wants_q || wants_k;
  // Whether the row statistics warp inspects some tiles of q and dout before consumers read them,
  // and whether it inspects all tiles. See `inspects_tile()`.
  static constexpr bool inspects = Config::has_seqlens || Config::inspects;
  static constexpr bool inspects_all =
      Config::inspects && (Config::stores_pairs ? Config::Mods::changes_scores
                                                : !Config::has_seqlens || Config::modified);
  // Whether consumers of the last CTA in the dq order write dq; otherwise a separate kernel does.
  // Wide heads leave no registers for the earlier sums, float32 gradients none for their addresses:
  // spilling 236 bytes per thread cost 15% (H100, head_dim 128, 65536 tokens).
  static constexpr bool last_writes =
      !wide && sizeof(typename Config::Gradient) == sizeof(Element);
  static constexpr int dim = Config::padded_dim;
  static constexpr int dim_v = Config::padded_dim_v;

  // Number of KV tiles of a cluster, and number of parts into which it divides the columns. A CTA
  // has one KV tile at a time, and one part.
  static constexpr int kv_tiles = Config::pair;
  static constexpr int column_parts = Config::cta_ranks;
  static constexpr bool exchanges_ds = kv_tiles > 1;
  static constexpr bool exchanges_scores = column_parts > 1;
  // Number of CTAs of a cluster, and index of this one.
  static constexpr int ranks = kv_tiles * column_parts;
  static_assert(ranks == 1 || (ranks == 2 && wide), "two CTAs divide one of them, for wide heads");
  static_assert(!exchanges_ds || wants_q, "dS is exchanged for dq");
  __device__ static int rank() { return ranks == 1 ? 0 : blockIdx.z; }
  // Returns the index of the CTA's part of the columns of q, k, v and dout.
  __device__ static int column_part() { return exchanges_scores ? rank() : 0; }

  // In a pair of KV tiles, each consumer has whole boxes of the columns of k, at least one.
  static constexpr bool halves_key_boxes = exchanges_ds && dim % (kv_tiles * consumers * 64) != 0;
  using KeyTile = TmaTile<Bc, dim, halves_key_boxes ? 32 : TmaTile<Bc, dim>::box_columns>;
  // The CTA's columns of its peer's keys.
  using PeerKeyTile = TmaTile<Bc, dim / kv_tiles, KeyTile::box_columns>;
  using ValueTile = TmaTile<Bc, dim_v>;
  using QueryTile = TmaTile<Br, dim>;
  using DoutTile = TmaTile<Br, dim_v>;
  // dS: queries by keys, one TMA box for each consumer's keys.
  using DsTile = TmaTile<Br, Bc>;
  // Bias of a part of a query tile, if TMA loads it: one box for each consumer's keys.
  static constexpr bool streams_bias = Config::bias_stages > 0;
  using BiasTile = TmaTile<Config::columns, Bc>;
  static_assert(!streams_bias || (!wide && Config::columns == 64), "a TMA box has 64 rows");
  // A slab of dq sums has the columns of a box of k, because a matrix descriptor cannot start
  // within a box.
  using Fragments = WarpgroupFragments<Br, dim, KeyTile::box_columns, consumers>;
  // Number of dq sums that the CTA adds. A tile in the workspace holds the sums of all CTAs of the
  // cluster, one CTA after another.
  static constexpr int64 dq_floats = Fragments::floats / kv_tiles;
  static constexpr int64 tile_floats = ranks * dq_floats;
  __device__ static int64 first_float() { return rank() * dq_floats; }

  // Returns the number of dq columns that a consumer computes. Consumers with the same rows divide
  // the CTA's slabs. If the number of slabs is odd, the first consumer computes one more.
  static constexpr int dq_columns(int consumer) {
    if (Fragments::by_rows) return dim;
    return (KeyTile::boxes / kv_tiles + 1 - consumer) / 2 * KeyTile::box_columns;
  }
  // Return the index of the first of these columns, and the offset of the consumer's dq sums, both
  // relative to those of the CTA.
  static constexpr int first_dq_column(int consumer) {
    return Fragments::by_rows ? 0 : consumer * dq_columns(0);
  }
  static constexpr int dq_offset(int consumer) { return consumer * 64 * dq_columns(0); }

  // Whether consumers write the dq sums to shared memory, from where bulk copies add them to global
  // memory.
  static constexpr bool buffers_dq = wants_q && (!wide || Config::buffers_dq);

  // Shared memory: k, the peer's k, v, the rings of q and dout, dS, the peer's dS, the dq sums, P
  // (for wide heads), the peer's scores, the ring of the bias, row statistics, visible pairs,
  // steps, fetched KV tiles, barriers and `HopperGradientBlockInfo`.
  // Whether some queries may attend to only some of their sequence's keys.
  static constexpr bool is_bounded = Config::causal || Config::modified;
  // A CTA that fetches KV tiles (kv_tiles.cuh) has two stages of k and v.
  static constexpr bool fetches_kv_tiles = Config::fetches_kv_tiles;
  static_assert(!fetches_kv_tiles || !(wide || Config::has_seqlens || inspects || is_bounded ||
                                       Config::splits_queries || !wants_q),
                "KV tiles differ only in their coordinates, and each has steps of dq");
  static constexpr int kv_stages = fetches_kv_tiles ? 2 : 1;
  static constexpr int kv_stage_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int peer_keys_offset = KeyTile::bytes;
  static constexpr int value_offset = peer_keys_offset + (exchanges_ds ? PeerKeyTile::bytes : 0);
  static constexpr int query_offset =
      value_offset + ValueTile::bytes + (kv_stages - 1) * kv_stage_bytes;
  static constexpr int dout_offset = query_offset + Config::q_stages * QueryTile::bytes;
  static constexpr int ds_offset = dout_offset + Config::dout_stages * DoutTile::bytes;
  static constexpr int ds_stages = wide && !exchanges_ds ? Config::exchange_stages : 2;
  static constexpr int peer_ds_offset = ds_offset + (wants_q ? ds_stages * DsTile::bytes : 0);
  static constexpr int peer_ds_stages = exchanges_ds ? Config::exchange_stages + 1 : 0;
  static constexpr int sums_offset = peer_ds_offset + peer_ds_stages * DsTile::bytes;
  static constexpr int p_tiles_offset =
      sums_offset + (buffers_dq ? int(dq_floats * sizeof(float)) : 0);
  static constexpr int p_tile_bytes = Br * Bc * int(sizeof(Element));
  // Buffers for the partial S and dP of the peer CTA: one for each consumer warp.
  static constexpr int peer_scores_offset =
      p_tiles_offset + (wide ? ds_stages * p_tile_bytes : 0);
  static constexpr int peer_scores_warps = exchanges_scores ? 4 * consumers : 0;
  static constexpr int peer_scores_bytes = 16 * Br * int(sizeof(float));
  static constexpr int bias_offset = peer_scores_offset + peer_scores_warps * peer_scores_bytes;
  static_assert(!streams_bias || bias_offset % 1024 == 0, "the swizzle repeats after 1024 bytes");
  static constexpr int stats_offset =
      bias_offset + (streams_bias ? Config::bias_stages * BiasTile::bytes : 0);
  static constexpr int stats_bytes = 2 * Br * int(sizeof(float));
  // Visible pairs of query tiles, one bit each (hopper/listed_tiles.cuh).
  static constexpr int pairs_offset = stats_offset + Config::q_stages * stats_bytes;
  static constexpr int pairs_bytes = Config::stores_pairs ? Br * Bc / 8 : 0;
  // Steps of the query tiles in the stages, with `Config::block_mask` (hopper/listed_tiles.cuh).
  static constexpr int steps_offset = pairs_offset + Config::q_stages * pairs_bytes;
  static constexpr int step_bytes = Config::block_mask && !wide ? 8 : 0;
  // Fetched KV tiles.
  static constexpr int fetched_offset = steps_offset + Config::q_stages * step_bytes;
  static constexpr int fetched_bytes =
      fetches_kv_tiles ? kv_stages * int(sizeof(ListedKvTile)) : 0;
  static constexpr int barrier_offset = fetched_offset + fetched_bytes;
  static constexpr int ring_barriers = 2 * (Config::q_stages + Config::dout_stages);
  // Number of barriers: 3 of k and v, at most 6 of the dq sums or the semaphore, at most 4 of the
  // earlier dq sums or, for wide heads, of P and dS, and those of the peer's dS.
  static constexpr int sums_stages = 2;
  static constexpr int other_barriers = 3 + 6 + 4 + peer_ds_stages;
  static_assert(ds_stages <= 2, "barriers are counted for two stages");
  static_assert(consumers == 2, "barriers are counted for two consumers");
  static constexpr int arrived_barriers = Config::q_stages + Config::dout_stages;
  static constexpr int first_scores_barrier =
      ring_barriers + other_barriers + (inspects ? arrived_barriers : 0);
  static constexpr int first_bias_barrier = first_scores_barrier + 2 * peer_scores_warps;
  static constexpr int first_kv_barrier = first_bias_barrier + 2 * Config::bias_stages;
  static constexpr int barriers_of_kv_stage = fetches_kv_tiles ? 5 : 0;
  static constexpr int barriers = first_kv_barrier + kv_stages * barriers_of_kv_stage;
  static constexpr int block_info_offset = barrier_offset + barriers * 8, block_info_bytes = 112;
  static_assert(sizeof(HopperGradientBlockInfo<Config>) <= block_info_bytes,
                "fits in block_info_bytes");
  static_assert(block_info_offset + block_info_bytes == Config::shared_memory,
                "as the host planned");

  const GradientParams& p;
  const GradientMaps& maps;
  const unsigned shared;
  const HopperGradientBlockInfo<Config>& block_info;
  const GradientTileCoord& coord;
  const Sequence& sequence;
  const Mask<Config>& mask;
  const typename HopperGradientBlockInfo<Config>::Order& order;
  using KvRing = PipelineState<kv_stages>;
  const KvRing& kv_ring;

  __device__ HopperGradientCta(const GradientParams& p, const GradientMaps& maps, unsigned shared,
                               const HopperGradientBlockInfo<Config>& block_info,
                               const KvRing& kv_ring)
      : p(p),
        maps(maps),
        shared(shared),
        block_info(block_info),
        coord(block_info.coord),
        sequence(block_info.sequence),
        mask(block_info.mask),
        order(block_info.order),
        kv_ring(kv_ring) {}

  // ---- Sequence of query tiles: for each query head of the group, from the first to the last.

  struct Step {
    int head;
    int tile;
  };
  __device__ bool has_steps() const { return order.first_tile < order.end_tile; }
  // Whether query tiles go from the last to the first (dq/order.cuh).
  __device__ bool descends() const {
    if constexpr (Config::may_descend) return in_last_section(p);
    return false;
  }
  __device__ int start_tile() const { return descends() ? order.end_tile - 1 : order.first_tile; }
  __device__ int stop_tile() const { return descends() ? order.first_tile : order.end_tile - 1; }
  __device__ Step first_step() const {
    if constexpr (fetches_kv_tiles) return {block_info.first_head, start_tile()};
    return {first_head_of_chunk<Config>(p, coord), start_tile()};
  }
  // Compares products instead of dividing: a producer warp has too few registers for a division,
  // and ptxas once let the division overwrite its dividend. The products may wrap around, as they
  // differ by less than heads_q.
  __device__ bool is_last(const Step& step) const {
    if (step.tile != stop_tile()) return false;
    if constexpr (Config::splits_queries) {
      const unsigned chunks = p.head_chunks;
      return (step.head + 1u) * p.heads_kv * chunks ==
             (coord.head * chunks + coord.head_chunk + 1u) * p.heads_q;
    }
    return (step.head + 1u) * p.heads_kv == (coord.head + 1u) * p.heads_q;
  }
  __device__ Step next_step(const Step& step) const {
    if (step.tile != stop_tile()) return {step.head, step.tile + (descends() ? -1 : 1)};
    return {step.head + 1, start_tile()};
  }

  // Returns whether a CTA may add to the dq sums of a query tile, given the value of the semaphore
  // and the index of the CTA in the dq order. All CTAs of a cluster have the same index, and each
  // increments the semaphore after it has added its columns.
  __device__ static bool may_add(int semaphore, int order_index) {
    return semaphore / ranks == order_index;
  }
  // Returns the CTA's index in the dq order of a step's query tile.
  __device__ int order_index(const Step& step) const {
    return order.order_index(step.tile, descends());
  }
  // Returns whether the CTA is the last one in the dq order of a step's query tile.
  __device__ bool is_last_cta(const Step& step) const {
    return order.is_last_cta(step.tile, descends());
  }

  // Returns whether some query row of the sequence attends to no key, or no query row attends to
  // some key. `inspects()` in backward_common.py answers the same question for dense batches: the
  // first or the last row has the fewest keys, and the first or the last key the fewest rows.
  __device__ bool inspects_sequence() const {
    if constexpr (!Config::inspects) return false;
    if constexpr (inspects_all || Config::stores_pairs) return true;
    const int last_row = sequence.seqlen_q - 1, last_key = sequence.seqlen_k - 1;
    return sees_no_key(0) || sees_no_key(last_row) || is_unseen(0) || is_unseen(last_key);
  }
  // Return whether the row statistics warp inspects the tiles of q and dout of a step, or the tile
  // of k, before consumers read them.
  template <class AnyStep>
  __device__ bool inspects_tile(const AnyStep& step) const {
    if constexpr (!inspects || inspects_all) return inspects;
    return (step.tile + 1) * Br > sequence.seqlen_q || inspects_sequence();
  }
  __device__ bool inspects_keys() const {
    return Config::has_seqlens && coord.begin + Bc > sequence.seqlen_k;
  }

  // Returns whether a step needs the mask. Missing keys are zeros, so their scores are 0, and their
  // P may be infinite. Infinity times 0 would make dq NaN. Modifications must not be evaluated for
  // missing query rows.
  __device__ bool is_masked(const Step& step) const {
    if (coord.begin + Bc > sequence.seqlen_k) return true;
    if (!is_bounded && !Config::has_seqlens) return false;
    const int first = step.tile * Br, last = first + Br - 1;
    return last >= sequence.seqlen_q || mask.visible_end(first) < coord.begin + Bc ||
           mask.visible_begin(last) > coord.begin;
  }

  // Store a step in a stage of q, and load it. A derived class may do so, so that consumers need
  // not keep steps in registers. Here, nothing is stored, and the argument is returned.
  __device__ static void store_step(const Step&, int) {}
  __device__ static const Step& stored_step(const Step& step, int) { return step; }
  __device__ Step next_stored_step(const Step& step, int) const { return next_step(step); }

  // ---- Shared memory.

  __device__ unsigned keys_address() const { return shared + kv_stage_offset(); }
  // Return the addresses of the keys that are multiplied with dS: in a pair, the CTA's columns of
  // its own keys, and of its peer's keys.
  __device__ unsigned dq_keys_address() const {
    return exchanges_ds ? shared + rank() * PeerKeyTile::bytes : keys_address();
  }
  __device__ unsigned peer_keys_address() const { return shared + peer_keys_offset; }
  __device__ unsigned values_address() const { return shared + value_offset + kv_stage_offset(); }
  __device__ unsigned queries_address(int stage) const {
    return shared + query_offset + stage * QueryTile::bytes;
  }
  __device__ unsigned dout_address(int stage) const {
    return shared + dout_offset + stage * DoutTile::bytes;
  }
  __device__ unsigned ds_address(int stage) const {
    return shared + ds_offset + stage * DsTile::bytes;
  }
  __device__ unsigned peer_ds_address(int stage) const {
    return shared + peer_ds_offset + stage * DsTile::bytes;
  }
  __device__ unsigned sums_address(int consumer) const {
    return shared + sums_offset + dq_offset(consumer) * int(sizeof(float));
  }
  __device__ unsigned p_tile_address(int stage) const {
    return shared + p_tiles_offset + stage * p_tile_bytes;
  }
  __device__ unsigned peer_scores_address(int warp) const {
    return shared + peer_scores_offset + warp * peer_scores_bytes;
  }
  __device__ unsigned bias_address(int stage) const {
    return shared + bias_offset + stage * BiasTile::bytes;
  }
  // Returns the address in the peer CTA's shared memory that corresponds to an address in this
  // CTA's.
  __device__ static unsigned at_peer(unsigned address) {
    return ptx::map_to_cta(address, rank() ^ 1);
  }
  // Returns the row statistics of a stage: first lse_log2 of each row, then -delta of each row. If
  // CTAs have halves of the columns, the second CTA has zeros instead of -delta, because dP is the
  // sum over both CTAs.
  __device__ float* stats(int stage) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<float*>(shared_memory + stats_offset) + stage * 2 * Br;
  }
  __device__ const unsigned* pairs(int stage) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<const unsigned*>(shared_memory + pairs_offset + stage * pairs_bytes);
  }
  __device__ unsigned pairs_address(int stage) const {
    return shared + pairs_offset + stage * pairs_bytes;
  }

  // ---- Barriers. A stage is full once its data has arrived, empty once all consumers released it.

  __device__ unsigned barrier(int index) const { return shared + barrier_offset + index * 8; }
  __device__ unsigned q_full(int stage) const { return barrier(stage); }
  __device__ unsigned q_empty(int stage) const { return q_full(Config::q_stages + stage); }
  __device__ unsigned dout_full(int stage) const { return q_full(2 * Config::q_stages + stage); }
  __device__ unsigned dout_empty(int stage) const { return dout_full(Config::dout_stages + stage); }
  __device__ unsigned keys_full() const {
    return fetches_kv_tiles ? kv_barrier(0) : barrier(ring_barriers);
  }
  __device__ unsigned keys_arrived() const { return barrier(ring_barriers + 1); }
  __device__ unsigned values_full() const {
    return fetches_kv_tiles ? kv_barrier(1) : barrier(ring_barriers + 2);
  }
  // Barriers of the current stage of k and v, with `fetches_kv_tiles`, and place of the KV tile
  // that was fetched for this stage.
  __device__ unsigned kv_empty() const { return kv_barrier(2); }
  __device__ unsigned fetched_full() const { return kv_barrier(3); }
  __device__ unsigned fetched_empty() const { return kv_barrier(4); }
  __device__ ListedKvTile* fetched() const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<ListedKvTile*>(shared_memory + fetched_offset) + kv_ring.index;
  }
  // Barriers of the dq buffers, with `buffers_dq`. Each consumer has one buffer. Two lanes
  // (`HopperGradientAdder`) add it to memory in alternate steps, and each lane waits at a
  // `sums_full` barrier of its own.
  __device__ unsigned sums_empty(int consumer) const {
    return barrier(ring_barriers + 3 + consumer);
  }
  __device__ unsigned sums_full(int consumer, int stage) const {
    return sums_empty(consumers + sums_stages * consumer + stage);
  }
  __device__ unsigned earlier_sums_full(int consumer) const {
    return barrier(ring_barriers + 3 + consumers + consumers * sums_stages + consumer);
  }
  // Barriers of consumers with the same keys (split_consumers.cuh). The first two are used without
  // `buffers_dq`, and the last one in pairs of KV tiles.
  __device__ unsigned semaphore_acquired(int stage) const {
    return barrier(ring_barriers + 3 + stage);
  }
  __device__ unsigned dq_added(int stage) const { return semaphore_acquired(sums_stages + stage); }
  __device__ unsigned p_full(int stage) const { return barrier(ring_barriers + 3 + 6 + stage); }
  __device__ unsigned ds_full(int stage) const { return p_full(ds_stages + stage); }
  __device__ unsigned peer_ds_full(int stage) const { return ds_full(ds_stages + stage); }
  __device__ unsigned q_arrived(int stage) const {
    return barrier(ring_barriers + other_barriers + stage);
  }
  __device__ unsigned dout_arrived(int stage) const { return q_arrived(Config::q_stages + stage); }
  // Barriers of a consumer warp: one for the scores that its peer warp sends, and one for the reads
  // of the scores that it has sent (score_exchange.cuh).
  __device__ unsigned peer_scores_full(int warp) const {
    return barrier(first_scores_barrier + warp);
  }
  __device__ unsigned peer_scores_read(int warp) const {
    return peer_scores_full(peer_scores_warps + warp);
  }
  __device__ unsigned bias_full(int stage) const { return barrier(first_bias_barrier + stage); }
  __device__ unsigned bias_empty(int stage) const { return bias_full(Config::bias_stages + stage); }

  __device__ void init_barriers() const {
    constexpr int warps = 4 * consumers;
    // The loader and the row statistics warp both arrive at `q_full`. For an inspected tile, the
    // row statistics warp arrives twice, or once if all tiles are inspected.
    for (int stage = 0; stage < Config::q_stages; ++stage) {
      ptx::mbarrier_init(q_full(stage), inspects_all ? 1 : 2);
      ptx::mbarrier_init(q_empty(stage), warps);
      if (inspects) ptx::mbarrier_init(q_arrived(stage), 1);
    }
    for (int stage = 0; stage < Config::dout_stages; ++stage) {
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init(dout_empty(stage), warps);
      if (inspects) ptx::mbarrier_init(dout_arrived(stage), 1);
    }
    if constexpr (fetches_kv_tiles) {
      // Arrivals at `keys_full`, `values_full`, `kv_empty`, `fetched_full`, and, by consumer warps,
      // the row statistics warp and two adder lanes, at `fetched_empty`.
      constexpr int arrivals[barriers_of_kv_stage] = {1, 1, warps, 1, warps + 3};
      for (int i = 0; i < kv_stages * barriers_of_kv_stage; ++i) {
        ptx::mbarrier_init(barrier(first_kv_barrier + i), arrivals[i % barriers_of_kv_stage]);
      }
    } else {
      ptx::mbarrier_init(keys_full(), kv_tiles);
      ptx::mbarrier_init(keys_arrived(), 1);
      ptx::mbarrier_init(values_full(), 1);
    }
    if (wide) {
      for (int stage = 0; stage < ds_stages; ++stage) {
        ptx::mbarrier_init(p_full(stage), 4);
        ptx::mbarrier_init(ds_full(stage), 4);
      }
      for (int stage = 0; stage < peer_ds_stages; ++stage) {
        ptx::mbarrier_init(peer_ds_full(stage), 1);
      }
    }
    if (buffers_dq) {
      for (int consumer = 0; consumer < consumers; ++consumer) {
        ptx::mbarrier_init(sums_empty(consumer), 1);
        if (last_writes) ptx::mbarrier_init(earlier_sums_full(consumer), 1);
        for (int stage = 0; stage < sums_stages; ++stage) {
          ptx::mbarrier_init(sums_full(consumer, stage), 4);
        }
      }
    } else {
      for (int stage = 0; stage < sums_stages; ++stage) {
        ptx::mbarrier_init(semaphore_acquired(stage), 1);
        ptx::mbarrier_init(dq_added(stage), warps);
      }
    }
    for (int stage = 0; stage < Config::bias_stages; ++stage) {
      ptx::mbarrier_init(bias_full(stage), 1);
      ptx::mbarrier_init(bias_empty(stage), warps);
    }
    for (int warp = 0; warp < peer_scores_warps; ++warp) {
      ptx::mbarrier_init(peer_scores_full(warp), 1);
      ptx::mbarrier_init(peer_scores_read(warp), 1);
    }
    ptx::fence_mbarrier_init();
  }

  // Named barriers: 1 for all consumers, 2 + `consumer` for a single one.
  __device__ static void sync_consumers() { NamedBarrier<128 * consumers>{1}.sync(); }
  __device__ static void sync_consumer(int consumer) { NamedBarrier<128>{2 + consumer}.sync(); }

 private:
  __device__ int kv_stage_offset() const {
    return kv_stages > 1 ? kv_ring.index * kv_stage_bytes : 0;
  }
  __device__ unsigned kv_barrier(int index) const {
    return barrier(first_kv_barrier + barriers_of_kv_stage * kv_ring.index + index);
  }
  __device__ bool sees_no_key(int row) const {
    return mask.visible_begin(row) >= mask.visible_end(row);
  }
  __device__ bool is_unseen(int key) const {
    const int rows = sequence.seqlen_q;
    return mask.row_begin(key, rows) >= mask.row_end(key, rows);
  }
};

// Layout of the dq sums of a whole query tile, for the kernel that converts them. That kernel has a
// CTA for each part of the columns.
template <class Cta>
struct TileFragments : Cta::Fragments {
  using Base = typename Cta::Fragments;
  static constexpr int64 floats = Cta::tile_floats;

  __device__ static int fragment_offset(int warp, int i, int j, int lane) {
    return Cta::column_part() * int(Base::floats) + Base::fragment_offset(warp, i, j, lane);
  }
  __device__ static int column(int warp, int j) {
    return Cta::column_part() * Cta::dim + Base::column(warp, j);
  }
};

#endif  // __CUDA_ARCH__ == 900
