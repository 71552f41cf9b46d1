// The two products of a consumer of the Hopper kernel where q, k and v are of float8.
#pragma once

#include "forward/hopper/float8.cuh"
#include "forward/hopper/products.cuh"
#include "ptx/base.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperProducts<Config, true> : HopperProducts<Config, false> {
  using Base = HopperProducts<Config, false>;
  using typename Base::Cta;
  using typename Base::Element;
  using typename Base::KeyTile;
  using typename Base::QueryTile;
  using typename Base::ValueTile;
  using Base::Bc;
  using Base::cta;
  using Base::q_ring;
  using Base::ring;
  using Slot = RingPosition<Config::stages>;

  static constexpr int step_columns = 32;  // of a product's operands
  static constexpr int q_steps = round_up(Config::head_dim, step_columns) / step_columns;
  // A share is of so many columns. With two buffers one is multiplied while another is added.
  static constexpr int share_columns = Config::share_columns;
  static constexpr int columns_v = Cta::Tiles::value_rows;
  static constexpr int shares = columns_v / share_columns;
  static constexpr int share_buffers = Config::share_buffers;
  static_assert(!Config::early_scores || shares <= share_buffers,
                "scores come behind all shares, and these at once");

  using Scores = float[Bc / 2];
  using Share = float[share_columns / 2];

  float out[columns_v / 2];
  unsigned probabilities[Bc / 8];
  // Where scores come behind the shares, they have the same registers, by name: else the compiler
  // has others for each, as it moves additions behind the next product.
  static constexpr int share_registers = share_buffers * share_columns / 2;
  static constexpr int first_share = Config::early_scores ? Bc / 2 : 0;
  static constexpr int registers =
      first_share + share_registers > Bc / 2 ? first_share + share_registers : Bc / 2;
  float scores[registers];

  using Base::Base;

  __device__ Slot take_slot() {
    const Slot slot = ring;
    ring.advance();
    return slot;
  }

  __device__ void clear_output() {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) out[i] = 0;
  }

  // Starts S = Q K^T.
  __device__ void start_scores(Slot slot) {
    ptx::mbarrier_wait(cta.full(slot.slot), slot.parity);
    const unsigned long long q = QueryTile::k_along_columns() + Base::queries_address() / 16;
    const unsigned long long k = KeyTile::k_along_columns() + cta.slot_address(slot.slot) / 16;
    Scores& sums = reinterpret_cast<Scores&>(scores);
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      Wgmma<Element, Bc>::multiply(sums, q + QueryTile::column_step(step) / 16,
                                   k + KeyTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Until they are complete, of the last block of the query tile or of another; gives back what
  // they were made of.
  __device__ void await_scores(Slot slot, bool is_last_block) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(reinterpret_cast<Scores&>(scores));
    Cta::leave(cta.empty(slot.slot));
    if (is_last_block) Base::leave_queries();
  }

  // Starts the shares for which there are registers.
  __device__ void start_output(Slot slot) {
    ptx::mbarrier_wait(cta.full(slot.slot), slot.parity);
#pragma unroll
    for (int i = 0; i < share_buffers; ++i) start_share(i, slot);
  }

  // O = O * factor + P V, with the scores behind it or not.
  __device__ void add_output(Slot slot, const float (&factor)[2], bool scores_follow) {
#pragma unroll
    for (int i = 0; i < shares; ++i) {
      const int later = min(share_buffers, shares - i) - 1;
      await_all_but(later + (Config::early_scores && scores_follow));
      Share& sums = share(i);
      ptx::pin(sums);
      if (i + 1 == shares) Cta::leave(cta.empty(slot.slot));
#pragma unroll
      for (int j = 0; j < share_columns / 2; ++j) {
        float& total = out[i * share_columns / 2 + j];
        total = fmaf(total, factor[j / 2 % 2], sums[j]);
      }
      if (i + share_buffers < shares) start_share(i + share_buffers, slot);
    }
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) out[i] = ptx::mul_rn(out[i], factor[i / 2 % 2]);
  }

 private:
  __device__ Share& share(int index) {
    const int buffer = index % share_buffers;
    return reinterpret_cast<Share&>(scores[first_share + buffer * (share_columns / 2)]);
  }

  __device__ static void await_all_but(int groups) {
    if (groups == 0) ptx::wgmma_wait_group<0>();
    if (groups == 1) ptx::wgmma_wait_group<1>();
    if (groups == 2) ptx::wgmma_wait_group<2>();
  }

  __device__ void start_share(int index, Slot slot) {
    const unsigned long long v =
        ValueTile::k_along_columns() +
        (cta.slot_address(slot.slot) + index * share_columns * ValueTile::line_bytes) / 16;
    Share& sums = share(index);
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / step_columns; ++step) {
      Wgmma<Element, share_columns>::multiply_k_contiguous(
          sums, probabilities + 4 * step, v + ValueTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }
};

#endif  // __CUDA_ARCH__ == 900
