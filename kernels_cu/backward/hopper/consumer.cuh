// A consumer of the Hopper kernel of gradients: a warpgroup that owns 64 keys, whose dk and dv it
// sums up in registers. Scores are transposed, so that p' and ds', packed as they lie, are left
// operands of its products; ds alone goes through shared memory, for dq, of which each consumer
// sums up a part over the keys of all.
//
// Products are asynchronous, and run in the order in which they are started. But only few are
// queued: who starts more waits until those before are done. So exponentials are taken between the
// starts of a product's parts, and dq is written before the next scores are started:
//
//   tensor cores   dp'(i)           dv(i)       |dq(i)     dk(i)      s'(i + 1)
//   consumer       p = exp(s'(i))   write ds(i) |          write dq(i)
//                                               ^ all consumers have written ds
//
// A step is a part of `columns` queries of a tile; dq waits for the last part. What products read of
// shared memory takes nearly all of its bandwidth: operands that do not change are kept in registers
// where there are some left, and row terms are taken while nothing waits for them: dp' is summed up
// from -delta on.
#pragma once

#include "backward/hopper/cta.cuh"
#include "backward/weigh.cuh"
#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_rows.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperGradientConsumer {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using Cta = HopperGradientCta<Config>;
  using Step = typename Cta::Step;
  using KeyTile = typename Cta::KeyTile;
  using ValueTile = typename Cta::ValueTile;
  using QueryTile = typename Cta::QueryTile;
  using DoutTile = typename Cta::DoutTile;
  using PairTile = typename Cta::PairTile;
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
  static constexpr int k_steps = round_up(Config::head_dim, 16) / 16;
  static constexpr int k_steps_v = round_up(Config::head_dim_v, 16) / 16;
  static_assert(columns % 16 == 0 && parts * columns == Br, "whole products");

  // Whether k and v are kept in registers as well.
  static constexpr bool keeps_keys = dim <= 64 && dim_v <= 64;

  // Both p and ds come from scores, gradients of p and what modifications need in one go where
  // those have slopes; else p is taken while the gradients are still on their way.
  static constexpr bool at_once = changes_slope<Mods>();

  const Cta& cta;
  const int consumer;
  const float scale_log2;
  RingPosition<Config::q_stages> q_ring = {};
  RingPosition<Config::dout_stages> dout_ring = {};
  RingPosition<Cta::pair_stages> pair_ring = {};
  int sums_parity = 1;

  float sums_k[dim / 2];
  float sums_v[dim_v / 2];
  using Scores = float[columns / 2];
  using LeftOperand = unsigned[columns / 4];
  Scores scores;                  // then p
  Scores gradients;               // of p, then of scores; from -delta of the rows on
  float lse_log2[columns / 4];    // of the rows of scores that come next
  unsigned keys[keeps_keys ? 4 * k_steps : 1];
  unsigned values[keeps_keys ? 4 * k_steps_v : 1];
  float seen[2] = {};  // sums of p, where a modification may hide all of a key

  __device__ HopperGradientConsumer(const Cta& cta, int consumer)
      : cta(cta),
        consumer(consumer),
        scale_log2(signed_scale<Config, double>(cta.p) * SoftmaxMath<double>::log2_e) {}

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) sums_k[i] = 0;
#pragma unroll
    for (int i = 0; i < dim_v / 2; ++i) sums_v[i] = 0;
    if (cta.has_steps()) sweep();
    finish();
  }

 private:
  // The first of the lane's keys among the block's; the other is eight behind.
  __device__ int lane_key() const {
    return 64 * consumer + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ void sweep() {
    Step step = cta.first_step();
    ptx::mbarrier_wait(cta.keys_full(), 0);
    ptx::mbarrier_wait(cta.q_full(q_ring.slot), q_ring.parity);
    if (wants_ds) ptx::mbarrier_wait(cta.values_full(), 0);
    if constexpr (keeps_keys) {
      keep<KeyTile>(keys, cta.keys_at());
      keep<ValueTile>(values, cta.values_at());
    }
    Scores first;
    start_scores(first, 0);
    take_terms(0);
    await_scores(first);
    while (!cta.is_last(step)) {
      visit<false>(step);
      step = cta.step_behind(step);
    }
    visit<true>(step);
  }

  // Of a tile whose first scores are there. Ends with those of the next tile, unless it is the last.
  template <bool Last>
  __device__ void visit(const Step& step) {
    const bool is_masked = cta.is_masked(step);
    ptx::mbarrier_wait(cta.dout_full(dout_ring.slot), dout_ring.parity);
    visit_parts<0, Last>(step, is_masked);
  }

  template <int Part, bool Last>
  __device__ void visit_parts(const Step& step, bool is_masked) {
    visit_part<Part, Last>(step, is_masked);
    if constexpr (Part + 1 < parts) visit_parts<Part + 1, Last>(step, is_masked);
  }

  template <int Part, bool Last>
  __device__ void visit_part(const Step& step, bool is_masked) {
    constexpr bool ends_tile = Part == parts - 1;
    constexpr bool has_next = !ends_tile || !Last;
    constexpr bool sums_queries = wants_q && ends_tile;
    // What a product makes is declared where it is started: so nothing that was there before takes
    // registers until then.
    LeftOperand left_p, left_ds;
    weigh<Part>(step, is_masked);
    narrow(left_p, scores);
    if constexpr (wants_v) start_value_sums(left_p, Part);
    if constexpr (wants_ds) {
      if constexpr (!at_once) {
        await<wants_v>(gradients);
        finish_gradients(is_masked);
      }
      narrow(left_ds, gradients);
    }
    if constexpr (wants_q) write_pairs(left_ds, Part);

    float query_sums[Fragments::columns / 2];
    if constexpr (sums_queries) {
      ptx::fence_proxy_async();
      Cta::await_consumers();
      start_query_sums(query_sums);
    }
    if constexpr (wants_k) start_key_sums(left_ds, Part);
    await<int(sums_queries) + int(wants_k)>(sums_v);
    const int slot = q_ring.slot;
    if constexpr (ends_tile) {
      Cta::tell(cta.dout_empty(dout_ring.slot));
      dout_ring.advance();
      q_ring.advance();
    }
    if constexpr (sums_queries) {
      await<wants_k>(query_sums);
      write_query_sums(query_sums);
    }
    Scores next;
    if constexpr (has_next) {
      if constexpr (ends_tile) ptx::mbarrier_wait(cta.q_full(q_ring.slot), q_ring.parity);
      start_scores(next, ends_tile ? 0 : Part + 1);
      take_terms(ends_tile ? 0 : Part + 1);
    }
    await<has_next>(sums_k);
    if constexpr (ends_tile) Cta::tell(cta.q_empty(slot));
    if constexpr (has_next) await_scores(next);
  }

  // ---- Products.

  // s' = k q', of a part of the queries in the slot that is next.
  __device__ void start_scores(Scores& next, int part) const {
    ptx::pin(next);
    ptx::wgmma_fence();
    const unsigned rows = rows_of<QueryTile>(cta.queries_at(q_ring.slot), part);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      multiply<KeyTile, QueryTile>(next, keys, cta.keys_at(), rows, step, step != 0);
    }
    ptx::wgmma_commit_group();
  }
  __device__ void await_scores(Scores& next) {
    await<0>(next);
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) scores[i] = next[i];
  }

  // dp' = v dout' - delta, with `between` done after each part of it is started.
  template <class Between>
  __device__ void start_gradients(int part, Between between) {
    // As new values: accumulators that come from another copy of the loop's body the compiler takes
    // for too many to have products under way.
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      gradients[i] = __int_as_float(ptx::opaque(__float_as_int(gradients[i])));
    }
    ptx::pin(gradients);
    ptx::wgmma_fence();
    const unsigned rows = rows_of<DoutTile>(cta.douts_at(dout_ring.slot), part);
#pragma unroll
    for (int step = 0; step < k_steps_v; ++step) {
      multiply<ValueTile, DoutTile>(gradients, values, cta.values_at(), rows, step, true);
      between(step);
    }
    ptx::wgmma_commit_group();
  }

  // A step of a product of the consumer's keys, in registers or at `left`, and the rows of another
  // tile.
  template <class LeftTile, class Tile, int Count>
  __device__ void multiply(Scores& sums, const unsigned (&kept)[Count], unsigned left,
                           unsigned rows, int step, bool accumulate) const {
    const unsigned long long right =
        Tile::k_along_columns() + (rows + Tile::column_step(step)) / 16;
    if constexpr (keeps_keys) {
      Wgmma<Element, columns>::multiply_k_contiguous(sums, kept + 4 * step, right, accumulate);
    } else {
      Wgmma<Element, columns>::multiply(
          sums,
          LeftTile::k_along_columns() +
              (own_rows<LeftTile>(left) + LeftTile::column_step(step)) / 16,
          right, accumulate);
    }
  }

  template <class Tile, int Count>
  __device__ void keep(unsigned (&kept)[Count], unsigned tile) const {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const unsigned line = own_rows<Tile>(tile) + row * Tile::line_bytes;
#pragma unroll
    for (int step = 0; step < Count / 4; ++step) {
      unsigned fragment[4];
      ptx::ldmatrix_x4(fragment, line + Tile::chunk_offset(row, 2 * step, threadIdx.x / 16 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[4 * step + i] = fragment[i];
    }
  }

  // Until a product's sums are there, of which so many were started later.
  template <int Pending, int Count>
  __device__ static void await(float (&sums)[Count]) {
    ptx::wgmma_wait_group<Pending>();
    ptx::pin(sums);
  }

  // dv += p' dout.
  __device__ void start_value_sums(const LeftOperand& left_p, int part) {
    start_sums<DoutTile, dim_v>(sums_v, left_p,
                                rows_of<DoutTile>(cta.douts_at(dout_ring.slot), part));
  }
  // dk += ds' q.
  __device__ void start_key_sums(const LeftOperand& left_ds, int part) {
    start_sums<QueryTile, dim>(sums_k, left_ds,
                               rows_of<QueryTile>(cta.queries_at(q_ring.slot), part));
  }
  template <class Tile, int Columns>
  __device__ static void start_sums(float (&sums)[Columns / 2], const LeftOperand& left,
                                    unsigned rows) {
    const unsigned long long right = Tile::k_along_rows() + rows / 16;
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < columns / 16; ++step) {
      Wgmma<Element, Columns>::multiply_n_contiguous(sums, left + 4 * step,
                                                     right + Tile::row_step(step) / 16, 1);
    }
    ptx::wgmma_commit_group();
  }

  // dq = ds k, the consumer's part.
  __device__ void start_query_sums(float (&sums)[Fragments::columns / 2]) {
    const unsigned rows = cta.pairs_at(pair_ring.slot) +
                          (Fragments::by_rows ? 64 * consumer * PairTile::line_bytes : 0);
    const unsigned keys =
        cta.keys_at() +
        (Fragments::by_rows
             ? 0
             : consumer * Fragments::columns / KeyTile::line_columns * KeyTile::slab_bytes);
    const unsigned long long ds = PairTile::k_along_columns() + rows / 16;
    const unsigned long long k = KeyTile::k_along_rows() + keys / 16;
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Bc / 16; ++step) {
      WgmmaRows<Element, Fragments::columns>::multiply(
          sums, ds + PairTile::column_step(step) / 16, k + KeyTile::row_step(step) / 16, step != 0);
    }
    ptx::wgmma_commit_group();
    pair_ring.advance();
  }

  // Of a tile of keys, where the consumer's begin; of one of queries, where a part begins.
  template <class Tile>
  __device__ unsigned own_rows(unsigned tile) const {
    return tile + 64 * consumer * Tile::line_bytes;
  }
  template <class Tile>
  __device__ static unsigned rows_of(unsigned tile, int part) {
    return tile + part * columns * Tile::line_bytes;
  }

  // ---- Between products.

  template <bool Value>
  struct Const {
    static constexpr bool value = Value;
  };

  // Takes what the rows of a part bring to registers, where the next products will want it.
  __device__ void take_terms(int part) {
    const float* terms = cta.terms(q_ring.slot) + part * columns + threadIdx.x % 4 * 2;
    using Pair = Vector<float, 2>;
#pragma unroll
    for (int j = 0; j < columns / 8; ++j) {
      const Pair lse = *reinterpret_cast<const Pair*>(terms + 8 * j);
      const Pair minus_delta = *reinterpret_cast<const Pair*>(terms + Br + 8 * j);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        lse_log2[2 * j + c] = lse.at[c];
        gradients[4 * j + c] = gradients[4 * j + 2 + c] = minus_delta.at[c];
      }
    }
  }

  // The scores become p; where `at_once`, the gradients of p those of the scores. Else these are
  // only started.
  template <int Part>
  __device__ void weigh(const Step& step, bool is_masked) {
    const int column = Part * columns + threadIdx.x % 4 * 2;  // the lane's first in the tile
    constexpr int rows = columns / 4;
    const Weigh<Config, rows, 2> weigh = {cta.p,          cta.mask,  cta.at,
                                          cta.work.batch, step.head, scale_log2};
    const auto row_of = [&](int r) { return step.tile * Br + column + r / 2 * 8 + r % 2; };
    // There is no delta to subtract any more.
    const auto terms_of = [&](int r) { return RowTerms<float>{lse_log2[r], 0}; };
    const auto score = [&](int r, int n) -> float& { return scores[r / 2 * 4 + 2 * n + r % 2]; };
    const auto gradient = [&](int r, int n) -> float& {
      return gradients[r / 2 * 4 + 2 * n + r % 2];
    };
    const auto key_step = [](int n) { return 8 * n; };
    const int first_key = cta.work.begin + lane_key();
    const auto by_mask = [&](auto&& run) { is_masked ? run(Const<true>()) : run(Const<false>()); };
    if constexpr (at_once) {
      start_gradients(Part, [](int) {});
      await<0>(gradients);
      by_mask([&](auto masked) {
        weigh.template run<masked.value>(row_of, first_key, terms_of, score, gradient, key_step);
      });
    } else if constexpr (wants_ds && !Config::modified) {
      // One path of products: hidden pairs are left out behind it.
      start_gradients(Part, [&](int i) {
        weigh.template begin<false>(row_of, first_key, terms_of, score, key_step,
                                    i * rows / k_steps_v, (i + 1) * rows / k_steps_v);
      });
      if (is_masked) weigh.hide(row_of, first_key, score, key_step);
    } else {
      if constexpr (wants_ds) start_gradients(Part, [](int) {});
      by_mask([&](auto masked) {
        weigh.template begin<masked.value>(row_of, first_key, terms_of, score, key_step, 0, rows);
      });
    }
    if constexpr (Mods::hides_pairs) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) seen[i / 2 % 2] += scores[i];
    }
  }

  // ds = p (dp - delta); a hidden pair has a p of 0, and no gradient.
  __device__ void finish_gradients(bool is_masked) {
    if (is_masked || Mods::hides_pairs) {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) {
        const float of_score = scores[i] * gradients[i];
        gradients[i] = scores[i] == 0 ? 0 : of_score;
      }
    } else {
#pragma unroll
      for (int i = 0; i < columns / 2; ++i) gradients[i] *= scores[i];
    }
  }

  // An accumulator is, pair by pair, a left operand.
  __device__ static void narrow(LeftOperand& left, const Scores& of) {
#pragma unroll
    for (int i = 0; i < columns / 4; ++i) left[i] = pack<Element>(of[2 * i], of[2 * i + 1]);
  }

  // ds of the consumer's keys, a slab of lines of queries. Eight of a column's lines lie in eight
  // different bank groups.
  __device__ void write_pairs(const LeftOperand& left_ds, int part) const {
    const int lane = threadIdx.x % 32;
    const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const unsigned at = rows_of<PairTile>(cta.pairs_at(pair_ring.slot), part) +
                        consumer * PairTile::slab_bytes +
                        (lane / 16 * 8 + lane % 8) * PairTile::line_bytes +
                        (chunk ^ lane % 8) * 16;
#pragma unroll
    for (int step = 0; step < columns / 16; ++step) {
      const unsigned of[4] = {left_ds[4 * step], left_ds[4 * step + 1], left_ds[4 * step + 2],
                              left_ds[4 * step + 3]};
      ptx::stmatrix_x4_trans(at + PairTile::row_step(step), of);
    }
  }

  // Hands the sums of dq to the adder, as they lie.
  __device__ void write_query_sums(const float (&sums)[Fragments::columns / 2]) {
    ptx::mbarrier_wait(cta.sums_empty(consumer), sums_parity);
    sums_parity ^= 1;
    const unsigned at =
        cta.sums_at(consumer) +
        Fragments::place(threadIdx.x / 32 % 4, 0, 0, threadIdx.x % 32) * int(sizeof(float));
#pragma unroll
    for (int j = 0; j < Fragments::column_tiles; ++j) {
      unsigned of[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) of[c] = __float_as_uint(sums[4 * j + c]);
      ptx::st_shared_v4(at + Fragments::place(0, 0, j, 0) * int(sizeof(float)), of);
    }
    ptx::fence_proxy_async();
    Cta::tell(cta.sums_full(consumer));
  }

  // ---- dk and dv.

  // Whether a key is seen at all: of one that is not, the sums hold 0 times the queries.
  __device__ bool is_seen(int half) const {
    const int key = cta.work.begin + lane_key() + 8 * half;
    const bool found =
        cta.mask.first_row(key, cta.at.seqlen_q) < cta.mask.last_row(key, cta.at.seqlen_q);
    if constexpr (!Mods::hides_pairs) return found;
    const float sum = sum_of_lanes(seen[half]);
    return found && sum != 0;
  }

  __device__ void finish() {
    const float scale = signed_scale<Config, float>(cta.p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool found = is_seen(half);
      scale_row<dim / 8>(sums_k + 2 * half, scale);
      if (!found) {
        fill_row_from<dim / 8>(sums_k + 2 * half, 0, 0);
        fill_row_from<dim_v / 8>(sums_v + 2 * half, 0, 0);
      }
    }
    // The other consumer may still multiply with this one's keys, not with its values.
    if constexpr (wants_v) write<Config::head_dim_v, ValueTile>(cta.p.dv, sums_v, cta.values_at());
    if constexpr (wants_k) {
      if constexpr (wants_q && sizeof(Gradient) == sizeof(Element)) Cta::await_consumers();
      write<Config::head_dim, KeyTile>(cta.p.dk, sums_k, cta.keys_at());
    }
  }

  // A gradient of its inputs' type goes through the consumer's part of a tile in shared memory that
  // nobody reads any more, so that global memory sees whole chunks.
  template <int Dim, class Tile, int Count>
  __device__ void write(const Tensor& tensor, const float (&of)[Count], unsigned tile) {
    constexpr int column_tiles = Count / 4;
    const int first = cta.work.begin + 64 * consumer;
    const int left = cta.at.seqlen_k - first;
    Gradient* output = tensor.head<Gradient>(cta.at.k_batch, cta.work.head) +
                       (int64(cta.at.k_first) + first) * tensor.row_stride;
    const int lane_row = lane_key() - 64 * consumer;
    if constexpr (sizeof(Gradient) != sizeof(Element)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
        if (row >= left) continue;
        write_row<column_tiles, Dim>(
            output + row * tensor.row_stride, of + 2 * half,
            [](int j, int c) { return 8 * j + threadIdx.x % 4 * 2 + c; });
      }
    } else {
      const unsigned own = own_rows<Tile>(tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
        const unsigned line = own + row * Tile::line_bytes + threadIdx.x % 4 * 4;
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
          ptx::st_shared(line + Tile::chunk_offset(row, j / 2 * 2, j % 2),
                         pack<Element>(of[4 * j + 2 * half], of[4 * j + 2 * half + 1]));
        }
      }
      Cta::await_own(consumer);
      constexpr int chunks = column_tiles;
#pragma unroll 4
      for (int place = threadIdx.x % 128; place < 64 * chunks; place += 128) {
        const int row = place / chunks, chunk = place % chunks;
        if (row >= left) break;
        unsigned bits[4];
        ptx::ld_shared_v4(bits, own + row * Tile::line_bytes +
                                    Tile::chunk_offset(row, chunk / 2 * 2, chunk % 2));
        store_chunk<Gradient, Config::out_alignment>(
            output + row * tensor.row_stride + chunk * 8,
            reinterpret_cast<const Vector<Gradient, 8>&>(bits), Dim - chunk * 8);
      }
    }
  }
};

#endif  // __CUDA_ARCH__ == 900
