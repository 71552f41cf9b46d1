// Consumers of the Hopper gradient kernel for wide heads, where dk and dv of 64 keys exceed the
// registers of a warpgroup. Both consumers have all keys of the CTA. The dv consumer computes P and
// sums dv. The dk consumer computes dS and sums dk. Each consumer computes some of the columns of
// dq, in one or two chunks of at most 64 columns. P passes from the dv consumer to the dk consumer
// through shared memory, and dS passes back:
//
//   dv consumer                      dk consumer
//   ------------------------------   ------------------------------
//   S(i)                             dP(i)
//   P(i)  -------- p_full -------->  waits for P(i)
//   dV(i)                            dS(i)
//   waits for dS(i)  <-- ds_full --  dK(i)
//   dQ(i), chunks of its columns     dQ(i), chunks of its columns
//
// Each chunk of dq is added to memory while the next product runs: the next chunk or, after the
// last chunk, S(i + 1) or dP(i + 1).
//
// With two exchange buffers (`Config::exchange_stages`), the dv consumer computes P a query tile
// ahead. Its exponentials then overlap dV(i) and the products of the dk consumer:
//
//   dv consumer   S(i + 1), dV(i) | P(i + 1) | dQ(i)
//   dk consumer   dS(i) | dK(i), dQ(i) | dP(i + 1)
//
// If two CTAs have halves of the columns (score_exchange.cuh), a consumer sends its S or dP to the
// peer CTA when the product is complete. It adds the sums of the peer CTA later, when it computes P
// or dS.
//
// No barrier signals that an exchange buffer is empty, because the order of the operations
// suffices. P has n buffers, and so has dS:
//
//   P(i + n) overwrites P(i)     The dv consumer writes P(i + n) after dS(i) has arrived. The dk
//                                consumer wrote dS(i) after it had read P(i).
//   dS(i + n) overwrites dS(i)   The dk consumer writes dS(i + n) after its own dQ(i) and after
//                                P(i + n) has arrived. The dv consumer wrote P(i + n) after dQ(i).
//
// With `buffers_dq`, the consumers write dq to shared memory, from where `HopperGradientAdder` adds
// it to global memory. The widest heads leave no space for this buffer, and its traffic would
// exceed the bandwidth of shared memory, so consumers add dq from registers. Two lanes of the
// producer warpgroup then operate the dq semaphore (`HopperSemaphoreWarp`):
//
//   semaphore lane                               consumers
//   ------------------------------------------   ---------------------------------
//   acquires the semaphore in global memory
//   arrives  -------- semaphore_acquired ----->  wait, add dq
//   waits  <---------------- dq_added ---------  arrive
//   releases the semaphore
//
// Pairs of KV tiles (`Config::pair`): additions of dq limit these kernels, so two CTAs of a cluster
// combine their contributions before they add. The CTAs have consecutive KV tiles, iterate over the
// same query tiles and exchange dS. Each CTA computes half of the columns of dq, from the keys of
// both CTAs, so each adds half as many bytes. At its start, a CTA loads its columns of the peer's
// keys. For each query tile, a bulk copy brings the peer's dS:
//
//   CTA A                                          CTA B
//   --------------------------------------------   -----------------------------------
//   dk consumer writes dS(i), arrives at ds_full   the same
//   copy of dS(i)  ---------------------------->   completes on peer_ds_full
//   completes on peer_ds_full  <----------------   copy of dS(i)
//   both consumers: dQ(i) of A's dS (ds_full)      the same
//   both consumers: dQ(i) += product of B's dS     the same, with A's dS
//     (peer_ds_full)
//
// No barrier signals that a buffer of the peer's dS is empty, either. There are n such buffers.
// B sends dS(i + n) to the buffer in A that held its dS(i). Both consumers of A must have completed
// dQ(i) then. n is 2, or 3 if P is computed a query tile ahead, and these dependencies suffice:
//
//   B, dk consumer   sends dS(i + n)        after its dQ(i + n - 1), which needs A's dS(i + n - 1)
//   A, dk consumer   sends dS(i + n - 1)    after its dQ(i + n - 2), and after P(i + n - 1) arrived
//   A, dv consumer   writes P(i + n - 1)    after its dQ(i + n - 2) or, a tile ahead, dQ(i + n - 3)
//
// A's dk consumer overwrites its own dS(i) with dS(i + 2). The copy of dS(i) has then been
// received: A writes dS(i + 2) after its dQ(i + 1), which needs B's dS(i + 1), and B sent dS(i + 1)
// after its dQ(i), which needs A's dS(i). The consumers of A have read dS(i) for the reasons above.
//
// Both CTAs add their columns of a query tile at the same index in the dq order, and both increment
// its semaphore. If the number of KV tiles is odd, the second CTA of the last pair has no keys: TMA
// fills its tiles with zeros, and the mask sets its P to zero.
#pragma once

#include "backward/hopper/listed_tiles.cuh"
#include "backward/hopper/score_exchange.cuh"
#include "backward/hopper/products.cuh"
#include "backward/dq/semaphore.cuh"
#include "ptx/ordered_add.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

// Operations of both consumers.
template <class Config, int DqColumns>
struct HopperWideProducts : HopperGradientProducts<Config, DqColumns> {
  using Base = HopperGradientProducts<Config, DqColumns>;
  using Base::consumer, Base::cta, Base::ds_ring;
  using typename Base::Cta;
  using typename Base::Fragments;
  using typename Base::LeftOperand;
  using typename Base::DqPart;
  using typename Base::Step;
  static_assert(Base::parts == 1 && Config::Bc == 64,
                "a query tile is one part, and both consumers have the same keys");

  PipelineState<Cta::sums_stages> semaphore_ring = {};
  // Buffer of the peer's dS, if the number of these buffers differs from that of the CTA's own dS.
  static constexpr bool has_peer_ring = Cta::exchanges_ds && Cta::peer_ds_stages != Cta::ds_stages;
  PipelineState<has_peer_ring ? Cta::peer_ds_stages : 1> other_peer_ring = {};
  HopperScoreExchange<Config> score_exchange = {cta, consumer};
  unsigned no_operand[1];  // placeholder: k and v stay in shared memory, not in registers

  using Base::Base;

  __device__ const auto& peer_ds_ring() const {
    if constexpr (has_peer_ring) {
      return other_peer_ring;
    } else {
      return ds_ring;
    }
  }

  // In a pair of KV tiles, waits for the peer's dS and adds its product with the peer's keys to
  // `sums`. The product of the CTA's own dS and keys may be in flight.
  __device__ void add_peer_dq(DqPart& sums) const {
    if constexpr (Cta::exchanges_ds) {
      static_assert(Base::dq_chunks == 1, "each consumer of a pair has one chunk");
      const int stage = peer_ds_ring().index;
      ptx::mbarrier_wait(cta.peer_ds_full(stage), peer_ds_ring().phase);
      ptx::wgmma_fence();
      Base::template multiply_dq<0>(sums, Base::matrix_address(cta.peer_ds_address(stage)),
                                    Base::matrix_address(cta.peer_keys_address()), true);
      ptx::wgmma_commit_group();
    }
  }

  // Advances to the dS of the next query tile.
  __device__ void advance_ds() {
    ds_ring.advance();
    if constexpr (has_peer_ring) other_peer_ring.advance();
  }

  // Completes the consumer's columns of dq, whose first chunk is in flight, and adds them to
  // memory. `next()` issues the first product of the next query tile before the last addition, so
  // that both overlap.
  template <class Next>
  __device__ void add_dq(DqPart& first, const Step& step, Next next) {
    add_peer_dq(first);
    Base::template wait<0>(first);
    if constexpr (Base::dq_chunks == 1) {
      next();
      add<0>(first, step);
    } else {
      DqPart second;
      Base::template start_dq<1>(second);
      add<0>(first, step);
      Base::template wait<0>(second);
      next();
      add<1>(second, step);
    }
  }

  // Writes a chunk of dq to the consumer's buffer or, without buffers, waits for the semaphore and
  // adds the chunk to global memory.
  template <int Chunk>
  __device__ void add(const DqPart& sums, const Step& step) {
    static_assert(Base::dq_chunks <= 2, "at most two chunks");
    if constexpr (Cta::buffers_dq) {
      Base::template write_dq_sums<Chunk>(sums);
    } else {
      add_to_global<Chunk>(sums, step);
    }
  }

  // Adds a chunk of dq. The first CTA of the dq order stores it, so that no kernel clears the sums.
  template <int Chunk>
  __device__ void add_to_global(const DqPart& sums, const Step& step) {
    const DqSums<Config> all(cta.p);
    float* target = all.template sums<Cta::tile_floats>(cta.p, cta.sequence, cta.coord.batch,
                                                        step.head, step.tile) +
                    Cta::first_float() + Cta::dq_offset(consumer) + 64 * Chunk * Base::dq_columns +
                    Fragments::fragment_offset(threadIdx.x / 32 % 4, 0, 0, threadIdx.x % 32);
    const bool is_first = cta.order_index(step) == 0;
    if (Chunk == 0) {
      ptx::mbarrier_wait(cta.semaphore_acquired(semaphore_ring.index), semaphore_ring.phase);
    }
    const auto write = [&](auto write_four) {
#pragma unroll
      for (int j = 0; j < Base::dq_column_tiles; ++j) {
        const float four[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
        write_four(target + Fragments::fragment_offset(0, 0, j, 0), four);
      }
    };
    if (is_first) {
      write([](float* fragment, const float (&four)[4]) { ptx::st_global_v4(fragment, four); });
    } else {
      write([](float* fragment, const float (&four)[4]) { ptx::red_add_v4(fragment, four); });
    }
    if constexpr (Chunk == Base::dq_chunks - 1) {
      arrive_warp(cta.dq_added(semaphore_ring.index));
      semaphore_ring.advance();
    }
  }

  // Returns the offset of the lane's i-th four registers of P in a stage of the exchange buffer.
  __device__ static unsigned p_tile_offset(int i) { return (i * 128 + threadIdx.x % 128) * 16; }
};

template <class Config>
struct HopperValueConsumer
    : HopperWideProducts<Config, HopperGradientCta<Config>::dq_columns(0)> {
  using Base = HopperWideProducts<Config, HopperGradientCta<Config>::dq_columns(0)>;
  using Base::columns, Base::cta, Base::dout_ring, Base::ds_ring, Base::no_operand;
  using Base::q_ring, Base::score_exchange, Base::wants_ds, Base::wants_q, Base::wants_v;
  using typename Base::Cta;
  using typename Base::LeftOperand;
  using typename Base::DqPart;
  using typename Base::Scores;
  using typename Base::Step;

  // Whether P is computed a tile ahead, so that exponentials overlap the products of a tile.
  static constexpr bool ahead = Config::exchange_stages > 1;

  float dv_sums[Base::dim_v / 2];
  Scores scores;
  LeftOperand left_p;  // P of the next tile, if `ahead`
  PipelineState<Cta::ds_stages> p_ring = {};
  typename Base::LaneRows lse_log2;
  unsigned visible_pairs;

  using Base::Base;

  __device__ void run() {
    Base::clear(dv_sums);
    if (cta.has_steps()) process_tiles();
    score_exchange.finish();
    Cta::sync_consumers();
    if constexpr (wants_v) Base::write_dv(dv_sums);
  }

 private:
  __device__ void process_tiles() {
    Step step = cta.first_step();
    ptx::mbarrier_wait(cta.keys_full(), 0);
    Base::clean_keys();
    Scores first;
    start_next(first);
    wait_next<0>(first);
    if constexpr (ahead) softmax_backward(left_p, step);
    while (!cta.is_last(step)) {
      process_tile<false>(step);
      step = cta.next_step(step);
    }
    process_tile<true>(step);
  }

  __device__ void start_next(Scores& next) {
    ptx::mbarrier_wait(cta.q_full(q_ring.index), q_ring.phase);
    Base::start_scores(next, no_operand, q_ring.index, 0);
  }
  template <int Pending>
  __device__ void wait_next(Scores& next) {
    Base::load_lse(lse_log2, 0);
    visible_pairs = Base::load_visible_pairs(0);
    Base::template wait<Pending>(next);
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) scores[i] = next[i];
    score_exchange.send(scores);
    arrive_warp(cta.q_empty(q_ring.index));
    q_ring.advance();
  }
  template <int Pending>
  __device__ void complete_dv() {
    Base::template wait<Pending>(dv_sums);
    arrive_warp(cta.dout_empty(dout_ring.index));
    dout_ring.advance();
  }

  // Processes a query tile whose S or, if `ahead`, whose P is complete. Unless `Last`, also
  // completes S or P of the next query tile.
  template <bool Last>
  __device__ void process_tile(const Step& step) {
    constexpr bool has_next_p = ahead && !Last;
    // dV completes while the peer CTA's scores are on their way, so that dout is released earlier.
    constexpr bool completes_dv_first = has_next_p && Cta::exchanges_scores;
    if constexpr (!ahead) softmax_backward(left_p, step);
    Scores next;
    LeftOperand next_p;
    if constexpr (has_next_p) start_next(next);
    if constexpr (wants_v) {
      ptx::mbarrier_wait(cta.dout_full(dout_ring.index), dout_ring.phase);
      Base::start_dv(dv_sums, left_p, 0);
    }
    if constexpr (has_next_p) {
      wait_next<wants_v>(next);
      if constexpr (completes_dv_first) complete_dv<0>();
      softmax_backward(next_p, cta.next_step(step));
    }
    DqPart dq_part;
    if constexpr (wants_ds) ptx::mbarrier_wait(cta.ds_full(ds_ring.index), ds_ring.phase);
    if constexpr (wants_q) Base::template start_dq<0>(dq_part);
    if constexpr (!completes_dv_first) complete_dv<wants_q>();
    const auto start = [&] {
      if constexpr (!ahead && !Last) start_next(next);
    };
    if constexpr (wants_q) {
      Base::add_dq(dq_part, step, start);
    } else {
      start();
    }
    Base::advance_ds();
    if constexpr (!ahead && !Last) wait_next<0>(next);
    if constexpr (has_next_p) {
      // The compiler must not move these copies up: dV reads `left_p` until its product is
      // complete.
#pragma unroll
      for (int i = 0; i < columns / 4; ++i) left_p[i] = ptx::mov(next_p[i]);
    }
  }

  // Computes P for dv, and passes P, or P times the slope if `single_pass`, to the dk consumer.
  __device__ void softmax_backward(LeftOperand& left_p, const Step& step) {
    const bool is_masked = cta.is_masked(step);
    Base::draw_dropout(step, 0);
    LeftOperand p_operand;
    score_exchange.receive(scores);
    if constexpr (Base::single_pass) {
      Scores slopes;
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) slopes[i] = 1;
      Base::compute_p_and_ds(scores, slopes, lse_log2, step, 0, is_masked, visible_pairs);
      Base::narrow(p_operand, slopes);
    } else {
      Base::compute_all_p(scores, lse_log2, step, 0, is_masked, visible_pairs);
    }
    Base::sum_p(scores);
    Base::narrow(left_p, scores);
    if constexpr (wants_ds) {
      if constexpr (Base::single_pass) {
        send_p(p_operand);
      } else if (zeroes_one_key_ds<Config> && (is_masked || Base::may_mask_any_tile)) {
        Base::zero_one_key_ds(scores, scores, step, 0, is_masked);
        Base::narrow(p_operand, scores);
        send_p(p_operand);
      } else {
        send_p(left_p);
      }
    }
    Base::dropout.drop_p(left_p);
  }

  __device__ void send_p(const LeftOperand& p_operand) {
    const unsigned address = cta.p_tile_address(p_ring.index);
#pragma unroll
    for (int i = 0; i < columns / 16; ++i) {
      const unsigned four[4] = {p_operand[4 * i], p_operand[4 * i + 1], p_operand[4 * i + 2],
                                p_operand[4 * i + 3]};
      ptx::st_shared_v4(address + Base::p_tile_offset(i), four);
    }
    arrive_warp(cta.p_full(p_ring.index));
    p_ring.advance();
  }
};

template <class Config>
struct HopperKeyConsumer : HopperWideProducts<Config, HopperGradientCta<Config>::dq_columns(1)> {
  using Base = HopperWideProducts<Config, HopperGradientCta<Config>::dq_columns(1)>;
  using Element = typename Config::Element;
  using Base::columns, Base::cta, Base::dout_ring, Base::ds_ring, Base::no_operand;
  using Base::q_ring, Base::score_exchange, Base::wants_ds, Base::wants_k, Base::wants_q;
  using typename Base::Cta;
  using typename Base::LeftOperand;
  using typename Base::DqPart;
  using typename Base::Scores;
  using typename Base::Step;

  float dk_sums[Base::dim / 2];
  Scores gradients;  // dP^T - delta of the next tile, in flight

  using Base::Base;

  __device__ void run() {
    Base::clear(dk_sums);
    if (cta.has_steps()) process_tiles();
    score_exchange.finish();
    Cta::sync_consumers();
    if constexpr (wants_k) Base::write_dk(dk_sums);
  }

 private:
  __device__ void process_tiles() {
    ptx::mbarrier_wait(cta.values_full(), 0);
    if constexpr (wants_q) ptx::mbarrier_wait(cta.keys_full(), 0);
    Step step = cta.first_step();
    start_next();
    send_next();
    while (!cta.is_last(step)) {
      process_tile<false>(step);
      step = cta.next_step(step);
    }
    process_tile<true>(step);
  }

  // Issues dP^T of the next query tile.
  __device__ void start_next() {
    ptx::mbarrier_wait(cta.q_full(q_ring.index), q_ring.phase);
    ptx::mbarrier_wait(cta.dout_full(dout_ring.index), dout_ring.phase);
    if constexpr (wants_ds) {
      typename Base::LaneRows minus_delta;
      Base::load_minus_delta(minus_delta, 0);
      Base::broadcast_minus_delta(gradients, minus_delta);
      Base::start_dp(gradients, no_operand, 0, [](int) {});
    }
  }

  // If CTAs have halves of the columns, completes dP^T of the next query tile and sends it to the
  // peer CTA.
  __device__ void send_next() {
    if constexpr (wants_ds && Cta::exchanges_scores) {
      Base::template wait<0>(gradients);
      score_exchange.send(gradients);
      release_dout();
    }
  }
  __device__ void release_dout() {
    arrive_warp(cta.dout_empty(dout_ring.index));
    dout_ring.advance();
  }

  // Processes a tile whose dP is in flight. Unless `Last`, ends with the next tile's dP in flight.
  template <bool Last>
  __device__ void process_tile(const Step& step) {
    LeftOperand left_ds;
    if constexpr (wants_ds) softmax_backward(left_ds, step, cta.is_masked(step));
    if constexpr (!wants_ds || !Cta::exchanges_scores) release_dout();
    if constexpr (wants_k) Base::start_dk(dk_sums, left_ds, 0);
    DqPart dq_part;
    if constexpr (wants_q) {
      // Wait until all warps of this consumer have written dS.
      ptx::mbarrier_wait(cta.ds_full(ds_ring.index), ds_ring.phase);
      Base::template start_dq<0>(dq_part);
    }
    Base::template wait<wants_q>(dk_sums);
    arrive_warp(cta.q_empty(q_ring.index));
    q_ring.advance();
    const auto start = [&] {
      if constexpr (!Last) start_next();
    };
    if constexpr (wants_q) {
      Base::add_dq(dq_part, step, start);
    } else {
      start();
    }
    Base::advance_ds();
    if constexpr (!Last) send_next();
  }

  __device__ void softmax_backward(LeftOperand& left_ds, const Step& step, bool is_masked) {
    Base::draw_dropout(step, 0);
    Scores scores;
    ptx::mbarrier_wait(cta.p_full(ds_ring.index), ds_ring.phase);
    receive_p(scores);
    Base::sum_p(scores);
    if constexpr (!Cta::exchanges_scores) Base::template wait<0>(gradients);
    score_exchange.receive(gradients);
    Base::drop_dp(gradients, 0);
    Base::compute_ds(gradients, scores, is_masked);
    Base::narrow(left_ds, gradients);
    if constexpr (wants_q) Base::write_ds(left_ds, 0);
    ptx::fence_proxy_async();
    arrive_warp(cta.ds_full(ds_ring.index));
    if constexpr (Cta::exchanges_ds) send_ds();
  }

  // In a pair of KV tiles, sends dS to the peer CTA and expects the bytes of the peer's dS.
  __device__ void send_ds() const {
    if (threadIdx.x % 128 == 0) {
      const int stage = Base::peer_ds_ring().index;
      constexpr int bytes = Cta::DsTile::bytes;
      ptx::mbarrier_arrive_expect_tx(cta.peer_ds_full(stage), bytes);
      // Wait until all warps of this consumer have written dS.
      ptx::mbarrier_wait(cta.ds_full(ds_ring.index), ds_ring.phase);
      ptx::cp_async_bulk_to_cta(Cta::at_peer(cta.peer_ds_address(stage)),
                                cta.ds_address(ds_ring.index), bytes,
                                Cta::at_peer(cta.peer_ds_full(stage)));
    }
    __syncwarp();
  }

  // Reads P, or P times the slope if `single_pass`, which the dv consumer has written.
  __device__ void receive_p(Scores& scores) const {
    const unsigned address = cta.p_tile_address(ds_ring.index);
#pragma unroll
    for (int i = 0; i < columns / 16; ++i) {
      unsigned four[4];
      ptx::ld_shared_v4(four, address + Base::p_tile_offset(i));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Element low = {static_cast<unsigned short>(four[r])};
        const Element high = {static_cast<unsigned short>(four[r] >> 16)};
        scores[8 * i + 2 * r] = widen(low);
        scores[8 * i + 2 * r + 1] = widen(high);
      }
    }
  }
};

// Run by two lanes, of two warps, on alternate query tiles, because a release takes long. Waits for
// the dq semaphore on behalf of the consumers, and releases it when both have added.
template <class Config>
struct HopperSemaphoreWarp {
  using Cta = HopperCta<Config>;
  using Step = typename Cta::Step;

  const Cta& cta;
  const int lane_index;
  int phase = 0;

  __device__ void run() {
    int index = 0;
    for (Step step = cta.first_step();; step = cta.next_step(step)) {
      if (index == lane_index) process(step);
      index ^= 1;
      if (cta.is_last(step)) break;
    }
  }

 private:
  __device__ void process(const Step& step) {
    const DqSums<Config> all(cta.p);
    int* semaphore = all.semaphore(cta.p, cta.sequence, cta.coord.batch, step.head, step.tile);
    const int order_index = cta.order_index(step);
    while (!Cta::may_add(ptx::ld_acquire_gpu(semaphore), order_index)) {
    }
    ptx::mbarrier_arrive(cta.semaphore_acquired(lane_index));
    ptx::mbarrier_wait(cta.dq_added(lane_index), phase);
    semaphore_release(semaphore);
    phase ^= 1;
  }
};

#endif  // __CUDA_ARCH__ == 900
