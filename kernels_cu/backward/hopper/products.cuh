// Operations of a consumer warpgroup of the Hopper gradient kernel: products of 64 keys with query
// tiles, from registers or from shared memory, the softmax backward between them, and the epilogue
// that writes the gradients.
#pragma once

#include "backward/preprocess/clean.cuh"
#include "backward/hopper/column_exchange.cuh"
#include "backward/hopper/dropout.cuh"
#include "backward/hopper/listed_tiles.cuh"
#include "backward/hopper/streamed_bias.cuh"
#include "backward/softmax_backward.cuh"
#include "ptx/registers.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_rows.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

template <bool Value>
struct Const {
  static constexpr bool value = Value;
};

// Returns the number of k steps, of 16 columns each, of a product over head_dim. A CTA has at most
// `columns` of its columns.
constexpr int k_steps_of(int head_dim, int columns) {
  return round_up(head_dim < columns ? head_dim : columns, 16) / 16;
}

// `DqColumns` is the number of dq columns that the consumer computes.
template <class Config, int DqColumns>
struct HopperGradientProducts {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using Cta = HopperCta<Config>;
  using Step = typename Cta::Step;
  using KeyTile = typename Cta::KeyTile;
  using ValueTile = typename Cta::ValueTile;
  using QueryTile = typename Cta::QueryTile;
  using DoutTile = typename Cta::DoutTile;
  using DsTile = typename Cta::DsTile;
  using Fragments = typename Cta::Fragments;
  using Mods = typename Config::Mods;
  static constexpr bool wants_q = Cta::wants_q;
  static constexpr bool wants_k = Cta::wants_k;
  static constexpr bool wants_v = Cta::wants_v;
  static constexpr bool wants_ds = Cta::wants_ds;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int dim = Cta::dim;
  static constexpr int dim_v = Cta::dim_v;
  static constexpr int columns = Config::columns;
  static constexpr int parts = Br / columns;
  static constexpr int k_steps = k_steps_of(Config::head_dim, dim);
  static constexpr int k_steps_v = k_steps_of(Config::head_dim_v, dim_v);
  static_assert(columns % 16 == 0 && parts * columns == Br, "whole products");

  // Whether P and dS are computed in one pass, when both S and dP are complete. This is needed if
  // modifications change slopes: a slope, the derivative of the modified score by the score, is
  // computed from S, which P replaces.
  static constexpr bool single_pass = changes_slope<Mods>() && wants_ds;
  static_assert(!Cta::streams_bias || !single_pass, "`compute_p` loads a streamed bias");

  using Scores = float[columns / 2];
  using LeftOperand = unsigned[columns / 4];
  // Number of dq columns that the consumer computes at once.
  static constexpr int dq_columns = Config::wide && DqColumns > 64 ? 64 : DqColumns;
  static constexpr int dq_chunks = DqColumns / dq_columns;
  static constexpr int dq_column_tiles = dq_columns / 8;
  using DqPart = float[dq_columns / 2];

  const Cta& cta;
  const int consumer;
  const float scale_log2;
  PipelineState<Config::q_stages> q_ring = {};
  PipelineState<Config::dout_stages> dout_ring = {};
  PipelineState<Cta::ds_stages> ds_ring = {};
  using PartBias = HopperPartBias<Config>;
  PartBias part_bias;
  HopperPartDropout<Config> dropout;
  // Sums of P of each key, to detect keys whose pairs are all masked, if `sums_p`.
  float p_sums[2] = {};
  int sums_phase = 1;  // phase of `sums_empty`
  int sums_stage = 0;

  __device__ HopperGradientProducts(const Cta& cta, int consumer)
      : cta(cta),
        consumer(consumer),
        scale_log2(signed_scale<Config, double>(cta.p) * SoftmaxMath<double>::log2_e) {}

  // Returns the first of the lane's two keys in the CTA's KV tile. The second is `lane_key()` + 8.
  __device__ int lane_key() const {
    return consumer_key() + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // Returns the first of the consumer's keys in the KV tile.
  __device__ int consumer_key() const { return Config::wide ? 0 : 64 * consumer; }

  // Cleans this consumer's keys in shared memory. The keys must have arrived. Call before the first
  // product with them; other consumers read them only after a barrier.
  __device__ void clean_keys() const {
    if constexpr (Config::inspects) {
      if (!cta.inspects_sequence()) return;
      clean_rows<KeyTile>(cta.keys_address());
      if constexpr (Cta::exchanges_ds) {
        clean_rows<typename Cta::PeerKeyTile>(cta.peer_keys_address());
      }
      ptx::fence_proxy_async();
      Cta::sync_consumer(consumer);
    }
  }
  template <class Tile>
  __device__ void clean_rows(unsigned tile) const {
    constexpr int bytes = 64 * Tile::box_row_bytes;
#pragma unroll 1
    for (int box = 0; box < Tile::boxes; ++box) {
      const unsigned rows = consumer_rows<Tile>(tile + box * Tile::box_bytes);
#pragma unroll
      for (int offset = threadIdx.x % 128 * 16; offset < bytes; offset += 128 * 16) {
        clean_chunk<Element>(rows + offset);
      }
    }
  }

  // ---- Products.

  // Issues S^T = K Q^T, for part `part` of the query tile in a stage.
  template <int Count>
  __device__ void start_scores(Scores& scores, const unsigned (&keys)[Count], int stage,
                               int part) const {
    ptx::pin(scores);
    ptx::wgmma_fence();
    const unsigned left = matrix_address(cta.keys_address());
    const unsigned rows = rows_of<QueryTile>(matrix_address(cta.queries_address(stage)), part);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      multiply<KeyTile, QueryTile>(scores, keys, left, rows, step, step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Issues dP^T = V dO^T - delta, where `gradients` already holds -delta. Calls `between(step)`
  // after the issue of each k step.
  template <int Count, class Between>
  __device__ void start_dp(Scores& gradients, const unsigned (&values)[Count], int part,
                           Between between) const {
    // These copies hide the origin of the accumulators. Otherwise the compiler sees too many of
    // them, as the loop body is instantiated several times, and cannot keep wgmma asynchronous.
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      gradients[i] = __int_as_float(ptx::opaque(__float_as_int(gradients[i])));
    }
    ptx::pin(gradients);
    ptx::wgmma_fence();
    const unsigned left = matrix_address(cta.values_address());
    const unsigned rows =
        rows_of<DoutTile>(matrix_address(cta.dout_address(dout_ring.index)), part);
#pragma unroll
    for (int step = 0; step < k_steps_v; ++step) {
      multiply<ValueTile, DoutTile>(gradients, values, left, rows, step, true);
      between(step);
    }
    ptx::wgmma_commit_group();
  }

  // Issues one k step of a product between the consumer's keys, in registers (`kept`) or in shared
  // memory at `left`, and the rows of a query tile. Both are addresses for matrix descriptors.
  template <class LeftTile, class Tile, int Count>
  __device__ void multiply(Scores& sums, const unsigned (&kept)[Count], unsigned left,
                           unsigned rows, int step, bool accumulate) const {
    const unsigned long long right =
        descriptor(Tile::k_along_columns(), rows, Tile::column_step(step));
    if constexpr (Count > 1) {
      Wgmma<Element, columns>::multiply_k_contiguous(sums, kept + 4 * step, right, accumulate);
    } else {
      Wgmma<Element, columns>::multiply(sums,
                                        descriptor(LeftTile::k_along_columns(),
                                                   consumer_rows<LeftTile>(left),
                                                   LeftTile::column_step(step)),
                                        right, accumulate);
    }
  }

  template <class Tile, int Count>
  __device__ void keep(unsigned (&kept)[Count], unsigned tile) const {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned row_address = consumer_rows<Tile>(tile) + row * Tile::box_row_bytes;
#pragma unroll
    for (int step = 0; step < Count / 4; ++step) {
      unsigned fragment[4];
      ptx::ldmatrix_x4(fragment,
                       row_address + Tile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[4 * step + i] = fragment[i];
    }
  }

  // Waits for the product of `sums`, after which `Pending` other products were issued.
  template <int Pending, int Count>
  __device__ static void wait(float (&sums)[Count]) {
    ptx::wgmma_wait_group<Pending>();
    ptx::pin(sums);
  }

  // Issues dV += P^T dO.
  __device__ void start_dv(float (&dv_sums)[dim_v / 2], const LeftOperand& left_p, int part) const {
    start_sums<DoutTile, dim_v>(dv_sums, left_p,
                                rows_of<DoutTile>(cta.dout_address(dout_ring.index), part));
  }
  // Issues dK += dS^T Q.
  __device__ void start_dk(float (&dk_sums)[dim / 2], const LeftOperand& left_ds, int part) const {
    start_sums<QueryTile, dim>(dk_sums, left_ds,
                               rows_of<QueryTile>(cta.queries_address(q_ring.index), part));
  }
  template <class Tile, int Columns>
  __device__ static void start_sums(float (&sums)[Columns / 2], const LeftOperand& left,
                                    unsigned rows) {
    const unsigned address = matrix_address(rows);
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < columns / 16; ++step) {
      const auto right = descriptor(Tile::k_along_rows(), address, Tile::row_step(step));
      Wgmma<Element, Columns>::multiply_n_contiguous(sums, left + 4 * step, right, 1);
    }
    ptx::wgmma_commit_group();
  }

  // Issues dQ = dS K for the consumer's rows or, if it has all rows, for a chunk of its columns.
  template <int Chunk>
  __device__ void start_dq(DqPart& sums) const {
    const unsigned rows = matrix_address(cta.ds_address(ds_ring.index)) +
                          (Fragments::by_rows ? 64 * consumer * DsTile::box_row_bytes : 0);
    const unsigned keys = matrix_address(cta.dq_keys_address());
    ptx::pin(sums);
    ptx::wgmma_fence();
    multiply_dq<Chunk>(sums, rows, keys, false);
    ptx::wgmma_commit_group();
  }

  // Issues the product of the dS at `rows` and a chunk of the consumer's columns. The CTA's columns
  // of k start at `keys`. Both are addresses for matrix descriptors.
  template <int Chunk>
  __device__ void multiply_dq(DqPart& sums, unsigned rows, unsigned keys, bool accumulate) const {
    const unsigned columns_of_chunk =
        keys + (Cta::first_dq_column(consumer) + Chunk * dq_columns) / KeyTile::box_columns *
                   KeyTile::box_bytes;
#pragma unroll
    for (int step = 0; step < Bc / 16; ++step) {
      const auto ds = descriptor(DsTile::k_along_columns(), rows, DsTile::column_step(step));
      const auto k = descriptor(KeyTile::k_along_rows(), columns_of_chunk, KeyTile::row_step(step));
      WgmmaRows<Element, dq_columns>::multiply(sums, ds, k, accumulate || step != 0);
    }
  }

  // Returns the matrix descriptor of the operand `offset` bytes after an address. Each product
  // needs its descriptors in uniform registers, and one instruction computes the lower half of
  // each. If the sum of address and offset were divided by 16 and added as 64 bits, it would be
  // four instructions in sequence, which take longer than a product of 64 columns.
  __device__ static unsigned long long descriptor(unsigned long long layout, unsigned address,
                                                  int offset) {
    const unsigned low = unsigned(layout) + address / 16 + offset / 16;
    return layout >> 32 << 32 | low;
  }

  // Returns an address for use in matrix descriptors. With halves of the columns, the shuffle tells
  // the compiler that the address is uniform within a warp. It also makes the compiler recompute
  // the address for each product, because keeping addresses spills 130 bytes per thread (head_dim
  // 512). Call it before `wgmma_fence`: after the fence, the compiler merges shuffles and keeps
  // addresses.
  __device__ static unsigned matrix_address(unsigned address) {
    if constexpr (Cta::exchanges_scores) address = __shfl_sync(~0u, address, 0);
    return ::matrix_address<Cta::ranks>(address);
  }

  // Return the addresses of the consumer's first key in a KV tile, and of a part in a query tile.
  template <class Tile>
  __device__ unsigned consumer_rows(unsigned tile) const {
    return tile + consumer_key() * Tile::box_row_bytes;
  }
  template <class Tile>
  __device__ static unsigned rows_of(unsigned tile, int part) {
    return tile + part * columns * Tile::box_row_bytes;
  }

  // ---- Between products.

  // The lane's row statistics of a part: lse_log2 or -delta of each row.
  using LaneRows = float[columns / 4];
  // Loads lse_log2 of the lane's rows [begin, end).
  __device__ void load_lse(LaneRows& lse_log2, int part, int begin = 0,
                           int end = columns / 4) const {
    load_rows(lse_log2, part, 0, begin, end);
  }
  __device__ void load_minus_delta(LaneRows& minus_delta, int part) const {
    load_rows(minus_delta, part, Br);
  }
  __device__ void load_rows(LaneRows& row_values, int part, int first, int begin = 0,
                            int end = columns / 4) const {
    // `opaque` makes the compiler recompute the lane's offset. Keeping it in a register spills 20
    // more bytes (lists of query tiles, head_dim 128).
    const int lane_row = ptx::opaque(threadIdx.x) % 4 * 2;
    const float* stats = cta.stats(q_ring.index) + first + part * columns + lane_row;
    using Pair = Vector<float, 2>;
#pragma unroll
    for (int j = begin / 2; j < end / 2; ++j) {
      const Pair pair = *reinterpret_cast<const Pair*>(stats + 8 * j);
      row_values[2 * j] = pair.data[0];
      row_values[2 * j + 1] = pair.data[1];
    }
  }
  // Initializes the accumulators of dP with -delta.
  __device__ static void broadcast_minus_delta(Scores& gradients, const LaneRows& minus_delta) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) gradients[i] = minus_delta[i / 4 * 2 + i % 2];
  }

  // Loads the thread's word of visible pairs (`TransposedPairs`) of a part of the query tile in the
  // current stage. The word is uninitialized if the tile is not masked.
  __device__ unsigned load_visible_pairs(int part) const {
    if constexpr (Config::stores_pairs) {
      static_assert(columns == TransposedPairs::side, "one word per lane");
      return cta.pairs(q_ring.index)[TransposedPairs::word(part, consumer_key() / 64,
                                                           threadIdx.x % 128, Bc)];
    } else {
      return 0;
    }
  }

  // `SoftmaxBackward` for a part of a query tile, and the arguments of its functions. They get a
  // delta of 0, because the accumulators of dP already contain -delta.
  using PartSoftmaxBackward =
      SoftmaxBackward<Config, columns / 4, 2, GradientParams, typename PartBias::Pairs,
                      Config::block_mask, Config::stores_pairs>;
  __device__ PartSoftmaxBackward part_softmax_backward(const Step& step,
                                                       unsigned visible_pairs = 0) const {
    const float one = kept_weight<Config, float>(cta.p);
    return {cta.p, cta.mask, cta.sequence,      cta.coord.batch, step.head, scale_log2,
            one,   0,        part_bias.pairs(), visible_pairs};
  }
  __device__ auto rows_of_part(const Step& step, int part) const {
    const int first = step.tile * Br + part * columns + threadIdx.x % 4 * 2;
    return [=](int r) { return first + r / 2 * 8 + r % 2; };
  }
  __device__ static auto stats_of(const LaneRows& lse_log2) {
    return [&](int r) { return RowStats<float>{lse_log2[r], 0}; };
  }
  __device__ static auto element(Scores& accumulators) {
    return [&](int r, int n) -> float& { return accumulators[r / 2 * 4 + 2 * n + r % 2]; };
  }
  __device__ static auto key_step() {
    return [](int n) { return 8 * n; };
  }
  __device__ int first_key() const { return cta.coord.begin + lane_key(); }
  // Returns whether dropout keeps a pair, which `element()` returns for the same arguments.
  __device__ bool keeps(int r, int n) const { return dropout.keeps(r / 2 * 4 + 2 * n + r % 2); }

  // Converts S to P and, in `gradients`, dP to dS.
  __device__ void compute_p_and_ds(Scores& scores, Scores& gradients, const LaneRows& lse_log2,
                                   const Step& step, int part, bool is_masked,
                                   unsigned visible_pairs) const {
    const auto run = [&](auto masked) {
      part_softmax_backward(step, visible_pairs)
          .template run<masked.value>(rows_of_part(step, part), first_key(), stats_of(lse_log2),
                                      element(scores), element(gradients), key_step(),
                                      [&](int r, int n) { return keeps(r, n); });
    };
    is_masked ? run(Const<true>()) : run(Const<false>());
  }

  // Converts S to P for the lane's rows [first, last). A streamed bias of these rows is loaded
  // first, together with their log-sum-exp. Earlier loads would take registers.
  template <bool Masked>
  __device__ void compute_p(Scores& scores, LaneRows& lse_log2, const Step& step, int part,
                            int first, int last, unsigned visible_pairs = 0) {
    if constexpr (Cta::streams_bias) {
      constexpr int count = PartBias::rows_at_once;
#pragma unroll
      for (int row = 0; row < columns / 4; row += count) {
        if (row < first || row >= last) continue;
        part_bias.load(cta, fragment_offset<typename Cta::BiasTile>(), row);
        load_lse(lse_log2, part, row, row + count);
      }
    }
    part_softmax_backward(step, visible_pairs)
        .template compute_p<Masked>(rows_of_part(step, part), first_key(), stats_of(lse_log2),
                                    element(scores), key_step(), first, last);
  }

  // Whether P is computed for all pairs, and the P of masked pairs are set to 0 afterwards.
  // Otherwise the code that computes P evaluates the mask. Calls that are modified by dropout only
  // take the path of unmodified ones, whose exponentials overlap the product of dP.
  static constexpr bool masks_p =
      !Config::modified || Cta::streams_bias ||
      (!Mods::changes_scores &&
       (Config::stores_pairs || (Config::dropout && !Mods::masks_pairs)));

  __device__ void compute_all_p(Scores& scores, LaneRows& lse_log2, const Step& step, int part,
                                bool is_masked, unsigned visible_pairs) {
    constexpr int rows = columns / 4;
    if constexpr (Config::modified && masks_p) {
      compute_p<false>(scores, lse_log2, step, part, 0, rows);
      if (is_masked) mask_p(scores, step, part, visible_pairs);
    } else if (is_masked) {
      compute_p<true>(scores, lse_log2, step, part, 0, rows, visible_pairs);
    } else {
      compute_p<false>(scores, lse_log2, step, part, 0, rows);
    }
  }
  __device__ void mask_p(Scores& scores, const Step& step, int part, unsigned visible_pairs) const {
    if constexpr (Config::stores_pairs) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) scores[i] = visible_pairs >> i & 1 ? scores[i] : 0;
    } else {
      part_softmax_backward(step).mask_p(rows_of_part(step, part), first_key(), element(scores),
                                         key_step());
    }
  }

  // Draws the random numbers of a part of the query tile of `step`, if there is dropout.
  __device__ void draw_dropout(const Step& step, int part) {
    dropout.draw(cta, step, part, first_key() - threadIdx.x % 32 / 4);
  }

  // Replaces dP - delta of dropped pairs by -delta. The tile must be in the current stage of q.
  __device__ void drop_dp(Scores& gradients, int part) const {
    if constexpr (Config::dropout) {
      static_assert(!Cta::exchanges_scores, "one CTA of two that divide columns has no delta");
      LaneRows minus_delta;
      load_minus_delta(minus_delta, part);
      dropout.drop_dp(gradients, minus_delta);
    }
  }

  // Whether sums of P show which keys have a visible pair. If the block mask stores visible pairs,
  // its bits of keys show this without registers. But a changed score of -inf masks its pair, too.
  // Absolute values are summed, because consumers of wide heads pass P times the slope.
  static constexpr bool sums_p =
      Mods::masks_pairs && (Mods::changes_scores || !Config::stores_pairs);

  __device__ void sum_p(const Scores& scores) {
    if constexpr (sums_p) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) p_sums[i / 2 % 2] += fabsf(scores[i]);
    }
  }

  // Whether modifications may mask pairs of a tile for which `is_masked` is false. They cannot if
  // the block mask stores visible pairs: all pairs of its full tiles are visible, so no row of such
  // a tile attends to one key only.
  static constexpr bool may_mask_any_tile =
      Config::may_mask_pairs && (Mods::changes_scores || !Config::stores_pairs);

  // Makes dS exactly 0 in rows that attend to one key only. `accumulators` is dS itself, or the P
  // that dS is computed from. With `Config::may_mask_pairs` such rows are recognized by their P
  // alone: checking positions, too, takes registers that kernels with mask functions do not have.
  __device__ void zero_one_key_ds(Scores& accumulators, Scores& scores, const Step& step, int part,
                                  bool is_masked) const {
    if constexpr (!Config::may_mask_pairs) {
      if (is_masked) {
        part_softmax_backward(step).zero_one_key_ds(rows_of_part(step, part), element(scores),
                                                    element(accumulators));
      }
    } else if constexpr (zeroes_one_key_ds<Config>) {
      static_assert(sizeof(Element) == 2, "for other types the threshold depends on the row");
      if (!is_masked && !may_mask_any_tile) return;
      const float threshold =
          p_of_one_key<Element, most_columns<Config>> * kept_weight<Config, float>(cta.p);
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) {
        // See `SoftmaxBackward::run()` for dropped pairs.
        accumulators[i] = scores[i] > threshold && dropout.keeps(i) ? 0 : accumulators[i];
      }
    }
  }

  // Computes dS = P (dP - delta). A masked pair has P = 0; its dS is set to 0 by selection.
  __device__ static void compute_ds(Scores& gradients, const Scores& scores, bool is_masked) {
    if (is_masked || may_mask_any_tile) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) {
        const float ds = scores[i] * gradients[i];
        gradients[i] = scores[i] == 0 ? 0 : ds;
      }
    } else {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) gradients[i] *= scores[i];
    }
  }

  // Converts an accumulator to a left operand by packing pairs of elements.
  __device__ static void narrow(LeftOperand& left, const Scores& accumulators) {
#pragma unroll
    for (int i = 0; i < columns / 4; ++i) {
      left[i] = pack<Element>(accumulators[2 * i], accumulators[2 * i + 1]);
    }
  }

  // Returns the offset in a tile of queries by keys, with one box for each consumer's keys, of the
  // lane's row address for ldmatrix and stmatrix with .trans, for the first 16 queries. The swizzle
  // keeps the 16-byte chunks of eight consecutive queries in different banks.
  template <class Tile>
  __device__ unsigned fragment_offset() const {
    const int lane = threadIdx.x % 32;
    const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    return consumer_key() / 64 * Tile::box_bytes +
           (lane / 16 * 8 + lane % 8) * Tile::box_row_bytes + (chunk ^ lane % 8) * 16;
  }

  // Writes dS of the consumer's keys to its box of the dS tile, which has one row per query.
  __device__ void write_ds(const LeftOperand& left_ds, int part) const {
    const unsigned address =
        rows_of<DsTile>(cta.ds_address(ds_ring.index), part) + fragment_offset<DsTile>();
#pragma unroll
    for (int step = 0; step < columns / 16; ++step) {
      const unsigned four[4] = {left_ds[4 * step], left_ds[4 * step + 1], left_ds[4 * step + 2],
                                left_ds[4 * step + 3]};
      ptx::stmatrix_x4_trans(address + DsTile::row_step(step), four);
    }
  }

  // ---- dq of the consumer's part of a query tile.

  __device__ unsigned sums_address() const {
    return cta.sums_address(consumer) +
           Fragments::fragment_offset(threadIdx.x / 32 % 4, 0, 0, threadIdx.x % 32) *
               int(sizeof(float));
  }
  __device__ void arrive_sums_full() {
    arrive_warp(cta.sums_full(consumer, sums_stage));
    sums_stage ^= 1;
    sums_phase ^= 1;
  }

  // Writes a chunk of the dq sums to the consumer's buffer, in accumulator order. The last chunk
  // also signals the adder lane.
  template <int Chunk>
  __device__ void write_dq_sums(const DqPart& sums) {
    if constexpr (Chunk == 0) ptx::mbarrier_wait(cta.sums_empty(consumer), sums_phase);
#pragma unroll
    for (int j = 0; j < dq_column_tiles; ++j) {
      unsigned four[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) four[c] = __float_as_uint(sums[4 * j + c]);
      const int offset = Fragments::fragment_offset(0, 0, j, 0) + 64 * Chunk * dq_columns;
      ptx::st_shared_v4(sums_address() + offset * int(sizeof(float)), four);
    }
    if constexpr (Chunk == dq_chunks - 1) {
      ptx::fence_proxy_async();
      arrive_sums_full();
    }
  }

  __device__ void write_dq(DqPart& sums, const Step& step, int stage) const {
    const float scale = signed_scale<Config, float>(cta.p);
    const int warp = 4 * consumer + threadIdx.x / 32 % 4;
    const int lane = ptx::opaque(threadIdx.x % 32);  // 40 bytes less spilled, see `load_rows`
    const int first_column = Cta::first_dq_column(warp / 4);
    Gradient* output = cta.p.dq.template head<Gradient>(cta.sequence.q_batch, step.head) +
                       (cta.sequence.q_first + int64(step.tile * Br)) * cta.p.dq.row_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row_in_tile = Fragments::row(warp, 0) + lane / 4 + 8 * half;
      const int row = step.tile * Br + row_in_tile;
      // The sums of a row without visible keys may be NaN: 0 times the NaN key of another row.
      const bool is_visible = cta.stats(stage)[row_in_tile] != SoftmaxMath<float>::infinity() &&
                              cta.mask.visible_begin(row) < cta.mask.visible_end(row);
      scale_row<dq_column_tiles>(sums + 2 * half, scale);
      if (!is_visible) fill_row_from<dq_column_tiles>(sums + 2 * half, 0, 0);
      Gradient* target = output + row_in_tile * cta.p.dq.row_stride;
      // Of each 16 columns, even lanes store four of the first eight, odd lanes four of the others.
      const int lane_column = first_column + lane % 2 * 8 + lane % 4 / 2 * 4;
      Vector<Gradient, 4> chunks[dq_column_tiles / 2];
#pragma unroll
      for (int i = 0; i < dq_column_tiles / 2; ++i) {
        const float* two = sums + 8 * i + 2 * half;
        chunks[i] = exchange_columns<Gradient>(pack<Gradient>(two[0], two[1]),
                                               pack<Gradient>(two[4], two[5]));
      }
      if (row >= cta.sequence.seqlen_q) continue;
#pragma unroll
      for (int i = 0; i < dq_column_tiles / 2; ++i) {
        if (Config::head_dim < dim && first_column + 16 * i >= Config::head_dim) break;
        store_columns<Config::head_dim, Config::out_alignment>(
            target + lane_column + 16 * i, chunks[i], Config::head_dim - lane_column - 16 * i);
      }
    }
  }

  // ---- dk and dv.

  // Returns whether any query attends to a key. If none does, its dk and dv may be 0 times NaN.
  __device__ bool is_visible_key(int half) const {
    const int key = cta.coord.begin + lane_key() + 8 * half;
    const bool is_visible = cta.mask.row_begin(key, cta.sequence.seqlen_q) <
                            cta.mask.row_end(key, cta.sequence.seqlen_q);
    if constexpr (sums_p) {
      // All lanes take part in the sum, because the shuffles wait for them.
      const float sum = sum_of_lanes(p_sums[half]);
      return is_visible && sum != 0;
    } else if constexpr (Mods::masks_pairs) {
      return is_visible && cta.is_visible_key(key);
    } else {
      return is_visible;
    }
  }

  template <int Count>
  __device__ void zero_masked_keys(float (&sums)[Count]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_visible_key(half)) fill_row_from<Count / 4>(sums + 2 * half, 0, 0);
    }
  }

  template <int Count>
  __device__ static void clear(float (&sums)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) sums[i] = 0;
  }

  __device__ void write_dv(float (&dv_sums)[dim_v / 2]) const {
    zero_masked_keys(dv_sums);
    write<Config::head_dim_v, ValueTile>(cta.p.dv, dv_sums, cta.values_address());
  }
  __device__ void write_dk(float (&dk_sums)[dim / 2]) const {
    const float scale = signed_scale<Config, float>(cta.p);
#pragma unroll
    for (int half = 0; half < 2; ++half) scale_row<dim / 8>(dk_sums + 2 * half, scale);
    zero_masked_keys(dk_sums);
    write<Config::head_dim, KeyTile>(cta.p.dk, dk_sums, cta.keys_address());
  }

  // Writes dk or dv through the consumer's part of a shared-memory tile that is not read any more,
  // so that global stores are whole 16-byte chunks. A float32 gradient takes two passes (`part`).
  template <int Dim, class Tile, int Count>
  __device__ void write(const Tensor& tensor, const float (&accumulators)[Count],
                        unsigned tile) const {
    constexpr int parts = sizeof(Gradient) / sizeof(Element);
    constexpr int column_tiles = Count / 4 / parts;
    const int first = cta.coord.begin + consumer_key();
    const int left = cta.sequence.seqlen_k - first;
    const int first_column = Cta::column_part() * Tile::columns;
    Gradient* output = tensor.head<Gradient>(cta.sequence.k_batch, cta.coord.head) +
                       (int64(cta.sequence.k_first) + first) * tensor.row_stride + first_column;
    const int lane_row = lane_key() - consumer_key();
    const unsigned rows = consumer_rows<Tile>(tile);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      // Wait until all lanes have read the previous part.
      if (part > 0) Cta::sync_consumer(consumer);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
          store_two<Tile>(rows, row, j, accumulators + 4 * (part * column_tiles + j) + 2 * half);
        }
      }
      Cta::sync_consumer(consumer);
      constexpr int chunks = column_tiles * parts, columns_of_chunk = 16 / sizeof(Gradient);
#pragma unroll 4
      for (int index = threadIdx.x % 128; index < 64 * chunks; index += 128) {
        const int row = index / chunks, chunk = index % chunks;
        if (row >= left) break;
        unsigned bits[4];
        ptx::ld_shared_v4(bits, rows + row * Tile::box_row_bytes +
                                    Tile::chunk_offset(row, chunk / 2 * 2, chunk % 2));
        const int column = part * column_tiles * 8 + chunk * columns_of_chunk;
        store_chunk<Gradient, Config::out_alignment>(
            output + row * tensor.row_stride + column,
            reinterpret_cast<const Vector<Gradient, columns_of_chunk>&>(bits),
            Dim - first_column - column);
      }
    }
  }

  // Stores two columns of the 8-column group `eight`: a chunk of 16 bytes per row, two if float32.
  template <class Tile>
  __device__ static void store_two(unsigned rows, int row, int eight, const float* two) {
    const unsigned row_address = rows + row * Tile::box_row_bytes;
    if constexpr (sizeof(Gradient) == sizeof(Element)) {
      ptx::st_shared(
          row_address + threadIdx.x % 4 * 4 + Tile::chunk_offset(row, eight / 2 * 2, eight % 2),
          pack<Element>(two[0], two[1]));
    } else {
      const unsigned address = row_address + threadIdx.x % 2 * 8 +
                               Tile::chunk_offset(row, 2 * eight, threadIdx.x % 4 / 2);
      ptx::st_shared(address, __float_as_uint(two[0]));
      ptx::st_shared(address + 4, __float_as_uint(two[1]));
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
