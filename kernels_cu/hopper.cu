// Fused attention forward for float16 and bfloat16 on Hopper (sm_90a): FlashAttention-3 (Shah et
// al. 2024) with the blocks of all query tiles in one stream.
//
// One warpgroup, the producer, has the copy engine bring tiles of Q, K and V to shared memory; one
// to three warpgroups, the consumers, own 64 query rows each and multiply with wgmma, S, P and O in
// registers. A consumer always has two products under way: the scores of the next block of keys and
// the output of this one, and takes the softmax of the former while the tensor cores work on the
// latter. The next block may be the first of another query tile, so that the tensor cores do not
// run dry between query tiles either.
//
// Sequences that are packed or in a cache are the same stream. A second warp beside the producer
// then finds their query tiles, and a third clears what lies behind their last values.
#pragma once

#include "copy.cuh"
#include "element.cuh"
#include "lagging_softmax.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx_sm90a.cuh"
#include "schedule.cuh"
#include "sequence_order.cuh"
#include "sequences.cuh"
#include "slabs.cuh"
#include "split.cuh"
#include "visit.cuh"
#include "wgmma.cuh"

struct TensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
};

#if __CUDA_ARCH__ == 900

// A slot of a ring of buffers, and the parity of its barriers' phase.
template <int Slots>
struct RingPosition {
  int slot = 0;
  int parity = 0;

  __device__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
struct HopperForward {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int consumers = Br / 64;
  static constexpr int k_steps = round_up(Config::head_dim, 16) / 16;
  static constexpr int kept_steps = Config::q_steps;  // of Q, in registers
  static constexpr int columns_v = round_up(Config::head_dim_v, 16);
  // Scores that are not negative compare as integers do, of which one instruction finds the largest
  // of three: 4% faster at head_dim 64 with three consumers, 1 to 2% at 128. A tile's first block
  // then costs more, which with two consumers at head_dim 64, the choice for short causal
  // sequences, is a loss of 1 to 2%.
  static constexpr bool integer_maxima = consumers == 3 || k_steps > 4;
  using QueryTile = SlabTile<Br, Config::head_dim>;
  using KeyTile = SlabTile<Bc, Config::head_dim>;
  using ValueTile = SlabTile<Bc, Config::head_dim_v>;

  static constexpr int slot_bytes =
      KeyTile::bytes > ValueTile::bytes ? KeyTile::bytes : ValueTile::bytes;
  static_assert(Br % 64 == 0 && consumers >= 1 && consumers <= 3, "64 rows for each consumer");
  static_assert(Bc % 16 == 0 && Bc <= 256, "both products are whole wgmma");
  static_assert(Config::guesses >= 1 && Config::guesses <= Bc / 2, "of a lane's scores");
  static_assert(kept_steps >= 0 && kept_steps <= k_steps, "steps of 16 columns");
  static_assert(!Config::turns || consumers > 1, "turns need another to take them with");
  static_assert(!Config::sequences || !Config::split_keys, "a sequence's keys are left whole");

  using Visit = ::Visit<Config::sequences>;
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

  // Shared memory: the ring of query tiles, the ring of K and V tiles, the barriers, the visits and
  // the tails.
  static constexpr int ring_offset = Config::q_stages * QueryTile::bytes;
  static constexpr int barrier_offset = ring_offset + Config::stages * slot_bytes;
  static constexpr int ring_barriers = 2 * (Config::stages + Config::q_stages);
  static constexpr int barriers = ring_barriers + (Config::sequences ? 2 + tails : 0);
  static constexpr int visit_offset = barrier_offset + barriers * 8;
  static constexpr int tail_offset = visit_offset + visits * int(sizeof(Visit));
  static_assert(tail_offset + tails * int(sizeof(Tail)) == Config::shared_memory,
                "as the host planned");

  const Params& p;
  const TensorMaps& maps;
  const Sequences* sequences;  // null unless Config::sequences
  const unsigned shared;
  const int consumer;  // which of the consumer warpgroups this is, or -1 in the producer
  const float scale_log2;

  RingPosition<Config::stages> ring;
  RingPosition<Config::q_stages> q_ring;
  int visit = 0;  // index in the ring of visits
  RingPosition<1> found;
  RingPosition<tails> tail;

  // A consumer's query tile. What can be had again from these takes no register in the loop.
  int first_row;  // of this consumer's, among the head's
  int full_end;   // where Config::sequences, the first block that needs a mask
  int block;      // of keys, whose scores were computed last
  int begin;      // the last block that the tile visits

  float scores[Bc / 2];
  unsigned probabilities[Bc / 4];
  unsigned queries[kept_steps ? 4 * kept_steps : 1];
  float out[columns_v / 2];
  LaggingSoftmaxRow softmax[2];

  __device__ HopperForward(const Params& params, const TensorMaps& maps,
                           const Sequences* sequences, unsigned shared, int consumer)
      : p(params),
        maps(maps),
        sequences(sequences),
        shared(shared),
        consumer(consumer),
        scale_log2(scale_to_log2<float>(params.softmax_scale)) {}

  // ---- Barriers. A slot is full when its bytes have arrived, empty when all consumers left it.

  __device__ unsigned full(int slot) const { return shared + barrier_offset + slot * 8; }
  __device__ unsigned empty(int slot) const { return full(Config::stages + slot); }
  __device__ unsigned q_full(int slot) const { return full(2 * Config::stages + slot); }
  __device__ unsigned q_empty(int slot) const { return q_full(Config::q_stages + slot); }
  // Of a visit that was found for the producer, and of values that were loaded with a tail.
  __device__ unsigned found_full() const { return full(ring_barriers); }
  __device__ unsigned found_empty() const { return full(ring_barriers + 1); }
  __device__ unsigned arrived(int index) const { return full(ring_barriers + 2 + index); }

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
    if constexpr (Config::sequences) {
      ptx::mbarrier_init(found_full(), 1);
      ptx::mbarrier_init(found_empty(), 1);
      for (int index = 0; index < tails; ++index) ptx::mbarrier_init(arrived(index), 1);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ static void leave(unsigned empty_barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty_barrier);
  }

  // ---- The producer: one thread.

  // A block of keys of a sequence, and of their values.
  struct Block {
    int index;
    int head;
    int batch;
    int first;   // row of the array with the sequence's first key
    int seqlen;  // keys of the sequence

    __device__ int row() const { return first + index * Bc; }
    __device__ int rows() const { return seqlen - index * Bc; }
  };

  // Loads what this block's share of the query tiles needs. K goes one block ahead of V, as the
  // consumers take them.
  __device__ void produce() {
    Block values = {-1};  // those that come next
    for (unsigned round = 0;; ++round) {
      const Visit& next = coming_visit(round);
      if (next.is_end_of_work()) break;
      if (!next.has_keys()) continue;
      // The queries first if there is place for them already, else behind what the consumers need
      // to make place. Short causal tiles are better off with their keys first: at 512 keys and
      // head_dim 128 it lost 4% there, and gained 3% without causality.
      bool announced =
          !Config::causal && ptx::mbarrier_test_wait(q_empty(q_ring.slot), q_ring.parity ^ 1);
      if (announced) announce(next);
      for (int key = next.keys.end - 1; key >= next.keys.begin; --key) {
        const Sequence& sequence = next.sequence(p);
        const Block keys = {key, next.work.head_kv, sequence.k_batch, sequence.k_first,
                            sequence.seqlen_k};
        load_block<KeyTile>(&maps.k, keys);
        if (values.index >= 0) load_values(values);
        if (!announced) announce(next);
        announced = true;
        values = keys;
        if (Config::sequences && key == next.keys.begin + min(found_ahead, next.blocks() - 1)) {
          ptx::mbarrier_arrive(found_empty());
        }
      }
    }
    if (values.index >= 0) load_values(values);
    announce(Visit::end_of_work());
    if constexpr (Config::sequences) announce_no_tail();
  }

  __device__ decltype(auto) coming_visit(unsigned round) {
    if constexpr (Config::sequences) {
      return find_next_visit();
    } else {
      return visit_of(round);
    }
  }

  // This block's query tile of a round over the grid. Tiles come in order of falling length, and
  // every other round goes backwards, so that who has the longest of one round has the shortest of
  // the next.
  __device__ Visit visit_of(unsigned round) const {
    // Counted without a sign: there are at most 2^31 - 1, and a round may end behind the last.
    const unsigned tiles = ceil_div(p.seqlen_q, Br) * p.batch * p.heads_q * p.num_splits;
    const unsigned place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const unsigned tile = round * gridDim.x + place;
    if (tile >= tiles) return Visit::end_of_work();
    const Work work = find_work<Br>(p, tile);
    const int q_end = min(work.q_begin + Br, p.seqlen_q);
    return {{},
            work,
            find_key_tiles<Bc, Config::split_keys>(Mask<Config::causal>(p), work.q_begin, q_end,
                                                   work.split, p.num_splits)};
  }

  // Tells the consumers of a visit, and loads its queries unless it is the end.
  __device__ void announce(const Visit& next) {
    ptx::mbarrier_wait(q_empty(q_ring.slot), q_ring.parity ^ 1);
    // One that was found is there already.
    if (!Config::sequences) *visit_address(visit) = next;
    const unsigned barrier = q_full(q_ring.slot);
    if (!next.is_end_of_work()) {
      const Sequence& sequence = next.sequence(p);
      load<QueryTile>(shared + q_ring.slot * QueryTile::bytes, &maps.q,
                      sequence.q_first + next.work.q_begin, next.work.head, sequence.q_batch,
                      barrier, ptx::l2_evict_first);
    } else {
      ptx::mbarrier_arrive(barrier);
    }
    q_ring.advance();
    visit = next_visit(visit);
  }

  template <class Tile>
  __device__ void load_block(const TensorMap* map, const Block& block) {
    ptx::mbarrier_wait(empty(ring.slot), ring.parity ^ 1);
    load<Tile>(slot_address(ring.slot), map, block.row(), block.head, block.batch, full(ring.slot),
               ptx::l2_evict_last);
    ring.advance();
  }

  __device__ void load_values(const Block& block) {
    if (Config::sequences && block.rows() < Bc) {
      load_tail(block);
    } else {
      load_block<ValueTile>(&maps.v, block);
    }
  }

  template <class Tile>
  __device__ static void load(unsigned target, const TensorMap* map, int row, int head, int batch,
                              unsigned barrier, unsigned long long policy) {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::bytes);
#pragma unroll
    for (int slab = 0; slab < Tile::slabs; ++slab) {
      ptx::cp_async_bulk_tensor_4d(target + slab * Tile::slab_bytes, map, slab * Tile::line_columns,
                                   row, head, batch, barrier, policy);
    }
  }

  __device__ Visit* visit_address(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Visit*>(shared_memory + visit_offset) + index;
  }

  __device__ Tail* tail_address(int index) const {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<Tail*>(shared_memory + tail_offset) + index;
  }

  // The visit before the one that was entered last: at a query tile's end, that tile's.
  __device__ const Visit& finished_visit() const {
    return *visit_address(visit == 0 ? visits - 1 : visit - 1);
  }

  __device__ static int next_visit(int index) { return index + 1 == visits ? 0 : index + 1; }

  __device__ unsigned slot_address(int slot) const {
    return shared + ring_offset + slot * slot_bytes;
  }

  // ---- A consumer.

  __device__ void consume() {
    reset_softmax();
    if (!enter_tile()) return;
    if (Config::turns && consumer == consumers - 1) pass_turn();
    if (kept_steps > 0) keep_queries();
    start_scores();
    ptx::wgmma_wait_group<0>();
    leave_scores(slot_before(1), true);
    float rescale[2];
    take_softmax(rescale);
    narrow_probabilities();

    bool accumulate = false;  // whether O holds earlier blocks of the query tile
    while (true) {
      const bool tile_ends = block == begin;
      if (tile_ends) {
        visit = next_visit(visit);
        if (!enter_tile()) break;
        if (kept_steps > 0) keep_queries();
      } else {
        --block;
      }
      if (Config::turns) take_turn();
      start_scores();
      start_output(accumulate);
      if (Config::turns) pass_turn();

      ptx::wgmma_wait_group<1>();
      leave_scores(slot_before(2), tile_ends);
      const LaggingSoftmaxRow finished[2] = {softmax[0], softmax[1]};
      if (tile_ends) reset_softmax();
      const bool rescales = take_softmax(rescale);
      float normalizer[2];
      if (tile_ends) finish_softmax(finished, normalizer);

      ptx::wgmma_wait_group<0>();
      leave_output();
      if (tile_ends) {
        write_output(normalizer);
      } else if (rescales) {
        scale_output(rescale);
      }
      narrow_probabilities();
      accumulate = !tile_ends;
    }

    if (Config::turns) take_turn();
    start_output(accumulate);
    if (Config::turns && consumer < consumers - 1) pass_turn();
    float normalizer[2];
    finish_softmax(softmax, normalizer);
    ptx::wgmma_wait_group<0>();
    leave_output();
    write_output(normalizer);
  }

  // Waits for the next query tile; false after the last.
  __device__ bool enter_tile() {
    ptx::mbarrier_wait(q_full(q_ring.slot), q_ring.parity);
    const Visit& next = *visit_address(visit);
    if (next.is_end_of_work()) return false;
    first_row = first_row_of(next.work);
    if (Config::sequences) {
      full_end = next.template mask<Config::causal>(p).visible_end(first_row) / Bc;
    }
    block = next.keys.end - 1;
    begin = next.keys.begin;
    return true;
  }

  __device__ int first_row_of(const Work& work) const { return work.q_begin + 64 * consumer; }

  // The first of the consumer's rows that this lane holds a part of; the other is eight below.
  __device__ static int lane_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  // The consumers take turns at starting products, so that one's softmax falls under another's.
  __device__ void take_turn() const { ptx::bar_sync(1 + consumer, 256); }
  __device__ void pass_turn() const { ptx::bar_arrive(1 + (consumer + 1) % consumers, 256); }

  // Starts S = Q K^T.
  __device__ void start_scores() {
    ptx::mbarrier_wait(full(ring.slot), ring.parity);
    const unsigned long long q = QueryTile::k_along_columns() + queries_address() / 16;
    const unsigned long long k = KeyTile::k_along_columns() + slot_address(ring.slot) / 16;
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      const unsigned long long k_step = k + KeyTile::column_step(step) / 16;
      if (step < kept_steps) {
        Wgmma<Element, Bc>::multiply_k_contiguous(scores, queries + 4 * step, k_step, step != 0);
      } else {
        Wgmma<Element, Bc>::multiply(scores, q + QueryTile::column_step(step) / 16, k_step,
                                     step != 0);
      }
    }
    ptx::wgmma_commit_group();
    ring.advance();
  }

  // The scores are complete: gives back what they were made of. Queries in registers were read from
  // shared memory by the time that the first product with them is done.
  __device__ void leave_scores(int k_slot, bool is_first_block) {
    ptx::pin(scores);
    leave(empty(k_slot));
    if (kept_steps == k_steps ? is_first_block : block == begin) leave_queries();
  }

  // Where this consumer's 64 rows begin.
  __device__ unsigned queries_address() const {
    return shared + q_ring.slot * QueryTile::bytes + consumer * 64 * QueryTile::line_bytes;
  }

  __device__ void leave_queries() {
    leave(q_empty(q_ring.slot));
    q_ring.advance();
  }

  // Takes queries to registers: the products then read less of shared memory, whose bandwidth Q, K
  // and the arriving tiles use up together. If it is all of them, there is soon place for the next.
  __device__ void keep_queries() {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned line = queries_address() + row * QueryTile::line_bytes;
#pragma unroll
    for (int step = 0; step < kept_steps; ++step) {
      unsigned fragment[4];
      ptx::ldmatrix_x4(fragment,
                       line + QueryTile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[4 * step + i] = fragment[i];
    }
  }

  // Starts O = P V, or O += P V.
  __device__ void start_output(bool accumulate) {
    ptx::mbarrier_wait(full(ring.slot), ring.parity);
    const unsigned long long v = ValueTile::k_along_rows() + slot_address(ring.slot) / 16;
    ptx::pin(out);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / 16; ++step) {
      Wgmma<Element, columns_v>::multiply_n_contiguous(out, probabilities + 4 * step,
                                                       v + ValueTile::row_step(step) / 16,
                                                       step != 0 || accumulate);
    }
    ptx::wgmma_commit_group();
    ring.advance();
  }

  // The output is complete: gives back the values.
  __device__ void leave_output() {
    ptx::pin(out);
    leave(empty(slot_before(1)));
  }

  // The slot that the ring was at so many products ago.
  __device__ int slot_before(int products) const {
    const int slot = ring.slot - products;
    return slot < 0 ? slot + Config::stages : slot;
  }

  __device__ void reset_softmax() {
    softmax[0].reset();
    softmax[1].reset();
  }

  // Turns the scores into probabilities. Returns whether any row of the warp got a new base, so
  // that what was summed up before is to be multiplied by `rescale`.
  __device__ bool take_softmax(float (&rescale)[2]) {
    if (Config::negate_scores) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] = -scores[i];
    }
    if (block >= first_masked_block()) apply_mask();

    // From here on the scores are exponents of two, relative to the base.
    const float base[2] = {softmax[0].base(), softmax[1].base()};
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) scores[i] = fmaf(scores[i], scale_log2, -base[i / 2 % 2]);
    // The base seldom changes: the first exponentials are taken on the guess that it does not,
    // while the maxima are still being found.
    float guessed[Config::guesses];
#pragma unroll
    for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
    const bool changes = __any_sync(~0u, may_change(0) | may_change(1));
    if (changes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = lane_maximum(half);
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        const float change = softmax[half].change_base(max, rescale[half]);
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
          scores[4 * j + 2 * half] -= change;
          scores[4 * j + 2 * half + 1] -= change;
        }
      }
#pragma unroll
      for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
    } else {
      softmax[0].keep_base();
      softmax[1].keep_base();
    }

    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) {
      scores[i] = i < Config::guesses ? guessed[i] : ptx::ex2_approx(scores[i]);
      sums[i / 2 % 2][i % 2] += scores[i];
    }
    softmax[0].sum += sums[0][0] + sums[0][1];
    softmax[1].sum += sums[1][0] + sums[1][1];
    // Else the compiler moves the exponentials to where they are used, behind the wait for O.
    ptx::pin(scores);
    return changes;
  }

  // Whether a row's base must change for all that this lane can tell: it may say so in vain.
  __device__ bool may_change(int half) const {
    if constexpr (integer_maxima) {
      const int largest = largest_bits(half);
      return largest > __float_as_int(LaggingSoftmaxRow::slack) ||
             (softmax[half].is_fresh() && largest < 0);
    } else {
      return softmax[half].must_change(lane_maximum(half));
    }
  }

  // Of this lane's part of a row; right unless negative, when it is some negative number.
  __device__ int largest_bits(int half) const {
    int max[2];
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      const int first = __float_as_int(scores[4 * j + 2 * half]);
      const int second = __float_as_int(scores[4 * j + 2 * half + 1]);
      max[j % 2] = j < 2 ? ::max(first, second) : ::max(::max(first, second), max[j % 2]);
    }
    return ::max(max[0], max[1]);
  }

  // Of this lane's part of a row, in four chains for the latency's sake.
  __device__ float lane_maximum(int half) const {
    float max[4];
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      const float two = fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]);
      max[j % 4] = j < 4 ? two : fmaxf(max[j % 4], two);
    }
    return Bc < 32 ? fmaxf(max[0], max[1]) : fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3]));
  }

  // Of the current tile's, the first with keys that a row of this consumer does not see.
  __device__ int first_masked_block() const {
    return Config::sequences ? full_end : Mask<Config::causal>(p).visible_end(first_row) / Bc;
  }

  __device__ void apply_mask() {
    const Visit& current = *visit_address(visit);
    const int first = Config::sequences ? first_row_of(current.work) : first_row;
    const Mask<Config::causal> mask = current.template mask<Config::causal>(p);
    const auto block_mask = mask.counted_from(block * Bc + threadIdx.x % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = block_mask.visible_end(first + lane_row() + 8 * half);
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * j + c >= visible) {
            scores[4 * j + 2 * half + c] = -SoftmaxMath<float>::infinity();
          }
        }
      }
    }
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) {
      // A row is also multiplied by 1 for another's sake. Nothing may be flushed to zero by that
      // where its bits must not depend on others.
      out[i] = Config::sequences ? ptx::mul_rn(out[i], factor[i / 2 % 2])
                                 : out[i] * factor[i / 2 % 2];
    }
  }

  // The accumulator of S is, pair by pair, the operand P.
  __device__ void narrow_probabilities() {
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) {
      probabilities[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // ---- The end of a query tile.

  // The factors that the output's rows are to be multiplied by; writes the log-sum-exp.
  __device__ void finish_softmax(const LaggingSoftmaxRow (&finished)[2],
                                 float (&normalizer)[2]) const {
    LaggingSoftmaxRow state[2] = {finished[0], finished[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 1);
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 2);
      normalizer[half] = state[half].sum == 0 ? 0 : ptx::rcp_approx(state[half].sum);
    }
    if (!Config::split_keys && p.lse == nullptr) return;
    const Visit& finished_tile = finished_visit();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_of(finished_tile.work) + lane_row() + 8 * half;
      if (threadIdx.x % 4 == 0 && row < finished_tile.sequence(p).seqlen_q) {
        write_log_sum_exp(finished_tile, row, state[half].log_sum_exp());
      }
    }
  }

  __device__ void write_log_sum_exp(const Visit& visit, int row, float lse) const {
    const Work& work = visit.work;
    const Partials<float, Config::head_dim_v> partials(p);
    int64 index;
    if constexpr (Config::sequences) {
      index = partials.row_index(p, *sequences, visit.sequence(p), work.batch, work.head, row);
    } else {
      index = partials.row_index(p, work.batch, work.head, row);
    }
    if (Config::split_keys) {
      *partials.lse_row(work.split, index) = lse;
    } else {
      static_cast<float*>(p.lse)[index] = lse;
    }
  }

  __device__ float* partial_row(const Work& work, int row) const {
    const Partials<float, Config::head_dim_v> partials(p);
    return partials.out_row(work.split, partials.row_index(p, work.batch, work.head, row));
  }

  __device__ Element* output_row(const Visit& visit, int row) const {
    const Sequence& sequence = visit.sequence(p);
    return p.out.head<Element>(sequence.q_batch, visit.work.head) +
           (sequence.q_first + row) * p.out.row_stride;
  }

  __device__ void write_output(const float (&normalizer)[2]) {
    const Visit& visit = finished_visit();
    scale_output(normalizer);
    if constexpr (Config::split_keys) {
      write_partial(visit.work);
    } else {
      write_rows(visit);
    }
  }

  __device__ void write_rows(const Visit& visit) const {
    // Where this lane's columns begin when it has exchanged with its neighbour.
    const int first_column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<Element, 4> columns[columns_v / 16];
#pragma unroll
      for (int i = 0; i < columns_v / 16; ++i) {
        const float* two = out + 8 * i + 2 * half;
        columns[i] = exchange(pack<Element>(two[0], two[1]), pack<Element>(two[4], two[5]));
      }
      // One branch around all stores: between branches of their own they would wait for each other.
      const int row = first_row_of(visit.work) + lane_row() + 8 * half;
      if (row >= visit.sequence(p).seqlen_q) continue;
      Element* target = output_row(visit, row) + first_column;
#pragma unroll
      for (int i = 0; i < columns_v / 16; ++i) {
        store<Config::out_alignment>(target + 16 * i, columns[i],
                                     Config::head_dim_v - 16 * i - first_column);
      }
    }
  }

  // Of sixteen columns, a lane of four has two of the first and two of the second eight. Gives it
  // its neighbour's two of one eight for its own of the other, so that four columns lie together,
  // and 32 bytes of a row in four lanes.
  __device__ static Vector<Element, 4> exchange(unsigned first, unsigned second) {
    const bool odd = threadIdx.x & 1;
    const unsigned received = __shfl_xor_sync(~0u, odd ? first : second, 1);
    const unsigned pairs[2] = {odd ? received : first, odd ? second : received};
    return reinterpret_cast<const Vector<Element, 4>&>(pairs);
  }

  // Writes four columns of an output row, or those inside of it, in accesses of Alignment bytes.
  template <int Alignment>
  __device__ static void store(Element* target, const Vector<Element, 4>& columns, int inside) {
    if (Alignment >= 8 && (Config::head_dim_v % 16 == 0 || inside >= 4)) {
      *reinterpret_cast<Vector<Element, 4>*>(target) = columns;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < inside) target[c] = columns.at[c];
      }
    }
  }

  __device__ void write_partial(const Work& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_of(work) + lane_row() + 8 * half;
      if (row >= p.seqlen_q) continue;
      float* target = partial_row(work, row);
#pragma unroll
      for (int j = 0; j < columns_v / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * j + threadIdx.x % 4 * 2 + c;
          if (column < Config::head_dim_v) target[column] = out[4 * j + 2 * half + c];
        }
      }
    }
  }

  // ---- One warp: the output of the query tiles that see no key, which are not in the stream.

  __device__ void write_unseeing_tiles() const {
    for (unsigned round = 0;; ++round) {
      const Visit next = visit_of(round);
      if (next.is_end_of_work()) return;
      if (!next.has_keys()) write_nothing_seen(next);
    }
  }

  __device__ void write_nothing_seen(const Visit& visit) const {
    const Work& work = visit.work;
    const int lane = threadIdx.x % 32;
    const int q_end = min(work.q_begin + Br, visit.sequence(p).seqlen_q);
    // Rare, and the producer's warps have few registers: nothing is unrolled.
#pragma unroll 1
    for (int row = work.q_begin; row < q_end; ++row) {
      if (lane == 0 && (Config::split_keys || p.lse != nullptr)) {
        write_log_sum_exp(visit, row, -SoftmaxMath<float>::infinity());
      }
#pragma unroll 1
      for (int column = lane; column < Config::head_dim_v; column += 32) {
        if constexpr (Config::split_keys) {
          partial_row(work, row)[column] = 0;
        } else {
          output_row(visit, row)[column] = Element{};
        }
      }
    }
  }

  // ---- Sequences that are packed or in a cache. One warp finds the query tiles, ahead of the
  // producer, and writes the output of those that see no key.

  // How many blocks before its last the producer asks for the visit after this one.
  static constexpr int found_ahead = 2;

  // That stay in L2, of 50 MB.
  static constexpr int section_keys =
      (32 << 20) / (Config::head_dim + Config::head_dim_v) / int(sizeof(Element));

  __device__ void find_visits() {
    const SequenceOrder order(p);
    const bool is_first = threadIdx.x % 32 == 0;
    while (true) {
      Visit& next = *visit_address(visit);
      take_visit<Br, Bc, Config::causal>(p, *sequences, order, section_keys, next, is_first);
      __syncwarp();
      if (!next.is_end_of_work() && !next.has_keys()) {
        write_nothing_seen(next);
        __syncwarp();
        continue;
      }
      if (is_first) {
        ptx::mbarrier_wait(found_empty(), found.parity ^ 1);
        ptx::mbarrier_arrive(found_full());
      }
      if (next.is_end_of_work()) return;
      found.advance();
      visit = next_visit(visit);
      // Who takes a tile early keeps it from others, who may be done sooner.
      if (next.blocks() > found_ahead) ptx::mbarrier_wait(found_empty(), found.parity ^ 1);
    }
  }

  // The producer's: waits for the visit that comes next.
  __device__ const Visit& find_next_visit() {
    ptx::mbarrier_wait(found_full(), found.parity);
    found.advance();
    return *visit_address(visit);
  }

  // ---- Another warp clears the rows behind a sequence's last values. Their probabilities are 0,
  // but infinities and NaN would not go away by that.

  // The producer's: values that are full when they were cleared. The place in the ring of tails is
  // free: of those before, no more than there are slots have not been consumed yet.
  __device__ void load_tail(const Block& block) {
    ptx::mbarrier_wait(empty(ring.slot), ring.parity ^ 1);
    *tail_address(tail.slot) = {ring.slot, block.rows()};
    load<ValueTile>(slot_address(ring.slot), &maps.v, block.row(), block.head, block.batch,
                    arrived(tail.slot), ptx::l2_evict_last);
    ring.advance();
    tail.advance();
  }

  __device__ void announce_no_tail() const {
    *tail_address(tail.slot) = {-1, 0};
    ptx::mbarrier_arrive(arrived(tail.slot));
  }

  __device__ void clear_tails() {
    while (true) {
      ptx::mbarrier_wait(arrived(tail.slot), tail.parity);
      const Tail loaded = *tail_address(tail.slot);
      if (loaded.slot < 0) return;
      ValueTile::clear_rows(slot_address(loaded.slot), loaded.rows);
      ptx::fence_proxy_async();
      leave(full(loaded.slot));
      tail.advance();
    }
  }
};

// One thread block, before the others start: in what order the sequences come.
template <class Config>
__device__ void hopper_prepare(const Params& params, const Sequences& sequences) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SequenceOrder(params).make<Config::Br>(params, sequences, reinterpret_cast<int*>(shared_memory));
}

template <class Config>
__device__ void hopper_forward(const Params& params, const TensorMaps& maps,
                               const Sequences* sequences = nullptr) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Forward = HopperForward<Config>;
  // By a shuffle, so that the compiler knows a warp is of one mind.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  Forward forward(params, maps, sequences, ptx::shared_address(shared_memory), warpgroup - 1);
  if (threadIdx.x == 0) {
    forward.init_barriers();
    ptx::prefetch_tensormap(&maps.q);
    ptx::prefetch_tensormap(&maps.k);
    ptx::prefetch_tensormap(&maps.v);
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if (threadIdx.x == 0) forward.produce();
    if constexpr (Config::sequences) {
      if (threadIdx.x / 32 == 1) forward.find_visits();
      if (threadIdx.x / 32 == 2) forward.clear_tails();
    } else {
      constexpr bool may_see_nothing = Config::causal || Config::split_keys;
      if (may_see_nothing && threadIdx.x / 32 == 1) forward.write_unseeing_tiles();
    }
  } else {
    ptx::setmaxnreg_inc<Config::consumer_registers>();
    forward.consume();
  }
}

#endif  // __CUDA_ARCH__ == 900
