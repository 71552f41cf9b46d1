// What the warps of a thread block of the Hopper kernel share: rings of tiles in shared memory with
// their barriers, the query tiles that are under way, and where results go.
#pragma once

#include "forward/hopper/float8.cuh"
#include "forward/hopper/operand.cuh"
#include "grid/order.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"
#include "grid/split.cuh"
#include "grid/visit.cuh"
#include "params.cuh"
#include "ptx/sm90a.cuh"
#include "score/few_seen.cuh"
#include "tile/element.cuh"
#include "tile/ring.cuh"
#include "tile/slabs.cuh"

struct TensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
};

// Of units whose bias the copy engine brings.
struct BiasedTensorMaps : TensorMaps {
  TensorMap bias;
};

// Of latent attention, for the columns that are no values.
struct LatentTensorMaps : TensorMaps {
  TensorMap q_rest;
  TensorMap k_rest;
};

#if __CUDA_ARCH__ == 900

// Of a head's columns, those that each of its blocks has; the last may have fewer.
__host__ __device__ constexpr int hopper_columns(int dim, int ranks) {
  return ranks == 1 ? dim : round_up(ceil_div(dim, ranks), 16);
}

template <class Config>
struct HopperCta {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int consumers = Br / 64;
  // Of each tile there are so many, one behind the other.
  static constexpr int pieces = HopperOperand<Element>::pieces;
  // Of wide heads two blocks have half of the columns each (`pair.cuh`).
  static constexpr int ranks = Config::head_dim > 256 || Config::head_dim_v > 256 ? 2 : 1;
  static constexpr int columns = hopper_columns(Config::head_dim, ranks);
  static constexpr int columns_v = hopper_columns(Config::head_dim_v, ranks);
  // Latent attention: values are the first columns of their keys, and a slot holds both. Of the
  // columns that are no values each block has a half, too.
  static constexpr bool values_in_keys = Config::values_in_keys;
  static constexpr int columns_rest = values_in_keys ? columns - columns_v : 0;
  using Output = typename HopperOutput<Element>::type;
  using Tiles = HopperTiles<Config, columns, columns_v>;
  using QueryTile = typename Tiles::QueryTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  static constexpr bool transposes_values = HopperOperand<Element>::transposes_values;
  using BiasTile = SlabTile<Br, Bc>;
  static constexpr bool streams_bias = Config::bias_stages > 0;

  static constexpr int q_slot_bytes = pieces * QueryTile::bytes;
  static constexpr int slot_bytes =
      pieces * (KeyTile::bytes > ValueTile::bytes ? KeyTile::bytes : ValueTile::bytes);
  static_assert(Br % 64 == 0 && consumers >= 1 && consumers <= 3, "64 rows for each consumer");
  static_assert(Bc % 16 == 0 && Bc <= 256, "both products are whole wgmma");
  static_assert(!Config::sequences || !Config::split_keys || values_in_keys,
                "a sequence's keys are left whole, but for latent attention");
  static_assert(!values_in_keys || (ranks > 1 && pieces == 1 && !Config::noted),
                "of 16-bit heads that two blocks share, without modifications");
  static_assert(!values_in_keys || (columns_v % 32 == 0 && columns_rest % 32 == 0),
                "slabs of values, and slabs of the other columns");
  static_assert(Config::page_size % Bc == 0, "a tile of keys is of one page");
  static_assert(
      (pieces == 1 && !transposes_values) ||
          (!Config::sequences && !Config::split_keys && !Config::modified),
      "of float32 and float8 there are only batches of equal lengths, whole and without more");

  using Visit = HopperVisit<Config>;
  // A visit is read again when its output is written: then the queries of the visit after it, if
  // that has only one block of keys, may already have made place for others. Where visits are to be
  // found, two are written ahead, one of which the producer knows of.
  static constexpr int visits = Config::q_stages + 2 + 2 * Config::sequences;

  // The values of a sequence's last keys are followed by what belongs to others.
  struct Tail {
    int slot;  // of the ring; -1 after the last
    int rows;  // that are the sequence's
  };
  // Each slot may hold one, and there is the end.
  static constexpr int tails = Config::sequences ? Config::stages + 1 : 0;

  // What the producer says of the block whose keys are in a slot, where not every block is every
  // consumer's.
  struct Note {
    int block;
    unsigned bits;

    static constexpr unsigned everyone = (1u << consumers) - 1;
    static constexpr unsigned first = 1 << 30, end = 1u << 31;
    static_assert(BlockMap::most_slots < 256, "a slot takes eight bits");
    // What is said to a consumer: whether the block is its own, whether no mask hides a pair, and
    // where the block map keeps its pairs, from 1 on; 0 for nowhere.
    __device__ static unsigned bits_of(int consumer, bool is_own, bool is_full, unsigned slot) {
      return (unsigned(is_own) | unsigned(is_full) << 3) << consumer | slot << (6 + 8 * consumer);
    }
    __device__ static Note of(int block, unsigned bits, bool begins_tile) {
      return {block, bits | (begins_tile ? first : 0)};
    }
    __device__ static Note end_of_work() { return {-1, end}; }

    __device__ bool is_of(int consumer) const { return bits >> consumer & 1; }
    __device__ bool is_full(int consumer) const { return bits >> (3 + consumer) & 1; }
    __device__ int slot(int consumer) const { return bits >> (6 + 8 * consumer) & 255; }
    __device__ bool begins_tile() const { return bits & first; }
    __device__ bool is_end() const { return bits & end; }
  };
  static constexpr int notes = Config::noted ? Config::stages : 0;

  // Of a block of keys that a mask hides in part, the pairs that it shows, each consumer's. They
  // come with the keys and are taken before these are left. In the ring of tiles keys and values
  // take turns: when there is place in it for keys again, those half as many and one before have
  // been left.
  using Shown = ShownPairs<Bc <= 128 ? 1 : 2>;
  static constexpr int shown_bytes = Shown::threads * int(sizeof(Shown));
  static constexpr int shown_slots = Config::mapped ? Config::stages / 2 + 1 : 0;

  // Of each consumer's warp, what the other block of a pair sends. Latent attention has one buffer:
  // with two of them there are two slots for 64 keys instead of three.
  static constexpr int pair_buffers = ranks > 1 ? (values_in_keys ? 1 : 2) : 0;
  static constexpr int pair_warp_bytes = 16 * Bc * int(sizeof(float));

  // Shared memory: the ring of query tiles, the ring of K and V tiles, that of the bias, that of
  // pairs, what the other block sends, the barriers, the visits, the tails and the notes.
  static constexpr int ring_offset = Config::q_stages * q_slot_bytes;
  static constexpr int bias_offset = ring_offset + Config::stages * slot_bytes;
  static constexpr int shown_offset = bias_offset + Config::bias_stages * BiasTile::bytes;
  static constexpr int pair_offset = shown_offset + shown_slots * consumers * shown_bytes;
  static constexpr int barrier_offset =
      pair_offset + pair_buffers * 4 * consumers * pair_warp_bytes;
  static constexpr int ring_barriers = 2 * (Config::stages + Config::q_stages);
  static constexpr int sequence_barriers = Config::sequences ? 2 + tails : 0;
  static constexpr int pair_barriers = ranks > 1 ? 2 * 4 * consumers : 0;
  static constexpr int barriers =
      ring_barriers + sequence_barriers + 2 * Config::bias_stages + pair_barriers;
  static constexpr int visit_offset = barrier_offset + barriers * 8;
  static constexpr int tail_offset = visit_offset + visits * int(sizeof(Visit));
  static constexpr int note_offset = tail_offset + tails * int(sizeof(Tail));
  static_assert(note_offset + notes * int(sizeof(Note)) == Config::shared_memory,
                "as the host planned");

  const Params& p;
  const TensorMaps& maps;
  const unsigned shared;

  // Barriers. A slot is full when its bytes have arrived, empty when all consumers left it.

  __device__ unsigned full(int slot) const { return shared + barrier_offset + slot * 8; }
  __device__ unsigned empty(int slot) const { return full(Config::stages + slot); }
  __device__ unsigned q_full(int slot) const { return full(2 * Config::stages + slot); }
  __device__ unsigned q_empty(int slot) const { return q_full(Config::q_stages + slot); }
  // Of a visit that was found for the producer, and of values that were loaded with a tail.
  __device__ unsigned found_full() const { return full(ring_barriers); }
  __device__ unsigned found_empty() const { return full(ring_barriers + 1); }
  __device__ unsigned arrived(int index) const { return full(ring_barriers + 2 + index); }

  __device__ unsigned bias_full(int slot) const {
    return full(ring_barriers + sequence_barriers + slot);
  }
  __device__ unsigned bias_empty(int slot) const { return bias_full(Config::bias_stages + slot); }

  // Of a warp of the consumers', what the other block sends to it.
  __device__ unsigned pair_full(int buffer, int warp) const {
    return full(barriers - pair_barriers + buffer * 4 * consumers + warp);
  }
  // Where there is one buffer, that the other block has read what it was sent.
  __device__ unsigned pair_read(int warp) const { return pair_full(1, warp); }

  __device__ void init_barriers() const {
    // Each warp of a consumer says that it left.
    constexpr int warps = 4 * consumers;
    for (int slot = 0; slot < Config::stages; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), warps);
    }
    for (int slot = 0; slot < Config::q_stages; ++slot) {
      ptx::mbarrier_init(q_full(slot), 1);
      ptx::mbarrier_init(q_empty(slot), warps);
    }
    for (int slot = 0; slot < Config::bias_stages; ++slot) {
      ptx::mbarrier_init(bias_full(slot), 1);
      ptx::mbarrier_init(bias_empty(slot), warps);
    }
    if constexpr (Config::sequences) {
      ptx::mbarrier_init(found_full(), 1);
      ptx::mbarrier_init(found_empty(), 1);
      for (int index = 0; index < tails; ++index) ptx::mbarrier_init(arrived(index), 1);
    }
    for (int index = barriers - pair_barriers; index < barriers; ++index) {
      ptx::mbarrier_init(full(index), 1);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ static void leave(unsigned empty_barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty_barrier);
  }

  // ---- Shared memory.

  __device__ Visit* visit(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Visit*>(shared_memory + visit_offset) + index;
  }

  __device__ Tail* tail(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Tail*>(shared_memory + tail_offset) + index;
  }

  __device__ Note* note(int slot) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Note*>(shared_memory + note_offset) + slot;
  }

  __device__ static int next_visit(int index) { return index + 1 == visits ? 0 : index + 1; }

  __device__ unsigned slot_address(int slot) const {
    return shared + ring_offset + slot * slot_bytes;
  }

  __device__ unsigned bias_address(int slot) const {
    return shared + bias_offset + slot * BiasTile::bytes;
  }

  __device__ unsigned pair_address(int buffer, int warp) const {
    return shared + pair_offset + (buffer * 4 * consumers + warp) * pair_warp_bytes;
  }

  // An address as matrix descriptors have it. In a cluster its upper bits say whose memory it is
  // in: added to a descriptor they would change the distance of the slabs.
  __device__ static unsigned in_descriptor(unsigned address) {
    constexpr unsigned most = 1 << 18;
    return (ranks == 1 ? address : address % most) / 16;
  }

  __device__ unsigned shown_address(int slot, int consumer) const {
    return shared + shown_offset + (slot * consumers + consumer) * shown_bytes;
  }

  __device__ const Shown& shown(int slot, int consumer) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<const Shown*>(
        shared_memory + shown_offset)[(slot * consumers + consumer) * Shown::threads +
                                      threadIdx.x % Shown::threads];
  }

  // ---- Columns.

  // Which columns of wide heads this block has.
  __device__ static int rank() { return ranks == 1 ? 0 : blockIdx.z; }
  __device__ static int first_column_v() { return rank() * columns_v; }
  // Of the output, from the block's first on.
  __device__ static int inside_v() { return Config::head_dim_v - first_column_v(); }
  static constexpr bool has_whole_columns_v = ranks * columns_v == Config::head_dim_v;

  // ---- Query tiles.

  // This block's query tile of a round over the grid, a pair's of wide heads. Tiles come in order
  // of falling length, and every other round goes backwards, so that who has the longest of one
  // round has the shortest of the next.
  __device__ static unsigned tile_of(unsigned round) {
    const unsigned place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + place;
  }

  __device__ Visit visit_of(unsigned round) const {
    // Counted without a sign: there are at most 2^31 - 1, and a round may end behind the last.
    const unsigned tiles = ceil_div(p.seqlen_q, Br) * p.batch * p.heads_q * p.num_splits;
    const unsigned tile = tile_of(round);
    if (tile >= tiles) return Visit::end_of_work();
    const Work work = find_work<Br>(p, tile);
    if constexpr (Config::mapped) {
      return mapped_visit(p, work);
    } else {
      return Visit::of(p, work, key_tiles(p, work));
    }
  }

  __device__ static KeyTiles key_tiles(const Params& p, const Work& work) {
    const int q_end = min(work.q_begin + Br, p.seqlen_q);
    return find_key_tiles<Bc, Config::split_keys>(Mask<Config>(p, work.batch), work.q_begin, q_end,
                                                  work.split, p.num_splits);
  }

  // With a block map, which has a head's query tiles in the order of their blocks.
  template <class AnyParams>
  __device__ static Visit mapped_visit(const AnyParams& p, Work work) {
    const int place = ceil_div(p.seqlen_q, Br) - 1 - work.q_begin / Br;
    const MappedTile found = p.block_map.tile_at(work.batch, work.head, place);
    work.q_begin = found.tile * Br;
    KeyTiles keys = key_tiles(p, work);
    keys.begin = max(keys.begin, found.begin);
    keys.end = max(keys.begin, min(keys.end, found.end));
    if constexpr (Config::split_keys) {
      const MappedBlocks<consumers> blocks = mapped_blocks(p, work);
      keys.begin = blocks.first_from(keys.begin, keys.end);
      if (keys.begin < keys.end) keys.end = blocks.last_before(keys.end) + 1;
    }
    return Visit::of(p, work, keys);
  }

  template <class AnyParams>
  __device__ static MappedBlocks<consumers> mapped_blocks(const AnyParams& p, const Work& work) {
    return {p.block_map, work.batch, work.head, work.q_begin / Br};
  }

  // How many blocks before its last the producer asks for the visit after this one, where visits
  // are to be found.
  static constexpr int found_ahead = 2;

  // A pair's tiles are known by its number: nobody need count those that are handed out.
  static constexpr bool makes_order = Config::sequences && ranks > 1;

  // The order of the sequences lies behind the partial results, or this block's among all blocks'.
  __device__ static SequenceOrder order_of(const Params& p) {
    const SequenceOrder order(p);
    if constexpr (makes_order) {
      return order.behind(partial_words(p) +
                          (blockIdx.z * gridDim.x + blockIdx.x) * SequenceOrder::words(p.batch));
    } else if constexpr (Config::split_keys) {
      return order.behind(partial_words(p));
    } else {
      return order;
    }
  }

  // Of partial results, where keys are split.
  __device__ static int64 partial_words(const Params& p) {
    if constexpr (!Config::split_keys) return 0;
    return p.num_splits * Partials<Config>(p).rows * Partials<Config>::numbers;
  }

  // The producer's warpgroup makes it, where the copy engine writes later on.
  struct OrderMakers {
    static constexpr bool alike = true;
    __device__ static unsigned threads() { return 128; }
    __device__ static void sync() { ptx::bar_sync(1 + consumers, 128); }
  };
  __device__ void make_order() const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    order_of(p).template make<Br, OrderMakers>(p, reinterpret_cast<int*>(shared_memory));
    ptx::fence_proxy_async();
    OrderMakers::sync();
  }

  // ---- Where results go.

  __device__ int64 lse_index(const Visit& visit, int row) const {
    const Work& work = visit.work;
    if constexpr (Config::sequences) {
      return Partials<Config>::row_index(p, visit.sequence(p), work.batch, work.head, row);
    } else {
      return Partials<Config>::row_index(p, work.batch, work.head, row);
    }
  }

  // Writes the log-sum-exp of a row of a part, where it is a pair.
  __device__ void write_log_sum_exp(const Visit& visit, int row,
                                    const ExponentSum<float>& sum) const {
    Partials<Config>(p).set(p, visit.work.split, lse_index(visit, row), sum);
  }
  __device__ void write_log_sum_exp(const Visit& visit, int row, float lse) const {
    const Work& work = visit.work;
    const Partials<Config> partials(p);
    const int64 index = lse_index(visit, row);
    if (Config::split_keys) {
      *partials.lse_row(work.split, index) = lse;
    } else {
      static_cast<float*>(p.lse)[index] = lse;
    }
  }

  __device__ float* partial_row(const Work& work, int row) const {
    const Partials<Config> partials(p);
    return partials.out_row(work.split, partials.row_index(p, work.batch, work.head, row));
  }

  __device__ Output* output_row(const Visit& visit, int row) const {
    const Sequence& sequence = visit.sequence(p);
    return p.out.head<Output>(sequence.q_batch, visit.work.head) +
           (sequence.q_first + row) * p.out.row_stride;
  }

  // What consumers sum up for a row that sees no key, 0 times the values that others of its tile
  // see, is NaN if one of those is; and p v / p of a float32 row that sees one key is not quite v.
  // A helper sets such rows: of sequences, where consumers then leave them out, or in the end. With
  // modifications only the consumers know.
  __device__ bool is_set_by_helper(const Visit& visit, int row) const {
    return !Config::modified &&
           visit.template mask<Config>(p).visible_end(row) <= few_keys<Element>;
  }
  __device__ bool helper_sets_rows() const {
    return Config::causal && !Config::sequences && !Config::modified &&
           p.q_offset < few_keys<Element>;
  }
  __device__ void consumers_have_written() const {
    ptx::bar_arrive(1 + consumers, 128 * consumers + 32);
  }
  __device__ void await_consumers() const { ptx::bar_sync(1 + consumers, 128 * consumers + 32); }
};

#endif  // __CUDA_ARCH__ == 900
