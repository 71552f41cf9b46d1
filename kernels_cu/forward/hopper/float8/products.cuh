// The two matrix products of a consumer of the Hopper kernel for float8 inputs.
#pragma once

#include "forward/hopper/float8/float8.cuh"
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
  using Stage = PipelineState<Config::stages>;

  static constexpr int step_columns = 32;  // k of one wgmma
  static constexpr int q_steps = round_up(Config::head_dim, step_columns) / step_columns;
  // S is computed in one or two parts of the keys, and O in partial outputs with as many columns as
  // a part has keys. Both alternate in the same registers, `sums`. With separate registers, the
  // compiler would sink additions below the next wgmma, or serialize wgmma for lack of registers.
  static constexpr int parts = Config::score_parts;
  static constexpr int part = Bc / parts;
  static constexpr int columns_v = Cta::Tiles::value_rows;
  static constexpr int partial_outs = columns_v / part;
  static_assert(columns_v % part == 0, "whole partial outputs");
  static_assert(parts == 1 || partial_outs == 1,
                "registers of a second partial output hold scores");
  using Part = float[part / 2];

  float out[columns_v / 2];
  float sums[Bc / 2];
  unsigned probabilities[Bc / 8];

  using Base::Base;

  __device__ Stage next_stage() {
    const Stage state = ring;
    ring.advance();
    return state;
  }

  __device__ void clear_output() {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) out[i] = 0;
  }

  // Issues S = Q K^T.
  __device__ void start_scores(Stage state) {
    wait(state);
#pragma unroll
    for (int i = 0; i < parts; ++i) start_part_of_scores(state, i);
  }

  // Waits for S. Releases the K stage and, after the last KV tile of a query tile, the query stage.
  __device__ void wait_scores(Stage state, bool is_last_tile) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(sums);
    arrive_warp(cta.empty(state.index));
    if (is_last_tile) Base::release_queries();
  }

  // Computes O = O * factor + P V, and issues the next S if `scores_follow`. With two parts of S, V
  // is narrow enough for one partial output. While it is added, the second part of S is computed:
  //
  //   registers 0   | P V   | added          | first part of S
  //   registers 1           | second part of S
  template <bool scores_follow>
  __device__ void add_output(Stage values, Stage keys, const float (&factor)[2]) {
    wait(values);
    start_partial_out(values, 0);
    if constexpr (scores_follow) wait(keys);
    if constexpr (parts > 1 && scores_follow) start_part_of_scores(keys, 1);
#pragma unroll
    for (int i = 0; i < partial_outs; ++i) {
      const bool is_last = i + 1 == partial_outs;
      wait_all_but_one(parts > 1 && scores_follow);
      Part& partial_out = registers(i);
      ptx::pin(partial_out);
      if (is_last) arrive_warp(cta.empty(values.index));
#pragma unroll
      for (int j = 0; j < part / 2; ++j) {
        float& total = out[i * part / 2 + j];
        total = fmaf(total, factor[j / 2 % 2], partial_out[j]);
      }
      if (!is_last) {
        start_partial_out(values, i + 1);
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

  __device__ void wait(Stage state) const {
    ptx::mbarrier_wait(cta.full(state.index), state.phase);
  }

  __device__ static void wait_all_but_one(bool one) {
    if (one) {
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
  }

  __device__ void start_part_of_scores(Stage state, int index) {
    const unsigned long long q = QueryTile::k_along_columns() + Base::queries_address() / 16;
    const unsigned long long k =
        KeyTile::k_along_columns() +
        (cta.stage_address(state.index) + index * part * KeyTile::box_row_bytes) / 16;
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

  __device__ void start_partial_out(Stage state, int index) {
    const unsigned long long v =
        ValueTile::k_along_columns() +
        (cta.stage_address(state.index) + index * part * ValueTile::box_row_bytes) / 16;
    Part& partial_out = registers(index);
    ptx::pin(partial_out);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / step_columns; ++step) {
      Wgmma<Element, part>::multiply_k_contiguous(partial_out, probabilities + 4 * step,
                                                  v + ValueTile::column_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
  }
};

#endif  // __CUDA_ARCH__ == 900
