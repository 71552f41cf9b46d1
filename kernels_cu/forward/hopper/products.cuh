// The two matrix products of a consumer of the Hopper kernel, S = Q K^T and O = P V: operands and
// accumulators in registers, and the ring stages that they read and release.
#pragma once

#include "forward/hopper/cta.cuh"
#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "tile/element.cuh"

#if __CUDA_ARCH__ == 900

// `Transposed` selects the specialization for float8 (float8/products.cuh), whose V is transposed.
template <class Config, bool Transposed = HopperCta<Config>::transposes_values>
struct HopperProducts {
  using Operand = HopperOperand<typename Config::Element>;
  using Element = typename Operand::type;
  using Cta = HopperCta<Config>;
  using QueryTile = typename Cta::QueryTile;
  using KeyTile = typename Cta::KeyTile;
  using ValueTile = typename Cta::ValueTile;
  static constexpr int Bc = Config::Bc;
  static constexpr int components = Operand::components;
  static constexpr int component_products = components * (components + 1) / 2;
  static constexpr int k_steps = round_up(Cta::columns, 16) / 16;
  static constexpr int kept_steps = Config::q_steps;  // 16-column steps of Q kept in registers
  static constexpr bool keeps_all_queries = kept_steps == k_steps;

  // Tensor cores accumulate with rounding toward zero, so long sums drift. For float32 inputs, the
  // contribution of each KV tile to O (`partial_out`) is accumulated separately, then added. For
  // wide heads, `partial_out` has two buffers of 32 columns: the tensor cores accumulate in one
  // while the other is added to O.
  static constexpr bool two_level_accumulation = components > 1;
  static constexpr bool is_wide =
      two_level_accumulation && (Config::head_dim > 128 || Config::head_dim_v > 128);
  static constexpr int columns_v = round_up(Cta::columns_v, is_wide ? 32 : 16);
  static constexpr int partial_columns = is_wide ? 32 : columns_v;
  static constexpr int partial_outs = columns_v / partial_columns;
  static constexpr int partial_buffers = is_wide ? 2 : 1;

  static_assert(kept_steps >= 0 && kept_steps <= k_steps, "steps of 16 columns");
  static_assert(components == 1 || kept_steps == 0,
                "float32 keeps no components of Q in registers");

  const Cta& cta;
  const int consumer;

  PipelineState<Config::stages> ring;
  PipelineState<Config::q_stages> q_ring;

  float scores[Bc / 2];
  // The operand P, as pairs in accumulator order, and P of the next KV tile. The latter may be
  // computed while the tensor cores still read P.
  unsigned probabilities[components][Bc / 4];
  unsigned next_probabilities[components][Bc / 4];
  unsigned queries[kept_steps ? 4 * kept_steps : 1];
  float out[columns_v / 2];
  float partial_out[partial_buffers][two_level_accumulation ? partial_columns / 2 : 1];

  __device__ HopperProducts(const Cta& cta, int consumer) : cta(cta), consumer(consumer) {}

  // Returns the first row of this consumer in a query tile.
  __device__ int first_row_of(const TileCoord& coord) const {
    return coord.q_begin + 64 * consumer;
  }

  // Returns the first of the two rows of which this lane holds elements; the other is eight below.
  __device__ static int lane_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  __device__ void wait_queries() const {
    ptx::mbarrier_wait(cta.q_full(q_ring.index), q_ring.phase);
  }

  // Returns the address of this consumer's 64 query rows.
  __device__ unsigned queries_address() const {
    return cta.shared + q_ring.index * Cta::q_stage_bytes +
           consumer * 64 * QueryTile::box_row_bytes;
  }

  // Copies queries to registers, so that wgmma reads less shared memory. Otherwise, reading Q and K
  // and writing arriving tiles would take all of its bandwidth. If all of Q is in registers, the
  // stage of Q can be released early.
  __device__ void load_query_fragments() {
    if constexpr (kept_steps > 0) copy_query_fragments();
  }

  __device__ void copy_query_fragments() {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned row_address = queries_address() + row * QueryTile::box_row_bytes;
#pragma unroll
    for (int step = 0; step < kept_steps; ++step) {
      unsigned fragment[4];
      ptx::ldmatrix_x4(fragment,
                       row_address + QueryTile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) queries[4 * step + i] = fragment[i];
    }
  }

  // Issues S = Q K^T.
  __device__ void start_scores() {
    if constexpr (Cta::values_in_keys) {
      start_mla_scores();
    } else {
      start_plain_scores();
    }
  }

  __device__ void start_plain_scores() {
    wait_stage();
    const unsigned long long q =
        QueryTile::k_along_columns() + Cta::descriptor_address(queries_address());
    const unsigned long long k =
        KeyTile::k_along_columns() + Cta::descriptor_address(cta.stage_address(ring.index));
    ptx::pin(scores);
    ptx::wgmma_fence();
    // For wide heads, this loop over component pairs is not unrolled. Otherwise the compiler would
    // keep matrix descriptors in local memory: 79 instead of 60 TFLOP/s at head_dim 256, causal. At
    // head_dim 64 and 128, a loop is 3 to 10% slower.
    for_each_product<components, is_wide ? 1 : component_products>([&](int q_component,
                                                                       int k_component,
                                                                       bool is_first) {
      const unsigned long long q_start = q + q_component * (QueryTile::bytes / 16);
      const unsigned long long k_start = k + k_component * (KeyTile::bytes / 16);
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        const unsigned long long k_step = k_start + KeyTile::column_step(step) / 16;
        if (step < kept_steps) {
          Wgmma<Element, Bc>::multiply_k_contiguous(scores, queries + 4 * step, k_step, step != 0);
        } else {
          Wgmma<Element, Bc>::multiply(scores, q_start + QueryTile::column_step(step) / 16, k_step,
                                       step != 0 || !is_first);
        }
      }
    });
    ptx::wgmma_commit_group();
    ring.advance();
  }

  __device__ void start_mla_scores() {
    using QueryFirst = typename QueryTile::First;
    using KeyFirst = typename KeyTile::First;
    wait_stage();
    const unsigned q = cta.shared + q_ring.index * Cta::q_stage_bytes;
    const unsigned k = cta.stage_address(ring.index);
    ptx::pin(scores);
    ptx::wgmma_fence();
    multiply_columns<QueryFirst, KeyFirst>(q, k, false);
    multiply_columns<typename QueryTile::Rest, typename KeyTile::Rest>(
        q + QueryFirst::bytes, k + KeyFirst::bytes, true);
    ptx::wgmma_commit_group();
    ring.advance();
  }

  // Multiplies this consumer's rows of a query tile by a K tile, both given by their addresses.
  template <class Queries, class Keys>
  __device__ void multiply_columns(unsigned q_tile, unsigned k_tile, bool accumulate) {
    const unsigned long long q =
        Queries::k_along_columns() +
        Cta::descriptor_address(q_tile + consumer * 64 * Queries::box_row_bytes);
    const unsigned long long k = Keys::k_along_columns() + Cta::descriptor_address(k_tile);
#pragma unroll
    for (int step = 0; step < Queries::columns / 16; ++step) {
      Wgmma<Element, Bc>::multiply(scores, q + Queries::column_step(step) / 16,
                                   k + Keys::column_step(step) / 16, accumulate || step != 0);
    }
  }

  // Called when S is complete. Releases the K stage of the product that was issued `products`
  // products ago, and the query stage if S was its last use. `is_first_tile` and `is_last_tile` say
  // whether the KV tile of S is the first or last one of its query tile, in processing order.
  // Queries in registers have been read from shared memory when the first product with them is
  // complete.
  __device__ void release_scores(int products, bool is_first_tile, bool is_last_tile) {
    ptx::pin(scores);
    if constexpr (!Cta::values_in_keys) arrive_warp(cta.empty(stage_before(products)));
    if (keeps_all_queries ? is_first_tile : is_last_tile) release_queries();
  }

  __device__ void release_queries() {
    arrive_warp(cta.q_empty(q_ring.index));
    q_ring.advance();
  }

  __device__ void wait_stage() const { ptx::mbarrier_wait(cta.full(ring.index), ring.phase); }

  // Skips K or the end marker, after next_kv_tile() has waited for it. Releases the stage of K.
  __device__ void skip_keys(bool is_end) {
    if (!is_end) arrive_warp(cta.empty(ring.index));
    ring.advance();
  }

  // Skips V, but waits until V has arrived: the phases of its stage must complete in order.
  __device__ void skip_values() {
    wait_stage();
    arrive_warp(cta.empty(ring.index));
    ring.advance();
  }

  // Moves P of the next KV tile to the operand. No wgmma may be in flight: if the operand were
  // written earlier, the compiler would serialize the products.
  __device__ void move_probabilities() {
#pragma unroll
    for (int component = 0; component < components; ++component) {
#pragma unroll
      for (int i = 0; i < Bc / 4; ++i) {
        const unsigned next = next_probabilities[component][i];
        probabilities[component][i] = Config::overlaps_output ? ptx::mov(next) : next;
      }
    }
  }

  // Issues O = P V, or O += P V; for float32, the first partial output. In MLA, V is in the stage
  // of K: the previous stage, or the one before that if the next S has been issued since
  // (`after_scores`).
  __device__ void start_output(bool accumulate, bool after_scores = false) {
    if constexpr (Cta::values_in_keys) {
      start_product<columns_v>(out, 0, stage_before(after_scores ? 2 : 1), accumulate);
      return;
    }
    wait_stage();
    if constexpr (two_level_accumulation) {
      if (!accumulate) {
#pragma unroll
        for (int i = 0; i < columns_v / 2; ++i) out[i] = 0;
      }
      start_partial_out(0, ring.index);
    } else {
      start_product<columns_v>(out, 0, ring.index, accumulate);
    }
    ring.advance();
  }

  // Waits until O is complete, including all partial outputs, and releases the stage of V.
  __device__ void wait_output(bool after_scores = false) {
    const int stage = stage_before(Cta::values_in_keys && after_scores ? 2 : 1);
    if constexpr (two_level_accumulation) {
      add_partial_outs(stage);
    } else {
      ptx::wgmma_wait_group<0>();
      ptx::pin(out);
      arrive_warp(cta.empty(stage));
    }
  }

  // Adds all partial outputs to O, then releases the stage of V, which all of them read.
  __device__ void add_partial_outs(int stage) {
#pragma unroll
    for (int i = 0; i < partial_outs; ++i) {
      if (i + 1 < partial_outs) {
        start_partial_out(i + 1, stage);
        ptx::wgmma_wait_group<1>();
      } else {
        ptx::wgmma_wait_group<0>();
        arrive_warp(cta.empty(stage));
      }
      ptx::pin(partial_out[i % partial_buffers]);
#pragma unroll
      for (int j = 0; j < partial_columns / 2; ++j) {
        out[i * partial_columns / 2 + j] += partial_out[i % partial_buffers][j];
      }
    }
  }

  __device__ void start_partial_out(int index, int stage) {
    start_product<partial_columns>(partial_out[index % partial_buffers], index * partial_columns,
                                   stage, false);
  }

  // Issues sums = P V, or sums += P V, for some columns of V in a stage.
  template <int columns>
  __device__ void start_product(float (&sums)[columns / 2], int column, int stage,
                                bool accumulate) {
    const unsigned long long v =
        ValueTile::k_along_rows() +
        Cta::descriptor_address(cta.stage_address(stage) + ValueTile::column_step(column / 16));
    ptx::pin(sums);
    ptx::wgmma_fence();
    for_each_product<components>([&](int p_component, int v_component, bool is_first) {
#pragma unroll
      for (int step = 0; step < Bc / 16; ++step) {
        Wgmma<Element, columns>::multiply_n_contiguous(
            sums, probabilities[p_component] + 4 * step,
            v + (v_component * ValueTile::bytes + ValueTile::row_step(step)) / 16,
            step != 0 || !is_first || accumulate);
      }
    });
    ptx::wgmma_commit_group();
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < columns_v / 2; ++i) {
      // If another row of the warp has a new base, a row is multiplied by 1, which must not change
      // it. It may hold subnormal products with p far below 1, which mul_rn does not flush to zero.
      out[i] = ptx::mul_rn(out[i], factor[i / 2 % 2]);
    }
  }

  // Returns the index that the ring had `products` products ago.
  __device__ int stage_before(int products) const {
    const int stage = ring.index - products;
    return stage < 0 ? stage + Config::stages : stage;
  }
};

#endif  // __CUDA_ARCH__ == 900
