// Consumer of the Hopper gradient kernel: a warpgroup that owns 64 keys and accumulates their dk
// and dv in registers. Scores are transposed, so that P^T and dS^T, packed in accumulator order,
// are left operands of the dV and dK products. Only dS goes through shared memory, for dq: each
// consumer computes some rows or columns of dq, over the keys of both consumers.
//
// Products are asynchronous and run in the order of issue, but if more than a few are queued, the
// next issue stalls. So exponentials are interleaved with the issues of a product's k steps, and dq
// is written before the next scores are issued:
//
//   tensor cores   dP(i)           dV(i)       |dQ(i)     dK(i)      S(i + 1)
//   consumer       P = exp(S(i))   write dS(i) |          write dQ(i)
//                                              ^ both consumers have written dS
//
// Index i counts parts of `columns` queries of a query tile. dq is computed after a tile's last
// part. If registers allow it, S(i + 1) is issued before dP(i), so that exponentials overlap it as
// well.
//
// Reads of operands take nearly all of the shared-memory bandwidth. So k and v, which do not
// change, stay in registers if enough are free. Row statistics are loaded before a product needs
// them: -delta initializes the accumulators of dP.
#pragma once

#include "backward/hopper/listed_tiles.cuh"
#include "backward/hopper/products.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, int DqColumns>
struct HopperGradientConsumer : HopperGradientProducts<Config, DqColumns> {
  using Base = HopperGradientProducts<Config, DqColumns>;
  using Base::single_pass, Base::wants_ds, Base::wants_k, Base::wants_q, Base::wants_v;
  using Base::columns, Base::dim, Base::dim_v, Base::parts;
  using Base::consumer, Base::cta, Base::dout_ring, Base::q_ring;
  using typename Base::Cta;
  using typename Base::Fragments;
  using typename Base::LeftOperand;
  using typename Base::DqPart;
  using typename Base::Scores;
  using typename Base::Step;

  // Whether k and v are kept in registers, too, and whether S is issued one part ahead, so that
  // exponentials overlap its product.
  static constexpr bool keeps_keys = dim <= 64 && dim_v <= 64;
  static constexpr bool ahead = keeps_keys;
  // Whether the second part of a query tile is skipped if it has no queries.
  static constexpr bool skips_parts = Cta::fetches_kv_tiles && parts == 2;

  int earlier_sums_phase = 0;
  float dk_sums[dim / 2];
  float dv_sums[dim_v / 2];
  Scores scores;                       // S^T, then P^T
  Scores gradients;                    // -delta, then dP^T - delta, then dS^T
  typename Base::LaneRows lse_log2;    // of the query rows of the next `scores`
  unsigned keys[keeps_keys ? 4 * Base::k_steps : 1];
  unsigned values[keeps_keys ? 4 * Base::k_steps_v : 1];

  using Base::Base;

  __device__ void run() {
    Base::clear(dk_sums);
    Base::clear(dv_sums);
    if (cta.has_steps()) process_tiles();
    if constexpr (Config::splits_queries) {
      if (!merge_chunks()) return;
    }
    // dv is written first: the other consumer may still read this one's keys, for dq.
    if constexpr (wants_v) Base::write_dv(dv_sums);
    if constexpr (wants_q) Cta::sync_consumers();
    if constexpr (wants_k) Base::write_dk(dk_sums);
    if constexpr (Cta::fetches_kv_tiles) {
      ptx::fence_proxy_async();
      arrive_warp(cta.kv_empty());
    }
  }

 private:
  // Adds dk and dv of the earlier chunks of queries. Returns whether this is the last chunk.
  __device__ bool merge_chunks() {
    const QueryChunkSums<Config, Cta::consumers, 128> chunks = {cta.p, cta.coord, cta.sequence};
    return chunks.template merge<(dim + dim_v) / 8>(
        consumer, [&] { Cta::sync_consumer(consumer); },
        [&](auto function) {
#pragma unroll
          for (int i = 0; i < dim / 8; ++i) {
            function(reinterpret_cast<float(&)[4]>(dk_sums[4 * i]), i);
          }
#pragma unroll
          for (int i = 0; i < dim_v / 8; ++i) {
            function(reinterpret_cast<float(&)[4]>(dv_sums[4 * i]), dim / 8 + i);
          }
        });
  }

  __device__ void process_tiles() {
    Step step = cta.first_step();
    ptx::mbarrier_wait(cta.keys_full(), cta.kv_ring.phase);
    ptx::mbarrier_wait(cta.q_full(q_ring.index), q_ring.phase);
    if (wants_ds) ptx::mbarrier_wait(cta.values_full(), cta.kv_ring.phase);
    Base::clean_keys();
    if constexpr (keeps_keys) {
      Base::template keep<typename Base::KeyTile>(keys, cta.keys_address());
      if (wants_ds) Base::template keep<typename Base::ValueTile>(values, cta.values_address());
    }
    Scores first;
    Base::start_scores(first, keys, q_ring.index, 0);
    load_stats(0);
    Base::draw_dropout(cta.stored_step(step, q_ring.index), 0);
    wait_scores(first);
    while (!cta.is_last(cta.stored_step(step, q_ring.index))) {
      process_tile<false>(step);
      step = cta.next_stored_step(step, q_ring.index);
    }
    process_tile<true>(step);
  }

  // Processes a tile. The scores of its first part must be complete, and those of the next tile's
  // first part are complete at the end, unless `Last`.
  template <bool Last>
  __device__ void process_tile(const Step& step) {
    const bool is_masked = cta.is_masked(cta.stored_step(step, q_ring.index));
    ptx::mbarrier_wait(cta.dout_full(dout_ring.index), dout_ring.phase);
    process_parts<0, Last>(step, is_masked);
  }

  // Processes the parts of a tile from `Part` on. If the last tile of all has no queries in its
  // second part, this part is skipped. Its rows of dS are then those of an earlier tile, or were
  // never written. They affect only the same rows of dq, which do not exist.
  template <int Part, bool Last>
  __device__ void process_parts(const Step& step, bool is_masked) {
    constexpr bool is_last = Part == parts - 1;
    if constexpr (skips_parts && Last && !is_last) {
      if (step.tile * Base::Br + columns >= cta.sequence.seqlen_q) {
        process_part<true, Last>(Part, step, is_masked);
        return;
      }
    }
    process_part<is_last, Last>(Part, step, is_masked);
    if constexpr (!is_last) process_parts<Part + 1, Last>(step, is_masked);
  }

  template <bool ends_tile, bool Last>
  __device__ void process_part(int part, const Step& step, bool is_masked) {
    constexpr bool has_next = !ends_tile || !Last;
    constexpr bool computes_dq = wants_q && ends_tile;
    // Accumulators are declared where their product is issued: before that they take no registers.
    LeftOperand left_p, left_ds;
    Scores next;
    if constexpr (has_next && ahead) start_next<ends_tile>(next, part + 1);
    softmax_backward(part, step, is_masked);
    Base::narrow(left_p, scores);
    Base::dropout.drop_p(left_p);
    if constexpr (wants_v) Base::start_dv(dv_sums, left_p, part);
    Base::part_bias.release(cta);
    if constexpr (wants_ds) {
      if constexpr (!single_pass) {
        Base::template wait<wants_v>(gradients);
        Base::drop_dp(gradients, part);
        Base::compute_ds(gradients, scores, is_masked);
        Base::zero_one_key_ds(gradients, scores, step, part, is_masked);
      }
      Base::narrow(left_ds, gradients);
    }
    if constexpr (wants_q) Base::write_ds(left_ds, part);

    DqPart dq_part;
    if constexpr (computes_dq) {
      ptx::fence_proxy_async();
      Cta::sync_consumers();
      Base::template start_dq<0>(dq_part);
      Base::ds_ring.advance();
    }
    if constexpr (wants_k) Base::start_dk(dk_sums, left_ds, part);
    Base::template wait<int(computes_dq) + int(wants_k)>(dv_sums);
    const int stage = q_ring.index;
    if constexpr (ends_tile) {
      arrive_warp(cta.dout_empty(dout_ring.index));
      dout_ring.advance();
      q_ring.advance();
    }
    if constexpr (computes_dq) {
      Base::template wait<wants_k>(dq_part);
      if constexpr (Cta::last_writes) {
        const Step stored = cta.stored_step(step, stage);
        if (cta.is_last_cta(stored)) {
          finish_dq(dq_part, stored, stage);
        } else {
          Base::template write_dq_sums<0>(dq_part);
        }
      } else {
        Base::template write_dq_sums<0>(dq_part);
      }
    }
    if constexpr (has_next && !ahead) {
      if constexpr (ends_tile) ptx::mbarrier_wait(cta.q_full(q_ring.index), q_ring.phase);
      Base::start_scores(next, keys, q_ring.index, ends_tile ? 0 : part + 1);
    }
    if constexpr (has_next) {
      load_stats(ends_tile ? 0 : part + 1);
      draw_next_dropout<ends_tile>(step, part);
    }
    Base::template wait<has_next && !ahead>(dk_sums);
    if constexpr (ends_tile) arrive_warp(cta.q_empty(stage));
    if constexpr (has_next) wait_scores(next);
  }

  // Issues S of part `part` or, if `NextTile`, of the first part of the tile in the next stage.
  template <bool NextTile>
  __device__ void start_next(Scores& next, int part) const {
    PipelineState<Config::q_stages> ring = q_ring;
    if constexpr (NextTile) {
      ring.advance();
      ptx::mbarrier_wait(cta.q_full(ring.index), ring.phase);
    }
    Base::start_scores(next, keys, ring.index, NextTile ? 0 : part);
  }

  // Draws the random numbers of the part after `part`, which the tensor cores overlap.
  template <bool NextTile>
  __device__ void draw_next_dropout(const Step& step, int part) {
    if constexpr (Config::dropout && NextTile) {
      Base::draw_dropout(cta.next_stored_step(step, q_ring.index), 0);
    } else if constexpr (Config::dropout) {
      Base::draw_dropout(cta.stored_step(step, q_ring.index), part + 1);
    }
  }

  __device__ void wait_scores(Scores& next) {
    Base::template wait<0>(next);
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) scores[i] = next[i];
  }

  // Loads the row statistics of a part into the registers where the next products need them.
  __device__ void load_stats(int part) {
    if constexpr (!Cta::streams_bias) Base::load_lse(lse_log2, part);
    typename Base::LaneRows minus_delta;
    Base::load_minus_delta(minus_delta, part);
    Base::broadcast_minus_delta(gradients, minus_delta);
  }

  // Converts S to P. If `single_pass`, also converts dP to dS; otherwise leaves dP in flight.
  __device__ void softmax_backward(int part, const Step& step, bool is_masked) {
    constexpr int rows = columns / 4;
    const unsigned visible_pairs = is_masked ? Base::load_visible_pairs(part) : ~0u;
    Base::part_bias.wait(cta);
    if constexpr (single_pass) {
      Base::start_dp(gradients, values, part, [](int) {});
      Base::template wait<0>(gradients);
      Base::drop_dp(gradients, part);
      Base::compute_p_and_ds(scores, gradients, lse_log2, step, part, is_masked, visible_pairs);
    } else if constexpr (wants_ds && Base::masks_p) {
      // Masked and unmasked tiles run the same code. It computes all P; masked P are then set to 0.
      Base::start_dp(gradients, values, part, [&](int i) {
        Base::template compute_p<false>(scores, lse_log2, step, part, i * rows / Base::k_steps_v,
                                        (i + 1) * rows / Base::k_steps_v);
      });
      if (is_masked) Base::mask_p(scores, step, part, visible_pairs);
    } else {
      if constexpr (wants_ds) Base::start_dp(gradients, values, part, [](int) {});
      Base::compute_all_p(scores, lse_log2, step, part, is_masked, visible_pairs);
    }
    Base::sum_p(scores);
  }

  // Adds the earlier CTAs' sums and writes dq. `stage` is the stage of q and of its row statistics.
  __device__ void finish_dq(DqPart& sums, const Step& step, int stage) {
    ptx::mbarrier_wait(cta.earlier_sums_full(consumer), earlier_sums_phase);
    earlier_sums_phase ^= 1;
    if (cta.order_index(step) > 0) {
#pragma unroll
      for (int j = 0; j < Base::dq_column_tiles; ++j) {
        unsigned four[4];
        ptx::ld_shared_v4(
            four,
            Base::sums_address() + Fragments::fragment_offset(0, 0, j, 0) * int(sizeof(float)));
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[4 * j + c] += __uint_as_float(four[c]);
      }
      // These reads must complete before TMA overwrites the buffer.
      ptx::fence_proxy_async();
    }
    Base::arrive_sums_full();
    Base::write_dq(sums, step, stage);
  }
};

#endif  // __CUDA_ARCH__ == 900
