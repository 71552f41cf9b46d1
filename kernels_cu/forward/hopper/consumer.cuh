// A consumer of the Hopper kernel: a warpgroup that owns 64 query rows of a tile and multiplies
// with wgmma, S, P and O in registers. It always has two products under way: the scores of the next
// block of keys and the output of this one, and takes the softmax of the former while the tensor
// cores work on the latter. The next block may be the first of another query tile, so that the
// tensor cores do not run dry between query tiles either.
#pragma once

#include "forward/hopper/cta.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "score/lagging_softmax.cuh"
#include "score/mask.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperConsumer {
  using Element = typename Config::Element;
  using Cta = HopperCta<Config>;
  using Visit = typename Cta::Visit;
  using QueryTile = typename Cta::QueryTile;
  using KeyTile = typename Cta::KeyTile;
  using ValueTile = typename Cta::ValueTile;
  using SoftmaxRow = LaggingSoftmaxRow<Element>;
  static constexpr int Bc = Config::Bc;
  static constexpr int consumers = Cta::consumers;
  static constexpr int k_steps = round_up(Config::head_dim, 16) / 16;
  static constexpr int kept_steps = Config::q_steps;  // of Q, in registers
  static constexpr int columns_v = round_up(Config::head_dim_v, 16);
  // Scores are compared by their bits, of which one instruction finds the largest of three: 4%
  // faster at head_dim 64 with three consumers, 1 to 2% at 128. A tile's first block then costs
  // more, which with two consumers at head_dim 64, the choice for short causal sequences, is a loss
  // of 1 to 2%.
  static constexpr bool by_bits = consumers == 3 || k_steps > 4;
  using Order = ScoreOrder<by_bits, (SoftmaxRow::highest < 0)>;

  static_assert(Config::guesses >= 1 && Config::guesses <= Bc / 2, "of a lane's scores");
  static_assert(kept_steps >= 0 && kept_steps <= k_steps, "steps of 16 columns");
  static_assert(!Config::turns || consumers > 1, "turns need another to take them with");

  const Cta& cta;
  const int consumer;  // which of the consumers this is
  const float scale_log2;

  RingPosition<Config::stages> ring;
  RingPosition<Config::q_stages> q_ring;
  int visit = 0;  // index in the ring of visits

  // The query tile. What can be had again from these takes no register in the loop.
  int first_row;  // of this consumer's, among the head's
  int full_end;   // where Config::sequences, the first block that needs a mask
  int block;      // of keys, whose scores were computed last
  int begin;      // the last block that the tile visits

  float scores[Bc / 2];
  unsigned probabilities[Bc / 4];
  unsigned queries[kept_steps ? 4 * kept_steps : 1];
  float out[columns_v / 2];
  SoftmaxRow softmax[2];
  // What the largest of a lane's scores must not be less than. It is there for rows without a key
  // yet, but one bound for the warp takes fewer instructions in each block than to look for them.
  typename Order::type least_maximum;

  __device__ HopperConsumer(const Cta& cta, int consumer)
      : cta(cta), consumer(consumer), scale_log2(scale_to_log2<float>(cta.p.softmax_scale)) {}

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
        visit = Cta::next_visit(visit);
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
      const SoftmaxRow finished[2] = {softmax[0], softmax[1]};
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

  // The visit before the one that was entered last: at a query tile's end, that tile's.
  __device__ const Visit& finished_visit() const {
    return *cta.visit(visit == 0 ? Cta::visits - 1 : visit - 1);
  }

  // Waits for the next query tile; false after the last.
  __device__ bool enter_tile() {
    ptx::mbarrier_wait(cta.q_full(q_ring.slot), q_ring.parity);
    const Visit& next = *cta.visit(visit);
    if (next.is_end_of_work()) return false;
    first_row = first_row_of(next.work);
    if (Config::sequences) {
      full_end = next.template mask<Config::causal>(cta.p).template full_tiles<Bc>(first_row);
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
    ptx::mbarrier_wait(cta.full(ring.slot), ring.parity);
    const unsigned long long q = QueryTile::k_along_columns() + queries_address() / 16;
    const unsigned long long k = KeyTile::k_along_columns() + cta.slot_address(ring.slot) / 16;
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
    Cta::leave(cta.empty(k_slot));
    if (kept_steps == k_steps ? is_first_block : block == begin) leave_queries();
  }

  // Where this consumer's 64 rows begin.
  __device__ unsigned queries_address() const {
    return cta.shared + q_ring.slot * QueryTile::bytes + consumer * 64 * QueryTile::line_bytes;
  }

  __device__ void leave_queries() {
    Cta::leave(cta.q_empty(q_ring.slot));
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
    ptx::mbarrier_wait(cta.full(ring.slot), ring.parity);
    const unsigned long long v = ValueTile::k_along_rows() + cta.slot_address(ring.slot) / 16;
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
    Cta::leave(cta.empty(slot_before(1)));
  }

  // The slot that the ring was at so many products ago.
  __device__ int slot_before(int products) const {
    const int slot = ring.slot - products;
    return slot < 0 ? slot + Config::stages : slot;
  }

  __device__ void reset_softmax() {
    softmax[0].reset();
    softmax[1].reset();
    least_maximum = Order::of(SoftmaxRow::lowest);
  }

  // Turns the scores into probabilities. Returns whether any row of the warp got a new base, so
  // that what was summed up before is to be multiplied by `rescale`.
  __device__ bool take_softmax(float (&rescale)[2]) {
    if constexpr (score_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < Bc / 2; ++i) scores[i] *= score_factor<Config>;
    }
    if (block >= first_masked_block()) apply_mask();

    // From here on the scores are exponents of two, relative to the base.
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) {
      scores[i] = fmaf(scores[i], scale_log2, -softmax[i / 2 % 2].base);
    }
    // The base seldom changes: the first exponentials are taken on the guess that it does not,
    // while the maxima are still being found.
    float guessed[Config::guesses];
#pragma unroll
    for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
    const bool changes = __any_sync(~0u, may_change(0) | may_change(1));
    if (changes) {
      bool fresh_remain = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = largest<ScoreOrder<false, false>, 4>(half);
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        const bool is_fresh = softmax[half].is_fresh();
        fresh_remain |= is_fresh && max == -SoftmaxMath<float>::infinity();
        const float change = softmax[half].change_base(max, is_fresh, rescale[half]);
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) {
          scores[4 * j + 2 * half] -= change;
          scores[4 * j + 2 * half + 1] -= change;
        }
      }
#pragma unroll
      for (int i = 0; i < Config::guesses; ++i) guessed[i] = ptx::ex2_approx(scores[i]);
      if (!__any_sync(~0u, fresh_remain)) least_maximum = Order::least();
    } else {
      least_maximum = Order::least();
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
    const auto max = largest<Order, by_bits ? 2 : 4>(half);
    return Order::is_less(Order::of(SoftmaxRow::highest), max) ||
           Order::is_less(max, least_maximum);
  }

  // Of this lane's part of a row, in several chains for the latency's sake.
  template <class By, int chains>
  __device__ typename By::type largest(int half) const {
    typename By::type max[chains];
#pragma unroll
    for (int j = 0; j < Bc / 8; ++j) {
      const auto two =
          By::max(By::of(scores[4 * j + 2 * half]), By::of(scores[4 * j + 2 * half + 1]));
      max[j % chains] = j < chains ? two : By::max(two, max[j % chains]);
    }
#pragma unroll
    for (int i = 1; i < min(chains, Bc / 8); ++i) max[0] = By::max(max[0], max[i]);
    return max[0];
  }

  // Of the current tile's, the first with keys that a row of this consumer does not see.
  __device__ int first_masked_block() const {
    return Config::sequences ? full_end
                             : Mask<Config::causal>(cta.p).template full_tiles<Bc>(first_row);
  }

  __device__ void apply_mask() {
    const Visit& current = *cta.visit(visit);
    const int first = Config::sequences ? first_row_of(current.work) : first_row;
    const Mask<Config::causal> mask = current.template mask<Config::causal>(cta.p);
    const auto block_mask = mask.counted_from(block * Bc + threadIdx.x % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = block_mask.visible_end(first + lane_row() + 8 * half);
      // The only key of a row is the first that the first of its lanes holds.
      if (visible == 1 && block == 0 && threadIdx.x % 4 == 0) {
        softmax[half].see_only(scores[2 * half] * scale_log2);
      }
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
      // A row is also multiplied by 1 for another's sake, and holds products with p far below 1:
      // nothing may be flushed to zero.
      out[i] = ptx::mul_rn(out[i], factor[i / 2 % 2]);
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
  __device__ void finish_softmax(const SoftmaxRow (&finished)[2], float (&normalizer)[2]) const {
    SoftmaxRow state[2] = {finished[0], finished[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 1);
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 2);
      normalizer[half] = state[half].sum == 0 ? 0 : ptx::rcp_approx(state[half].sum);
    }
    if (!Config::split_keys && cta.p.lse == nullptr) return;
    const Visit& finished_tile = finished_visit();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_of(finished_tile.work) + lane_row() + 8 * half;
      if (threadIdx.x % 4 == 0 && row < finished_tile.sequence(cta.p).seqlen_q) {
        cta.write_log_sum_exp(finished_tile, row, state[half].log_sum_exp());
      }
    }
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
      if (row >= visit.sequence(cta.p).seqlen_q) continue;
      if (Config::sequences && Config::causal && cta.sees_nothing(visit, row)) continue;
      Element* target = cta.output_row(visit, row) + first_column;
#pragma unroll
      for (int i = 0; i < columns_v / 16; ++i) {
        store_columns<Config::head_dim_v, Config::out_alignment>(
            target + 16 * i, columns[i], Config::head_dim_v - 16 * i - first_column);
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

  __device__ void write_partial(const Work& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_of(work) + lane_row() + 8 * half;
      if (row >= cta.p.seqlen_q) continue;
      float* target = cta.partial_row(work, row);
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
};

#endif  // __CUDA_ARCH__ == 900
