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
  // The scores of one or two parts of the keys, and shares of the output, each of as many columns,
  // take turns at the same registers. These are the same by name and in number: else the compiler
  // takes others, as it moves additions behind the next product, or serializes the products for
  // want of registers.
  static constexpr int parts = Config::score_parts;
  static constexpr int part = Bc / parts;
  static constexpr int columns_v = Cta::Tiles::value_rows;
  static constexpr int shares = columns_v / part;
  static_assert(columns_v % part == 0, "whole shares");
  static_assert(parts == 1 || shares == 1, "while a share is added its other registers have scores");
  using Part = float[part / 2];

  float out[columns_v / 2];
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
    await(slot);
#pragma unroll
    for (int i = 0; i < parts; ++i) start_part_of_scores(slot, i);
  }

  // Gives back what they were made of, also the queries of a query tile's last block.
  __device__ void await_scores(Slot slot, bool is_last_block) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(sums);
    Cta::leave(cta.empty(slot.slot));
    if (is_last_block) Base::leave_queries();
  }

  // O = O * factor + P V, and starts the next scores, if there are any. With two parts of these, and
  // so few columns of values that there is one share, a part is multiplied while that is added:
  //
  //   registers 0   | share | added          | first part of S
  //   registers 1           | second part of S
  template <bool scores_follow>
  __device__ void add_output(Slot values, Slot keys, const float (&factor)[2]) {
    await(values);
    start_share(values, 0);
    if constexpr (scores_follow) await(keys);
    if constexpr (parts > 1 && scores_follow) start_part_of_scores(keys, 1);
#pragma unroll
    for (int i = 0; i < shares; ++i) {
      const bool is_last = i + 1 == shares;
      await_all_but_one(parts > 1 && scores_follow);
      Part& share = registers(i);
      ptx::pin(share);
      if (is_last) Cta::leave(cta.empty(values.slot));
#pragma unroll
      for (int j = 0; j < part / 2; ++j) {
        float& total = out[i * part / 2 + j];
        total = fmaf(total, factor[j / 2 % 2], share[j]);
      }
      if (!is_last) {
        start_share(values, i + 1);
      } else if (scores_follow) {
        start_part_of_scores(keys, 0);
      }
    }
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) out[i] = ptx::mul_rn(out[i], factor[i / 2 % 2]);
  }

 private:
  __device__ Part& registers(int index) {
    return reinterpret_cast<Part&>(sums[index % parts * (part / 2)]);
  }

  __device__ void await(Slot slot) const { ptx::mbarrier_wait(cta.full(slot.slot), slot.parity); }

  __device__ static void await_all_but_one(bool one) {
    if (one) {
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
  }

  __device__ void start_part_of_scores(Slot slot, int index) {
    const unsigned long long q = QueryTile::k_along_columns() + Base::queries_address() / 16;
    const unsigned long long k =
        KeyTile::k_along_columns() +
        (cta.slot_address(slot.slot) + index * part * KeyTile::line_bytes) / 16;
    Part& scores = registers(index);
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < q_steps; ++step) {
      Wgmma<Element, part>::multiply(scores, q + QueryTile::column_step(step) / 16,
                                     k + KeyTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ void start_share(Slot slot, int index) {
    const unsigned long long v =
        ValueTile::k_along_columns() +
        (cta.slot_address(slot.slot) + index * part * ValueTile::line_bytes) / 16;
    Part& share = registers(index);
    ptx::pin(share);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / step_columns; ++step) {
      Wgmma<Element, part>::multiply_k_contiguous(share, probabilities + 4 * step,
                                                  v + ValueTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }
};

#endif  // __CUDA_ARCH__ == 900
