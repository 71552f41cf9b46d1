// Gradients of attention on tensor cores, sm_80 and newer, by five products in one pass. Inputs are
// float16, bfloat16, or float32 as pairs of float16 components (preprocess/float32_fp16x2.cuh), for
// which another kernel first writes preswizzled tiles (preprocess/preswizzle.cuh).
//
// FlashAttention-2 (Dao 2023, algorithm 2): a CTA owns a KV tile, whose dk and dv it keeps in
// registers. It iterates over the query tiles of all query heads, from the last to the first or,
// with lists of query tiles, in the order of its list (listed_tiles.cuh):
//
//   S^T = K Q^T,  dP^T = V dO^T,  P and dS from these,  dV += P^T dO,  dK += dS^T Q,  dQ = dS K
//
// The CTAs of a head add their dq of a query tile in a fixed order (dq/semaphore.cuh). Scores are
// transposed, so that a warp's P^T and dS^T are already in registers as left operands of dV and dK.
// If a warp's registers cannot hold whole rows of dk and dv, `query_warps` warps have the same
// keys. Each then computes the scores of some of the queries and sums some of the columns of dk and
// dv, and the warps exchange P^T and dS^T through shared memory. Above head_dim 256, shared memory
// has space for few queries. A warp then computes the scores of eight queries. As a left operand
// has at least 16 queries, all warps read P^T and dS^T of all queries from shared memory.
#include "backward/mma/products.cuh"
#include "backward/dq/accumulate.cuh"
#include "backward/dq/semaphore.cuh"

#if __CUDA_ARCH__ >= 800

// Records which keys of a lane have a visible pair: by sums of P or, with `HasBits`, by the bits of
// visible pairs, which take fewer registers.
template <class Softmax, int row_tiles, int columns, bool HasBits>
struct VisibleKeysOf {
  using Scores = float[row_tiles][columns / 8][4];
  float p_sums[row_tiles][2];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) p_sums[i][0] = p_sums[i][1] = 0;
  }
  template <bool Masked>
  __device__ void record(const Scores& p, typename Softmax::VisiblePairs) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) p_sums[i][c / 2] += p[i][j][c];
      }
    }
  }
  __device__ bool include(int i, int half) const { return p_sums[i][half] != 0; }
};
template <class Softmax, int row_tiles, int columns>
struct VisibleKeysOf<Softmax, row_tiles, columns, true> {
  using Scores = float[row_tiles][columns / 8][4];
  using VisiblePairs = typename Softmax::VisiblePairs;
  VisiblePairs any_visible;

  __device__ void clear() { any_visible = 0; }
  template <bool Masked>
  __device__ void record(const Scores&, VisiblePairs visible_pairs) {
    any_visible |= Masked ? visible_pairs : ~VisiblePairs(0);
  }
  __device__ bool include(int i, int half) const {
    return Softmax::has_visible_pair(any_visible, 2 * i + half);
  }
};

template <class Config>
struct MmaGradients : MmaGradientProducts<Config> {
  using Base = MmaGradientProducts<Config>;
  using Base::has_components, Base::wants_q, Base::wants_k, Base::wants_v, Base::wants_ds, Base::Br;
  using Base::Bc, Base::stages, Base::threads, Base::query_warps, Base::warp_keys, Base::row_tiles;
  using Base::columns, Base::passes, Base::dq_column_warps, Base::dq_row_tiles, Base::dq_steps;
  using Base::operand_columns, Base::shares_operands, Base::paired;
  using Base::refines_p, Base::refines_ds, Base::exchanges_p, Base::exchanges_ds;
  using Base::stage_bytes, Base::stages_offset, Base::p, Base::coord, Base::sequence, Base::mask;
  using Base::memory, Base::shared, Base::scale_log2, Base::warp, Base::lane;
  using Base::key_warp, Base::query_warp, Base::keys_address, Base::values_address,
      Base::ds_address;
  using Base::p_address, Base::queries_address, Base::dout_address, Base::stats_address,
      Base::load_keys, Base::load, Base::load_early, Base::load_late, Base::loads_early,
      Base::is_alone, Base::staggers_loads, Base::overlaps_semaphore, Base::semaphore_held;
  using Base::has_steps, Base::first_step, Base::is_last, Base::next_step, Base::is_masked;
  using Base::order_index, Base::read;
  using Base::multiply_paired, Base::units, Base::second_unit, Base::scale, Base::read_ds;
  using Base::first_dq_tile, Base::p_units_begin, Base::ds_units_begin, Base::factors;
  using Base::clean_keys, Base::clean_queries, Base::apply_to_left;
  using typename Base::Gradient;
  using typename Base::Component;
  using typename Base::Scores;
  using typename Base::Layout;
  using typename Base::LayoutV;
  using typename Base::Columns;
  using typename Base::ColumnsV;
  using typename Base::DqColumns;
  using typename Base::Fragments;
  using typename Base::Stats;
  using typename Base::Step;
  using typename Base::Left;
  using typename Base::Units;

  // Whether functions that mask pairs are evaluated before the products of a tile, and not together
  // with the scores. This takes fewer registers: with a document mask, the kernel spills 60 instead
  // of 1284 bytes (head_dim 64, sm_90).
  static constexpr bool finds_pairs = Config::block_mask && Config::Mods::masks_pairs;
  // `SoftmaxBackward` of the scores that a lane holds.
  using Softmax = SoftmaxBackward<Config, columns / 4, 2 * row_tiles, GradientParams, PairsOnDemand,
                                  Config::block_mask, finds_pairs>;
  using VisiblePairs = typename Softmax::VisiblePairs;
  // Whether exponentials are computed between the products of dP, and not after them.
  static constexpr bool overlaps_exponentials =
      is_alone && !Config::modified && !Config::splits_queries && !has_components && !paired &&
      wants_ds;
  // A score of -inf masks its pair, too.
  using VisibleKeys = VisibleKeysOf<Softmax, row_tiles, columns,
                                    finds_pairs && !Config::Mods::changes_scores>;

  float dk_sums[row_tiles][2 * Columns::steps][4];
  float dv_sums[row_tiles][2 * ColumnsV::steps][4];
  VisibleKeys visible_keys;
  int pending_release = -1;  // tile slot of the semaphore still to be released, or -1

  using Base::Base;

  __device__ void run() {
    clear(dk_sums);
    clear(dv_sums);
    visible_keys.clear();
    if (has_steps()) process_tiles();
    if constexpr (Config::splits_queries) {
      if (!merge_chunks()) return;
    }
    finish();
  }

 private:
  __device__ void process_tiles() {
    load_keys();
    Step step = first_step();
    load(0, step.head, step.tile);
    int parity = 0;  // of the step's index
    if (overlaps_semaphore && threadIdx.x == 0) ptx::cta_mbarrier_init(semaphore_held(), 1);
    if constexpr (Config::inspects && !has_components) clean_keys();
    while (true) {
      const int stage = stages > 1 ? parity : 0;
      ptx::cp_async_wait_group<0>();
      // Wait until all warps are done with the previous tile: the next load overwrites its stage.
      __syncthreads();
      if constexpr (Config::inspects && !has_components) clean_queries(stage);
      if (stages > 1 && !is_last(step)) {
        const Step next = next_step(step);
        if constexpr (!staggers_loads) {
          load(1 - stage, next.head, next.tile);
        } else if (loads_early()) {
          load_early(1 - stage, next.head, next.tile);
        }
      }
      process_tile(stage, parity, step, [&] {
        if constexpr (staggers_loads) {
          if (loads_early() || is_last(step)) return;
          const Step next = next_step(step);
          load_late(1 - stage, next.head, next.tile);
        }
      });
      if (is_last(step)) break;
      step = next_step(step);
      parity = 1 - parity;
      if (stages == 1) {
        __syncthreads();
        load(0, step.head, step.tile);
      }
    }
    __syncthreads();
    release_semaphore();
  }

  // Adds dk and dv of the earlier chunks of queries. Returns whether this is the last chunk.
  __device__ bool merge_chunks() {
    const QueryChunkSums<Config, 1, threads> chunks = {p, coord, sequence};
    constexpr int of_keys = row_tiles * 2 * Columns::steps;
    constexpr int of_values = row_tiles * 2 * ColumnsV::steps;
    return chunks.template merge<of_keys + of_values>(
        0, [] { __syncthreads(); },
        [&](auto function) {
#pragma unroll
          for (int i = 0; i < of_keys; ++i) {
            function(dk_sums[i / (2 * Columns::steps)][i % (2 * Columns::steps)], i);
          }
#pragma unroll
          for (int i = 0; i < of_values; ++i) {
            function(dv_sums[i / (2 * ColumnsV::steps)][i % (2 * ColumnsV::steps)], of_keys + i);
          }
        });
  }

  // Releases the semaphore of the previous tile, after a barrier of all threads that added to it.
  __device__ void release_semaphore() {
    if constexpr (wants_q) {
      if (threadIdx.x != 0) return;
      semaphore_release(pending_release < 0 ? nullptr
                                            : DqSums<Config>(p).semaphores + pending_release);
    }
  }

  // Processes a query tile. `after_product()` is called after the warp's first product.
  template <class AfterProduct>
  __device__ void process_tile(int stage, int parity, const Step& step,
                               AfterProduct after_product) {
    const int head = step.head, tile = step.tile;
    const bool is_masked = Base::is_masked(step);
    int current = 0;  // value of the semaphore, in thread 0
    if constexpr (wants_q) {
      if (threadIdx.x == 0) {
        const DqSums<Config> sums(p);
        current = semaphore_peek(sums.semaphore(p, sequence, coord.batch, head, tile));
      }
    }
    compute_pairs<true>(stage, head, tile, query_warp() * columns, is_masked, after_product);
#pragma unroll
    for (int i = 1; i < passes; ++i) {
      compute_pairs<false>(stage, head, tile, (i * query_warps + query_warp()) * columns,
                           is_masked, [] {});
    }
    if constexpr (wants_q) {
      const DqSums<Config> sums(p);
      const int slot = sums.tile_slot(p, sequence, coord.batch, head, tile);
      const int index = order_index(step);
      if (!overlaps_semaphore && threadIdx.x == 0) {
        semaphore_wait(sums.semaphores + slot, index, current);
      }
      __syncthreads();
      if constexpr (overlaps_semaphore) {
        release_semaphore();
        if (threadIdx.x == 0) {
          semaphore_wait(sums.semaphores + slot, index, current);
          ptx::cta_mbarrier_arrive(semaphore_held());
        }
      }
      add_other_warps(stage);
      add_dq(stage, parity, head, tile, index);
      pending_release = slot;
    } else if constexpr (query_warps > 1) {
      __syncthreads();
      add_other_warps(stage);
    }
  }

  // Computes P^T and dS^T of the warp's keys and of `columns` queries of the tile from `first` on,
  // and adds their contributions to the warp's columns of dk and dv. With `shares_operands`, writes
  // P^T and dS^T to shared memory instead. `after_product()` is called after the first product.
  template <bool First, class AfterProduct>
  __device__ void compute_pairs(int stage, int head, int tile, int first, bool is_masked,
                                AfterProduct after_product) {
    if constexpr (overlaps_exponentials) {
      compute_overlapped_pairs<First>(stage, head, tile, first, is_masked, after_product);
    } else {
      compute_consecutive_pairs<First>(stage, head, tile, first, is_masked, after_product);
    }
  }

  // Implements `compute_pairs()` without `overlaps_exponentials`.
  template <bool First, class AfterProduct>
  __device__ void compute_consecutive_pairs(int stage, int head, int tile, int first,
                                            bool is_masked, AfterProduct after_product) {
    const unsigned query_rows = queries_address(stage) + first * Layout::row_bytes;
    const unsigned dout_rows = dout_address(stage) + first * LayoutV::row_bytes;
    const VisiblePairs visible_pairs = find_visible_pairs(head, tile, first, is_masked);
    Scores scores;     // S^T, then P^T
    Scores gradients;  // dP^T, then dS^T
    if constexpr (paired) {
      multiply_paired(scores, gradients, stage, first, after_product);
    } else {
      clear(scores);
      clear(gradients);
      Base::template multiply_keys_queries<columns>(scores, query_rows);
      after_product();
      if constexpr (wants_ds) Base::template multiply_values_douts<columns>(gradients, dout_rows);
    }
    if (First && !overlaps_semaphore) release_semaphore();
    const Kept kept = kept_pairs(head, tile, first);
    kept.drop(gradients);
    if (is_masked) {
      softmax_backward<true>(scores, gradients, stage, head, tile, first, visible_pairs, kept);
    } else {
      softmax_backward<false>(scores, gradients, stage, head, tile, first, visible_pairs, kept);
    }
    kept.drop(scores);
    if constexpr (has_components && wants_v) factors(stage).apply_to_p(scores, first);
    const float ds_second_unit =
        Base::template choose_unit<refines_ds>(gradients, ds_units_begin, exchanges_ds, first);
    const float p_second_unit =
        Base::template choose_unit<refines_p>(scores, p_units_begin, exchanges_p, first);
    if constexpr (shares_operands) {
      Base::template write_half_operand<exchanges_ds>(gradients, ds_address(), first);
      Base::template write_half_operand<exchanges_p>(scores, p_address(), first);
    } else {
      Left p_operand, ds_operand;
      Base::template make_operand<exchanges_ds>(ds_operand, gradients, ds_address(), first);
      Base::template make_operand<exchanges_p>(p_operand, scores, p_address(), first);
      if constexpr (wants_k) {
        if constexpr (has_components) apply_to_left(ds_operand, stage, first);
        Base::template add_product<Columns, Layout>(dk_sums, ds_operand, query_rows,
                                                    units(stage).dk_unit * ds_second_unit);
      }
      if constexpr (wants_v) {
        Base::template add_product<ColumnsV, LayoutV>(dv_sums, p_operand, dout_rows,
                                                      units(stage).dv_unit * p_second_unit);
      }
    }
  }

  // Which pairs of the warp keep their weight; all of them without dropout.
  struct Kept {
    // Tiles of 8 columns are not used with dropout.
    KeptPairs<true, round_up(columns, 16)> of[row_tiles];

    // Returns whether the pair of `element()` is kept.
    __device__ bool operator()(int r, int n) const {
      return !Config::dropout || of[n / 2].keeps(r / 2 * 4 + 2 * (n % 2) + r % 2);
    }

    __device__ void drop(Scores& values) const {
      if constexpr (Config::dropout) {
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
          for (int j = 0; j < columns / 8; ++j) of[i].drop(values[i][j], j);
        }
      }
    }
  };
  __device__ Kept kept_pairs(int head, int tile, int first) const {
    Kept kept = {};
    if constexpr (Config::dropout) {
      const DropoutNumbers numbers = dropout_numbers<Config>(p);
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        kept.of[i].draw(numbers, coord.batch, head, first_key() - lane / 4 + 16 * i,
                        tile * Br + first);
      }
    }
    return kept;
  }

  // Implements `compute_pairs()` if `overlaps_exponentials`. P is computed between the products of
  // dP, and dS after the products of dV are issued. P is computed for all pairs of a masked tile, too,
  // and set to 0 afterwards where a pair is masked.
  template <bool First, class AfterProduct>
  __device__ void compute_overlapped_pairs(int stage, int head, int tile, int first, bool is_masked,
                                           AfterProduct after_product) {
    constexpr int rows = columns / 4;  // of a lane
    constexpr int k_steps = Base::dim_v / 16;
    const unsigned query_rows = queries_address(stage) + first * Layout::row_bytes;
    const unsigned dout_rows = dout_address(stage) + first * LayoutV::row_bytes;
    Scores scores;     // S^T, then P^T
    Scores gradients;  // -delta, then dP^T - delta, then dS^T
    const auto score = [&](int r, int n) -> float& { return element(scores, r, n); };
    const auto gradient = [&](int r, int n) -> float& { return element(gradients, r, n); };
    clear(scores);
    Base::template multiply_keys_queries<columns>(scores, query_rows);
    after_product();
    Stats stats[rows];
    const Stats* stored = stats_of(stage, first);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      stats[r] = stored[r / 2 * 8 + r % 2];
#pragma unroll
      for (int n = 0; n < 2 * row_tiles; ++n) gradient(r, n) = -stats[r].delta;
    }
    const Softmax softmax = softmax_of(head, scale_log2);
    Base::template multiply_values_douts<columns>(gradients, dout_rows, [&](int step) {
      softmax.template compute_p<false>(
          rows_from(tile, first), first_key(), [&](int r) { return stats[r]; }, score, key_step(),
          step * rows / k_steps, (step + 1) * rows / k_steps);
    });
    if (First && !overlaps_semaphore) release_semaphore();
    if (is_masked) mask_pairs(softmax, scores, gradients, tile, first);
    Left p_operand, ds_operand;
    Base::template make_operand<exchanges_p>(p_operand, scores, p_address(), first);
    if constexpr (wants_v) {
      Base::template add_product<ColumnsV, LayoutV>(dv_sums, p_operand, dout_rows, 1);
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int n = 0; n < 2 * row_tiles; ++n) gradient(r, n) *= score(r, n);
    }
    Base::template make_operand<exchanges_ds>(ds_operand, gradients, ds_address(), first);
    if constexpr (wants_k) {
      Base::template add_product<Columns, Layout>(dk_sums, ds_operand, query_rows, 1);
    }
  }

  // Sets P, and dP - delta, of masked pairs to 0, and dP - delta of rows that attend to one key.
  __device__ void mask_pairs(const Softmax& softmax, Scores& scores, Scores& gradients, int tile,
                             int first) const {
    const auto score = [&](int r, int n) -> float& { return element(scores, r, n); };
    const auto gradient = [&](int r, int n) -> float& { return element(gradients, r, n); };
    softmax.mask_p(rows_from(tile, first), first_key(), score, key_step());
#pragma unroll
    for (int r = 0; r < columns / 4; ++r) {
#pragma unroll
      for (int n = 0; n < 2 * row_tiles; ++n) {
        if (score(r, n) == 0) gradient(r, n) = 0;
      }
    }
    softmax.zero_one_key_ds(rows_from(tile, first), score, gradient);
  }

  // Returns the element of a lane's `r`-th query and `n`-th key.
  __device__ static float& element(Scores& values, int r, int n) {
    return values[n / 2][r / 2][2 * (n % 2) + r % 2];
  }
  // Returns the statistics of the lane's first query; `first` is that of the warp.
  __device__ const Stats* stats_of(int stage, int first) const {
    return reinterpret_cast<const Stats*>(memory + (stats_address(stage) - shared)) +
           first_query(first);
  }

  // Return the `SoftmaxBackward` of a head, and the arguments of its functions.
  __device__ Softmax softmax_of(int head, float scale_log2, VisiblePairs visible_pairs = 0) const {
    return {p,
            mask,
            sequence,
            coord.batch,
            head,
            scale_log2,
            (has_components ? 1 / Units::p_unit : 1) * kept_weight<Config, float>(p),
            has_components ? Units::p_log2 : 0,
            {},
            visible_pairs};
  }
  // `first` is the index in the tile of the first query whose scores the warp computes.
  __device__ int first_query(int first) const { return first + lane % 4 * 2; }
  __device__ auto rows_from(int tile, int first) const {
    const int row = tile * Br + first_query(first);
    return [=](int r) { return row + r / 2 * 8 + r % 2; };
  }
  __device__ int first_key() const { return coord.begin + key_warp() * warp_keys + lane / 4; }
  __device__ static auto key_step() {
    return [](int n) { return n / 2 * 16 + n % 2 * 8; };
  }

  // Returns the visible pairs of a masked tile if `finds_pairs`, otherwise 0.
  __device__ VisiblePairs find_visible_pairs(int head, int tile, int first, bool is_masked) const {
    if constexpr (finds_pairs) {
      if (is_masked) {
        return softmax_of(head, scale_log2)
            .find_visible_pairs(rows_from(tile, first), first_key(), key_step());
      }
    }
    return 0;
  }

  template <bool Masked>
  __device__ void softmax_backward(Scores& scores, Scores& gradients, int stage, int head, int tile,
                                   int first, VisiblePairs visible_pairs, const Kept& kept) {
    const Stats* stats = stats_of(stage, first);
    const Units unit = units(stage);
    constexpr bool of_scaled = has_components && !Config::Mods::changes_scores;
    const Softmax softmax =
        softmax_of(head, of_scaled ? scale_log2 * unit.score : scale_log2, visible_pairs);
    if constexpr (has_components) {
      scale(scores, gradients, unit);
      mask_infinite_keys(scores);
    }
    softmax.template run<Masked>(
        rows_from(tile, first), first_key(),
        [&](int r) { return unit.scale(stats[r / 2 * 8 + r % 2]); },
        [&](int r, int n) -> float& { return element(scores, r, n); },
        [&](int r, int n) -> float& { return element(gradients, r, n); },
        key_step(), kept);
    if constexpr (Config::Mods::masks_pairs) {
      visible_keys.template record<Masked>(scores, visible_pairs);
    }
  }

  // Sets the scores of keys that hold an infinity, because their components were replaced by zeros.
  // The scaled score becomes -inf. If the true score is +inf or NaN, the lse of its row is not
  // finite, and so the gradients of the row are NaN in any case.
  __device__ void mask_infinite_keys(Scores& scores) const {
    const auto& keys =
        *reinterpret_cast<const KeyScales*>(memory + Base::Preswizzled::KvTile::scales_offset);
    if (!keys.has_infinite) return;
    const float infinity = SoftmaxMath<float>::infinity();
    const float masked_score =
        !Config::Mods::changes_scores && scale_log2 < 0 ? infinity : -infinity;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!keys.is_infinite(key_warp() * warp_keys + 16 * i + 8 * half + lane / 4)) continue;
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            scores[i][j][2 * half + c] = masked_score;
          }
        }
      }
    }
  }

  // Adds the contributions of P^T and dS^T of the other warps with the same keys to dk and dv. With
  // `shares_operands`, adds the contributions of all warps with the same keys.
  __device__ void add_other_warps(int stage) {
    if constexpr (shares_operands) {
#pragma unroll
      for (int first = 0; first < Br; first += operand_columns) add_shared_products(stage, first);
    } else {
#pragma unroll
      for (int other = 1; other < query_warps; ++other) {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
          add_shared_products(
              stage, (pass * query_warps + (query_warp() + other) % query_warps) * columns);
        }
      }
    }
  }

  // Adds the contributions of `operand_columns` queries from `first` on, whose P^T and dS^T are in
  // shared memory.
  __device__ void add_shared_products(int stage, int first) {
    if constexpr (!has_components) {
      if constexpr (wants_v) {
        Base::template add_shared_product<ColumnsV>(
            dv_sums, p_address(), first, dout_address(stage) + first * LayoutV::row_bytes);
      }
      if constexpr (wants_k) {
        Base::template add_shared_product<Columns>(
            dk_sums, ds_address(), first, queries_address(stage) + first * Layout::row_bytes);
      }
      return;
    }
    Left left;
    if constexpr (wants_v) {
      read(left, p_address(), first);
      float factor = units(stage).dv_unit;
      if constexpr (refines_p) factor *= second_unit(p_units_begin, key_warp(), first);
      Base::template add_product<ColumnsV, LayoutV>(
          dv_sums, left, dout_address(stage) + first * LayoutV::row_bytes, factor);
    }
    if constexpr (wants_k) {
      read(left, ds_address(), first);
      if constexpr (has_components) apply_to_left(left, stage, first);
      float factor = units(stage).dk_unit;
      if constexpr (refines_ds) factor *= second_unit(ds_units_begin, key_warp(), first);
      Base::template add_product<Columns, Layout>(
          dk_sums, left, queries_address(stage) + first * Layout::row_bytes, factor);
    }
  }

  __device__ void add_dq(int stage, int parity, int head, int tile, int order_index) {
    // If this loop were unrolled, ptxas would keep the addresses of all parts in registers and
    // spill.
#pragma unroll 1
    for (int first = 0; first < DqColumns::steps; first += dq_steps) {
      add_dq_columns(stage, parity, head, tile, order_index, first);
    }
  }

  // Computes `dq_steps` times 16 of the warp's columns of dq, starting at column 16 * `first`, and
  // adds them to memory.
  __device__ void add_dq_columns(int stage, int parity, int head, int tile, int order_index,
                                 int first) {
    static_assert(DqColumns::steps % dq_steps == 0, "equally many columns at once");
    using Accumulator = DqAccumulator<Fragments, 2 * dq_steps>;
    const auto wait = [&] {
      if constexpr (overlaps_semaphore) ptx::cta_mbarrier_wait(semaphore_held(), parity);
    };
    const Accumulator accumulator(
        DqSums<Config>(p).template sums<Fragments::floats>(p, sequence, coord.batch, head, tile),
        order_index, 2 * first);
    float sums[dq_row_tiles][2 * dq_steps][4];
    const unsigned right = DqColumns::lane_address(keys_address(), warp % dq_column_warps);
    if constexpr (has_components) {
      constexpr int depth = refines_ds ? row_tiles : Bc % 32 == 0 ? 2 : 1;  // 16-key steps per sum
      clear(sums);
#pragma unroll 1
      for (int key = 0; key < Bc; key += 16 * depth) {
        LeftStep<dq_row_tiles> left[depth][2];
#pragma unroll
        for (int step = 0; step < depth; ++step) read_ds(left[step], key + 16 * step);
        DqColumns::add_product(
            sums, left, right + key * Layout::row_bytes,
            [&](int i) {
              if constexpr (!refines_ds) return 1.0f;
              return second_unit(ds_units_begin, key / warp_keys, 16 * (first_dq_tile() + i));
            },
            first);
      }
      factors(stage).apply_to_rows(sums, first_dq_tile());
      wait();
      accumulator.add(sums, units(stage).dq_unit);
    } else {
      if constexpr (!Accumulator::memory_adds) wait();
      accumulator.begin(sums);
      DqColumns::template multiply<Bc / 16>(
          sums,
          [&](LeftStep<dq_row_tiles>& left, int step) {
            read_ds(reinterpret_cast<LeftStep<dq_row_tiles>(&)[1]>(left), 16 * step);
          },
          right, first);
      if constexpr (Accumulator::memory_adds) wait();
      accumulator.end(sums);
    }
  }

  // Returns whether any query attends to a key. If none does, its dk and dv may be 0 times NaN.
  __device__ bool is_visible_key(int i, int half) {
    const int row = key_warp() * warp_keys + 16 * i + 8 * half + lane / 4;
    const int key = coord.begin + row;
    bool is_visible = mask.row_begin(key, sequence.seqlen_q) < mask.row_end(key, sequence.seqlen_q);
    if constexpr (Config::Mods::masks_pairs) {
      is_visible = is_visible && reinterpret_cast<const int*>(memory + stages_offset)[row] != 0;
    }
    return is_visible;
  }

  // If modifications mask pairs, combines `visible_keys` of the warps with the same keys: sets a
  // flag in shared memory for each key that has a visible pair.
  __device__ void combine_visible_keys() {
    int* flags = reinterpret_cast<int*>(memory + stages_offset);
    static_assert(stages * stage_bytes >= Bc * int(sizeof(int)), "the stages hold a flag per key");
    for (int i = threadIdx.x; i < Bc; i += threads) flags[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (visible_keys.include(i, half)) {
          flags[key_warp() * warp_keys + 16 * i + 8 * half + lane / 4] = 1;
        }
      }
    }
    __syncthreads();
  }

  __device__ void finish() {
    const float scale = signed_scale<Config, float>(p);
    if constexpr (Config::Mods::masks_pairs) combine_visible_keys();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_visible = is_visible_key(i, half);
        scale_row<2 * Columns::steps>(dk_sums[i][0] + 2 * half, scale);
        if (!is_visible) {
          fill_row_from<2 * Columns::steps>(dk_sums[i][0] + 2 * half, 0, 0);
          fill_row_from<2 * ColumnsV::steps>(dv_sums[i][0] + 2 * half, 0, 0);
        }
      }
    }
    if constexpr (wants_k) write<Config::head_dim, Layout, Columns>(p.dk, dk_sums, keys_address());
    if constexpr (wants_v) {
      write<Config::head_dim_v, LayoutV, ColumnsV>(p.dv, dv_sums, values_address());
    }
  }

  // Writes dk or dv. A gradient of the inputs' type goes through shared memory at `target`, which
  // no warp reads any more, so that global stores are whole 16-byte chunks.
  template <int Dim, class TileLayout, class Slice, class Accumulators>
  __device__ void write(const Tensor& tensor, const Accumulators& values, unsigned target) {
    Gradient* output = tensor.head<Gradient>(sequence.k_batch, coord.head) +
                       (int64(sequence.k_first) + coord.begin) * tensor.row_stride;
    const int left = sequence.seqlen_k - coord.begin;
    constexpr int column_tiles = 2 * Slice::steps;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = key_warp() * warp_keys + 16 * i + 8 * half + lane / 4;
        if constexpr (sizeof(Gradient) != sizeof(Component)) {
          if (row >= left) continue;
          write_row<column_tiles, Dim>(
              output + row * tensor.row_stride, values[i][0] + 2 * half,
              [&](int j, int c) { return Slice::column(j, query_warp()) + c; });
        } else {
#pragma unroll
          for (int j = 0; j < column_tiles; ++j) {
            const int chunk = Slice::column(j, query_warp()) / 8;
            ptx::st_shared(target + TileLayout::offset(row, chunk) + lane % 4 * 4,
                           pack<Component>(values[i][j][2 * half], values[i][j][2 * half + 1]));
          }
        }
      }
    }
    if constexpr (sizeof(Gradient) == sizeof(Component)) {
      __syncthreads();
      constexpr int elements = TileLayout::chunk_elements;
#pragma unroll 4
      for (int i = threadIdx.x; i < Bc * TileLayout::chunks; i += threads) {
        const int row = i / TileLayout::chunks;
        const int chunk = i % TileLayout::chunks;
        if (row >= left) break;
        unsigned bits[4];
        ptx::ld_shared_v4(bits, target + TileLayout::offset(row, chunk));
        store_chunk<Gradient, Config::out_alignment>(
            output + row * tensor.row_stride + chunk * elements,
            reinterpret_cast<const Vector<Gradient, elements>&>(bits), Dim - chunk * elements);
      }
    }
  }
};

template <class Config>
__device__ void mma_gradients(const GradientParams& p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  // With a causal mask, the first KV tiles have the most query tiles, so their CTAs start first.
  // With lists of query tiles, the last KV tiles start first, as the dq order requires
  // (backward/listed_tiles.cuh).
  const GradientTileCoord coord =
      gradient_tile_coord<Config, Config::Bc, true, Config::block_mask>(p, blockIdx.x);
  const Sequence sequence = sequence_of<Config>(p, coord.batch);
  if (coord.begin >= sequence.seqlen_k) return;
  MmaGradients<Config>(p, coord, sequence, shared_memory).run();
}

template <class Config>
__device__ void mma_preswizzle_tiles(const GradientParams& p) {
  preswizzle_tiles<Config>(p);
}

template <class Config>
__device__ void mma_query_gradients(const GradientParams& p) {
  using Tile = DqTile<Config, typename MmaGradients<Config>::Fragments>;
  __shared__ typename Tile::Shared shared;
  Tile::write(p, shared);
}

#endif  // __CUDA_ARCH__ >= 800
