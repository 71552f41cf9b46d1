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
  using Base::ring;
  using Slot = RingPosition<Config::stages>;

  static constexpr int step_columns = 32;  // of a product's operands
  static constexpr int q_steps = round_up(Config::head_dim, step_columns) / step_columns;
  static constexpr int columns_v = Cta::Tiles::value_rows;
  static constexpr int shares = columns_v / Bc;
  static_assert(columns_v % Bc == 0, "whole shares");

  float out[columns_v / 2];
  // The scores of a block, then the shares of the output, Bc columns each, one after the other.
  // They have the same registers, by name and in number: else the compiler takes others, as it
  // moves additions behind the next product, or serializes the products for want of registers.
  float sums[Bc / 2];
  unsigned probabilities[Bc / 8];

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
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      Wgmma<Element, Bc>::multiply(sums, q + QueryTile::column_step(step) / 16,
                                   k + KeyTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Gives back what they were made of, also the queries of a query tile's last block.
  __device__ void await_scores(Slot slot, bool is_last_block) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(sums);
    Cta::leave(cta.empty(slot.slot));
    if (is_last_block) Base::leave_queries();
  }

  // O = O * factor + P V.
  __device__ void add_output(Slot slot, const float (&factor)[2]) {
    ptx::mbarrier_wait(cta.full(slot.slot), slot.parity);
#pragma unroll
    for (int i = 0; i < shares; ++i) {
      start_share(i, slot);
      ptx::wgmma_wait_group<0>();
      ptx::pin(sums);
      if (i + 1 == shares) Cta::leave(cta.empty(slot.slot));
#pragma unroll
      for (int j = 0; j < Bc / 2; ++j) {
        float& total = out[i * Bc / 2 + j];
        total = fmaf(total, factor[j / 2 % 2], sums[j]);
      }
    }
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) out[i] = ptx::mul_rn(out[i], factor[i / 2 % 2]);
  }

 private:
  __device__ void start_share(int index, Slot slot) {
    const unsigned long long v =
        ValueTile::k_along_columns() +
        (cta.slot_address(slot.slot) + index * Bc * ValueTile::line_bytes) / 16;
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / step_columns; ++step) {
      Wgmma<Element, Bc>::multiply_k_contiguous(sums, probabilities + 4 * step,
                                                v + ValueTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }
};

#endif  // __CUDA_ARCH__ == 900
