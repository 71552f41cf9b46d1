// What the warps of a thread block share that computes gradients on Hopper: which tiles of queries
// stream by, where they and all else lie in shared memory, and the barriers.
//
//   who                  waits for                      does                  tells
//   loader, a lane       q_empty, dout_empty            copies by the engine  q_full, dout_full
//   terms, a warp        q_empty                        brings row terms      q_full
//   adders, two lanes    the block's turn, sums_full    add dq to memory      sums_empty, the turn
//                        the last turn of a tile        bring others' sums    others_full
//   consumers, two       q_full, dout_full, each other  multiply              q_empty, dout_empty
//     of 128 lanes       sums_empty                     leave sums of dq      sums_full
//                        others_full                    write dq              sums_full
//
// (Of wide heads see wide.cuh: consumers add dq, and what were the adders keep the turns.)
//
// In packed sequences and with padded keys, rows past the last one belong to other sequences, and
// query rows may attend to no key. TMA loads of such tiles arrive at separate barriers: the warp of
// row terms waits for them, clears those rows and then signals the consumers, because 0 times NaN
// is NaN. Keys that no query attends to may hold NaN, too; consumers clean them before they
// multiply with them (clean.cuh).
#pragma once

#include "backward/hopper/turn_order.cuh"
#include "backward/params.cuh"
#include "backward/query_sums.cuh"
#include "backward/work.cuh"
#include "ptx/sm90a.cuh"
#include "score/mask.cuh"
#include "tile/ring.cuh"
#include "tile/slabs.cuh"

struct GradientMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
};

#if __CUDA_ARCH__ == 900

// How sums of dq lie: as the accumulators of the consumers, of which each has some of the rows, or
// where there are 64 only, some of the columns. See SumFragments.
template <int Rows, int Columns, int consumers>
struct WarpgroupFragments {
  static constexpr bool by_rows = Rows == 64 * consumers;
  static_assert(by_rows || Rows == 64, "a consumer multiplies 64 rows");
  static constexpr int warps = 4 * consumers;
  static constexpr int row_tiles = 1;
  static constexpr int columns = by_rows ? Columns : Columns / consumers;  // of a consumer
  static constexpr int column_tiles = columns / 8;
  static constexpr int64 floats = int64(Rows) * Columns;
  static constexpr int bytes_of_consumer = 64 * columns * 4;

  __device__ static int place(int warp, int, int j, int lane) {
    return ((warp * column_tiles + j) * 32 + lane) * 4;
  }
  __device__ static int row(int warp, int) { return by_rows ? warp * 16 : warp % 4 * 16; }
  __device__ static int column(int warp, int j) {
    return (by_rows ? 0 : warp / 4 * columns) + j * 8;
  }
};

// Which keys a block owns, and which queries stream by. Head dims of 256 leave it no registers, and it
// lies in shared memory: 468 in place of 451 TFLOP/s at 16384. Elsewhere that takes longer than to
// spill some: 338 in place of 370 at 192, and of packed sequences at 128 509 in place of 536.
template <class Config>
struct HopperGradientPlace {
  static constexpr bool is_shared = Config::padded_dim + Config::padded_dim_v == 512;

  GradientWork work;
  Sequence at;
  Mask<Config> mask;
  TurnOrder<Config::Br, Config::Bc, Config> order;

  __device__ HopperGradientPlace(const GradientParams& p, const GradientWork& work,
                                 const Sequence& at)
      : work(work),
        at(at),
        mask(mask_of<Config>(p, at, work.batch)),
        order(mask, work.begin, at.seqlen_q) {}
};

template <class Config>
struct HopperGradientCta {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  // With wide heads two consumers share 64 keys (wide.cuh), else each has 64.
  static constexpr bool wide = Config::wide;
  static constexpr int consumers = wide ? 2 : Bc / 64;
  static constexpr bool wants_q = Config::wants_q;
  static constexpr bool wants_k = Config::wants_k;
  static constexpr bool wants_v = Config::wants_v;
  static constexpr bool wants_ds = wants_q || wants_k;
  // Whether the warp of row terms inspects tiles of q and dout before consumers read them.
  static constexpr bool inspects = Config::sequences || Config::inspects;
  // Whether consumers take the last block's turn, and write dq; else a kernel of its own does. Of
  // wide heads they have no registers for others' sums, nor have they for addresses of float32:
  // 236 bytes of a thread were spilled, and took 15% of 65536 tokens of head_dim 128.
  static constexpr bool last_writes =
      !wide && sizeof(typename Config::Gradient) == sizeof(Element);
  static constexpr int dim = Config::padded_dim;
  static constexpr int dim_v = Config::padded_dim_v;

  using KeyTile = SlabTile<Bc, dim>;
  using ValueTile = SlabTile<Bc, dim_v>;
  using QueryTile = SlabTile<Br, dim>;
  using DoutTile = SlabTile<Br, dim_v>;
  // ds: queries by keys, a slab of each consumer's.
  using PairTile = SlabTile<Br, Bc>;
  using Fragments = WarpgroupFragments<Br, dim, consumers>;
  static_assert(KeyTile::line_bytes == 128 && ValueTile::line_bytes == 128, "slabs of 64 columns");

  // Shared memory: k, v, the rings of q and dout, ds, the sums of dq or p that consumers exchange,
  // row terms, barriers and the block's place.
  static constexpr int value_offset = KeyTile::bytes;
  static constexpr int query_offset = value_offset + ValueTile::bytes;
  static constexpr int dout_offset = query_offset + Config::q_stages * QueryTile::bytes;
  static constexpr int pair_offset = dout_offset + Config::dout_stages * DoutTile::bytes;
  static constexpr int pair_stages = wide ? 1 : 2;
  static constexpr int sums_offset = pair_offset + (wants_q ? pair_stages * PairTile::bytes : 0);
  static constexpr int weights_bytes = Br * Bc * int(sizeof(Element));
  static constexpr int sums_bytes = wide ? weights_bytes : wants_q ? int(Fragments::floats) * 4 : 0;
  static constexpr int terms_offset = sums_offset + sums_bytes;
  static constexpr int terms_bytes = 2 * Br * int(sizeof(float));
  static constexpr int barrier_offset = terms_offset + Config::q_stages * terms_bytes;
  static constexpr int ring_barriers = 2 * (Config::q_stages + Config::dout_stages);
  // Of k and v; of the sums of dq, or of what is exchanged and of turns.
  static constexpr int sums_slots = 2;
  static constexpr int other_barriers = 3 + 8;
  static_assert(consumers == 2, "as many barriers");
  static constexpr int arrived_barriers = Config::q_stages + Config::dout_stages;
  static constexpr int barriers =
      ring_barriers + other_barriers + (inspects ? arrived_barriers : 0);
  static constexpr int place_offset = barrier_offset + barriers * 8, place_bytes = 96;
  static_assert(sizeof(HopperGradientPlace<Config>) <= place_bytes, "room for it");
  static_assert(place_offset + place_bytes == Config::shared_memory, "as the host planned");

  // Whether queries see other keys than their sequence's.
  static constexpr bool is_bounded = Config::causal || Config::modified;

  const GradientParams& p;
  const GradientMaps& maps;
  const unsigned shared;
  const GradientWork& work;
  const Sequence& at;
  const Mask<Config>& mask;
  const TurnOrder<Br, Bc, Config>& order;

  __device__ HopperGradientCta(const GradientParams& p, const GradientMaps& maps, unsigned shared,
                               const HopperGradientPlace<Config>& place)
      : p(p),
        maps(maps),
        shared(shared),
        work(place.work),
        at(place.at),
        mask(place.mask),
        order(place.order) {}

  // ---- The stream: of each query head of the group, tiles from the first to the last.

  struct Step {
    int head;
    int tile;
  };
  __device__ bool has_steps() const { return order.first_tile < order.end_tile; }
  __device__ Step first_step() const {
    return {work.head * (p.heads_q / p.heads_kv), order.first_tile};
  }
  // Without a division, which in a helper's loop takes registers that it has not: ptxas once wrote
  // over a dividend there. That the products wrap around does not matter: heads of a group times
  // heads_kv do not.
  __device__ bool is_last(const Step& step) const {
    return step.tile == order.end_tile - 1 &&
           (step.head + 1u) * p.heads_kv == (work.head + 1u) * p.heads_q;
  }
  __device__ Step step_behind(const Step& step) const {
    if (step.tile < order.end_tile - 1) return {step.head, step.tile + 1};
    return {step.head + 1, order.first_tile};
  }

  // Scores of keys behind the last are 0, and their p may be infinite: 0 times that is no part of
  // dq. Rows behind the last are no rows to modifications.
  __device__ bool is_masked(const Step& step) const {
    if (work.begin + Bc > at.seqlen_k) return true;
    if (!is_bounded && !Config::sequences) return false;
    const int first = step.tile * Br, last = first + Br - 1;
    return last >= at.seqlen_q || mask.visible_end(first) < work.begin + Bc ||
           mask.visible_begin(last) > work.begin;
  }

  // ---- Shared memory.

  __device__ unsigned keys_at() const { return shared; }
  __device__ unsigned values_at() const { return shared + value_offset; }
  __device__ unsigned queries_at(int slot) const {
    return shared + query_offset + slot * QueryTile::bytes;
  }
  __device__ unsigned douts_at(int slot) const {
    return shared + dout_offset + slot * DoutTile::bytes;
  }
  __device__ unsigned pairs_at(int stage) const {
    return shared + pair_offset + stage * PairTile::bytes;
  }
  __device__ unsigned sums_at(int consumer) const {
    return shared + sums_offset + consumer * Fragments::bytes_of_consumer;
  }
  __device__ unsigned weights_at() const { return shared + sums_offset; }
  // First lse_log2 of each row, then -delta.
  __device__ float* terms(int slot) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<float*>(shared_memory + terms_offset) + slot * 2 * Br;
  }

  // ---- Barriers. A slot is full when all of it is there, empty when all consumers left it.

  __device__ unsigned barrier(int index) const { return shared + barrier_offset + index * 8; }
  __device__ unsigned q_full(int slot) const { return barrier(slot); }
  __device__ unsigned q_empty(int slot) const { return q_full(Config::q_stages + slot); }
  __device__ unsigned dout_full(int slot) const { return q_full(2 * Config::q_stages + slot); }
  __device__ unsigned dout_empty(int slot) const { return dout_full(Config::dout_stages + slot); }
  __device__ unsigned keys_full() const { return barrier(ring_barriers); }
  __device__ unsigned keys_arrived() const { return barrier(ring_barriers + 1); }
  __device__ unsigned values_full() const { return barrier(ring_barriers + 2); }
  // Of consumers with keys of their own. The buffer of sums is one, but two lanes wait for it in
  // turns, each at a barrier of its own.
  __device__ unsigned sums_empty(int consumer) const {
    return barrier(ring_barriers + 3 + consumer);
  }
  __device__ unsigned sums_full(int consumer, int slot) const {
    return sums_empty(consumers + sums_slots * consumer + slot);
  }
  __device__ unsigned others_full(int consumer) const {
    return barrier(ring_barriers + 3 + consumers + consumers * sums_slots + consumer);
  }
  // Of those that share keys.
  __device__ unsigned weights_full() const { return barrier(ring_barriers + 3); }
  __device__ unsigned pairs_full() const { return barrier(ring_barriers + 4); }
  __device__ unsigned turn_full(int slot) const { return barrier(ring_barriers + 5 + slot); }
  __device__ unsigned added(int slot) const { return turn_full(sums_slots + slot); }
  __device__ unsigned q_arrived(int slot) const {
    return barrier(ring_barriers + other_barriers + slot);
  }
  __device__ unsigned dout_arrived(int slot) const { return q_arrived(Config::q_stages + slot); }

  __device__ void init_barriers() const {
    constexpr int warps = 4 * consumers;
    // The loader and the warp of row terms arrive at q_full; if that warp inspects the tile, it
    // alone.
    for (int slot = 0; slot < Config::q_stages; ++slot) {
      ptx::mbarrier_init(q_full(slot), inspects ? 1 : 2);
      ptx::mbarrier_init(q_empty(slot), warps);
      if (inspects) ptx::mbarrier_init(q_arrived(slot), 1);
    }
    for (int slot = 0; slot < Config::dout_stages; ++slot) {
      ptx::mbarrier_init(dout_full(slot), 1);
      ptx::mbarrier_init(dout_empty(slot), warps);
      if (inspects) ptx::mbarrier_init(dout_arrived(slot), 1);
    }
    ptx::mbarrier_init(keys_full(), 1);
    ptx::mbarrier_init(keys_arrived(), 1);
    ptx::mbarrier_init(values_full(), 1);
    if (wide) {
      ptx::mbarrier_init(weights_full(), 4);
      ptx::mbarrier_init(pairs_full(), 4);
      for (int slot = 0; slot < sums_slots; ++slot) {
        ptx::mbarrier_init(turn_full(slot), 1);
        ptx::mbarrier_init(added(slot), warps);
      }
    } else {
      for (int consumer = 0; consumer < consumers; ++consumer) {
        ptx::mbarrier_init(sums_empty(consumer), 1);
        ptx::mbarrier_init(others_full(consumer), 1);
        for (int slot = 0; slot < sums_slots; ++slot) {
          ptx::mbarrier_init(sums_full(consumer, slot), 4);
        }
      }
    }
    ptx::fence_mbarrier_init();
  }

  // A warp tells that all its lanes are done.
  __device__ static void tell(unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // Named barriers: of all consumers, and of one.
  __device__ static void await_consumers() { ptx::bar_sync(1, 128 * consumers); }
  __device__ static void await_own(int consumer) { ptx::bar_sync(2 + consumer, 128); }
};

#endif  // __CUDA_ARCH__ == 900
