// Fused attention forward on tensor cores, sm_80 and newer: float16, bfloat16, and float32 as three
// TF32 products.
//
// FlashAttention-2 (Dao 2023): a CTA holds Br query rows and iterates over the KV tiles of Bc keys,
// from the last to the first. Each warp owns 16 or 32 of the rows, so that a row of S lies in four
// lanes, among which the softmax communicates. P never leaves the registers: the accumulator
// fragments of Q K^T serve as operand fragments of P V.
//
// For a wide head, the output of 16 rows does not fit in a warp's registers, so two warps process
// the same rows. Each computes S for half of the keys of a KV tile. They exchange S through the
// shared memory of that K tile, and each multiplies P by half of the columns of V.
#pragma once

#include "params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/warp_softmax.cuh"
#include "tile/access.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"
#include "tile/products_tf32x3.cuh"
#include "scheduler/row_selection.cuh"
#include "scheduler/one_key_rows.cuh"
#include "scheduler/sequence_view.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/split_kv.cuh"

#if __CUDA_ARCH__ >= 800

template <class Element>
struct ProductsOf {
  template <class Config, int row_tiles, int column_warps>
  using type = Products16Bit<Config, row_tiles, column_warps>;
};
template <>
struct ProductsOf<float> {
  template <class Config, int row_tiles, int column_warps>
  using type = ProductsTf32x3<Config, row_tiles>;
};

// Tile coordinates, kept only if modifications need them: an unused member would change the loops.
template <class Config, bool Modified = Config::modified>
struct MmaTileCoord {
  __device__ explicit MmaTileCoord(const TileCoord&) {}
};
template <class Config>
struct MmaTileCoord<Config, true> {
  const TileCoord coord;
  __device__ explicit MmaTileCoord(const TileCoord& coord) : coord(coord) {}
};

template <class Config>
struct MmaForward : MmaTileCoord<Config> {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int stages = Config::stages;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int column_warps = Br < 16 * Config::warps ? 16 * Config::warps / Br : 1;
  static constexpr int warp_rows = Br / (Config::warps / column_warps);
  static constexpr int row_tiles = warp_rows / 16;
  using Products = typename ProductsOf<Element>::template type<Config, row_tiles, column_warps>;
  using KeyLayout = typename Products::KeyLayout;
  using ValueLayout = typename Products::ValueLayout;
  using Softmax = WarpSoftmax<Element, row_tiles, Bc, Products::columns_v,
                              StatisticsOf<Config, float>>;
  using SoftmaxRow = typename Softmax::Row;
  struct Kept {
    KeptPairs<false, Bc> of[row_tiles];
  };

  // Whether finish() sets rows that attend to one key only to the value of that key. Needed if P V
  // rounds such rows and modifications mask keys, so that `Mask` does not show which rows they are.
  static constexpr bool fixes_one_key_rows =
      Config::modified && !Config::sinks && !Config::dropout && !quotient_is_exact<Element>;

  static_assert(warp_rows == 16 || warp_rows == 32, "a warp owns one or two tiles of 16 rows");
  static_assert(Br % Config::warps == 0 && Bc % 16 == 0, "tiles consist of whole fragments");
  static_assert(column_warps == 1 || sizeof(Element) == 2, "column warps need 16-bit elements");
  static_assert(stages >= 2 && stages <= 4, "2 to 4 stages");

  // Shared memory: Q, which the output overwrites at the end, then the ring of K and V tiles.
  static constexpr int row_bytes =
      KeyLayout::row_bytes > ValueLayout::row_bytes ? KeyLayout::row_bytes : ValueLayout::row_bytes;
  static constexpr int q_bytes = Br * row_bytes;
  static constexpr int stage_bytes = Bc * row_bytes;
  static_assert(q_bytes + stages * stage_bytes == Config::shared_memory, "as the host planned");
  static_assert(column_warps == 1 || Br * Bc * int(sizeof(float)) <= stage_bytes,
                "scores fit in the stage of the keys");

  template <int Rows, int Columns, class Layout>
  using Copy = RowCopy<Layout, Element, Rows, Columns, threads, Config::alignment>;
  using QueryCopy = Copy<Br, Config::head_dim, KeyLayout>;
  using KeyCopy = Copy<Bc, Config::head_dim, KeyLayout>;
  using ValueCopy = Copy<Bc, Config::head_dim_v, ValueLayout>;

  const Params& p;
  const SequenceView<Config>* view;  // sequence of this CTA, or null if the batch is dense
  const Mask<Config, Config::group> mask;
  const KvTileRange tiles;
  const int group = threadIdx.x / 32 / column_warps;  // group of warps that process the same rows
  const int lane = threadIdx.x % 32;
  const int first_row;  // first query row of which this lane holds elements, see row_of()
  const unsigned q_shared;
  const unsigned ring;
  const Element* next_keys;  // this thread's first source address in the next K tile to load
  const Element* next_values;
  const float scale_log2;

  Products products;
  typename Products::Scores scores;  // S, which exponentiate() replaces by P
  typename Products::Output out;
  Softmax softmax;

  __device__ MmaForward(const Params& params, const TileCoord& coord, unsigned shared,
                        const SequenceView<Config>* view = nullptr)
      : MmaTileCoord<Config>(coord),
        p(params),
        view(view),
        mask(params, coord.batch),
        tiles(kv_tile_range<Bc, Config::split_keys>(mask, coord.q_begin,
                                                    min(coord.q_begin + Br, params.seqlen_q),
                                                    coord.split, params.num_splits)),
        first_row(first_row_of(coord)),
        q_shared(shared),
        ring(shared + q_bytes),
        next_keys(KeyCopy::source(params.k.head<const Element>(coord.batch, coord.head_kv) +
                                      int64(tiles.end - 1) * Bc * params.k.row_stride,
                                  params.k.row_stride)),
        next_values(ValueCopy::source(params.v.head<const Element>(coord.batch, coord.head_kv) +
                                          int64(tiles.end - 1) * Bc * params.v.row_stride,
                                      params.v.row_stride)),
        scale_log2(exponent_scale<Config, float>(params)) {
    if constexpr (Config::group > 1) {
      QueryCopy::gather(q_shared, [&](int row) { return view->query(coord.q_begin + row); });
      return;
    }
    const Element* queries = QueryCopy::source(
        p.q.head<const Element>(coord.batch, coord.head) + coord.q_begin * p.q.row_stride,
        p.q.row_stride);
    QueryCopy::template start<true>(q_shared, queries, p.q.row_stride, p.seqlen_q - coord.q_begin);
  }

  __device__ void run() {
    const int last = tiles.end - 1;
    load_tile<0, true>(last);
    if (stages > 2) load_tile<1, true>(last);
    if (stages > 3) load_tile<2, true>(last);
    if constexpr (Config::q_in_registers) {
      ptx::cp_async_wait_group<stages - 2>();
      __syncthreads();
      products.queries.keep(warp_queries());
    }
    reset();
    int tile = last;
    for (; tile >= tiles.full_end; --tile) process_tile<true>(tile);
    for (; tile >= first_full_tile(); --tile) process_tile<false>(tile);
    if constexpr (Config::window_left) {
      for (; tile >= tiles.begin; --tile) process_tile<true>(tile);
    }
    ptx::cp_async_wait_group<0>();
    finish();
  }

  // Returns the first KV tile in which the window masks no key for any row.
  __device__ int first_full_tile() const {
    if constexpr (Config::window_left) {
      const int last_row = min(this->coord.q_begin + Br, p.seqlen_q) - 1;
      return max(tiles.begin, mask.template first_full_tile<Bc>(last_row));
    } else {
      return tiles.begin;
    }
  }

  __device__ void reset() {
    clear(out);
    softmax.reset();
  }

  __device__ unsigned warp_queries() const {
    return q_shared + group * warp_rows * KeyLayout::row_bytes;
  }

  // Returns the address of K or V of a tile. The ring receives K and V of the last KV tile, then K
  // and V of the tile before it, and so on, in consecutive stages.
  __device__ unsigned ring_address(int tile, int is_value) const {
    const int stage = stages == 3 ? (tile + is_value) % 3 : tile % (stages / 2) * 2 + is_value;
    return ring + stage * stage_bytes;
  }

  // Starts the copy of the K or V tile that is stored `Ahead` stages after K of `tile`, if there is
  // one. Every call commits one cp.async group, which may be empty, so that the number of newer
  // groups is always the same when a tile is waited for.
  template <int Ahead, bool Ragged>
  __device__ void load_tile(int tile) {
    constexpr bool is_value = Ahead % 2;
    tile -= Ahead / 2;
    if (tile >= tiles.begin) {
      const unsigned target = ring_address(tile, is_value);
      const int rows_left = p.seqlen_k - tile * Bc;
      if constexpr (Config::page_size > 0) {
        if constexpr (is_value) {
          load_pages<ValueCopy>(target, view->p.v, tile * Bc);
        } else {
          load_pages<KeyCopy>(target, view->p.k, tile * Bc);
        }
      } else if constexpr (is_value) {
        ValueCopy::template start<Ragged>(target, next_values, p.v.row_stride, rows_left);
        next_values -= Bc * p.v.row_stride;
      } else {
        KeyCopy::template start<Ragged>(target, next_keys, p.k.row_stride, rows_left);
        next_keys -= Bc * p.k.row_stride;
      }
    }
    ptx::cp_async_commit_group();
  }

  // Loads a paged tile. The block table is read for each row, or once if the tile lies in one page.
  template <class TileCopy>
  __device__ void load_pages(unsigned target, const Tensor& tensor, int first) {
    const auto rows = view->pages(tensor);
    if constexpr (Config::page_size % Bc == 0) {
      const auto row = rows.at(first);
      TileCopy::template start<true>(target, TileCopy::source(row.begin, tensor.row_stride),
                                     tensor.row_stride, row.exists ? p.seqlen_k - first : 0);
    } else {
      TileCopy::gather(target, [&](int row) { return rows.at(first + row); });
    }
  }

  // Waits for K or V of a tile and returns its address. The barrier also shows that all warps have
  // read the previous tile, whose stage the next load overwrites.
  template <int IsValue>
  __device__ unsigned await_tile(int tile) {
    ptx::cp_async_wait_group<stages - 2>();
    __syncthreads();
    return ring_address(tile, IsValue);
  }

  template <bool Edge>
  __device__ void process_tile(int tile) {
    // With two stages, the next copy must start at once to arrive in time. With more, it is better
    // issued while the tensor cores finish. Only the last KV tile can be partial. run() has loaded
    // its K and, with more than two stages, its V, so only its V with two stages needs `Edge`.
    const Kept kept = kept_pairs(tile * Bc);
    const unsigned k_shared = await_tile<0>(tile);
    if (stages == 2) load_tile<stages - 1, Edge>(tile);
    compute_scores(k_shared);
    if (stages > 2) load_tile<stages - 1, false>(tile);
    softmax.template apply_factor<Config>(scores);
    modify_scores(tile * Bc);
    if (Edge) apply_mask(tile * Bc);
    softmax.update_maxima(scores, out, scale_log2);

    const unsigned v_shared = await_tile<1>(tile);
    if (stages == 2) load_tile<stages, false>(tile);
    typename Softmax::PerRow base;
    softmax.bases(base, scale_log2);
    products.multiply_probabilities_values(out, scores, v_shared, [&](int i, int j) {
      softmax.exponentiate(scores, i, j, base, scale_log2);
      if constexpr (Config::dropout) kept.of[i].drop(scores[i][j], j);
    });
    if (stages > 2) load_tile<stages, false>(tile);
  }

  __device__ void compute_scores(unsigned k_shared) {
    if constexpr (column_warps == 1) {
      clear(scores);
      products.multiply_queries_keys(scores, warp_queries(), k_shared);
    } else {
      typename Products::PartialScores partial_scores;
      clear(partial_scores);
      products.multiply_queries_keys(partial_scores, warp_queries(), k_shared);
      // All warps must have read K before S overwrites it. The next load into this stage follows
      // await_tile<1>().
      __syncthreads();
      Products::exchange(scores, partial_scores, k_shared, group);
    }
  }

  __device__ int first_row_of(const TileCoord& coord) const {
    return coord.q_begin + group * warp_rows + lane / 4;
  }

  // Returns the query row of the upper (0) or lower (1) accumulator half in row tile i.
  __device__ static int row_of(int first_row, int i, int half) {
    return first_row + 16 * i + 8 * half;
  }

  __device__ void modify_scores(int key_begin) {
    if constexpr (Config::modified) {
      modify_fragments<Config, 2 * row_tiles, Bc / 8>(
          p,
          [&](int r) { return score_row(p, this->coord, view, row_of(first_row, r / 2, r % 2)); },
          key_begin + lane % 4 * 2, [&](int r) { return scores[r / 2][0] + 2 * (r % 2); });
    }
  }

  // Returns which pairs of a KV tile keep their weight; unused without dropout.
  __device__ Kept kept_pairs(int key_begin) const {
    Kept kept = {};
    if constexpr (Config::dropout) {
      const DropoutNumbers numbers = dropout_numbers<Config>(p);
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        kept.of[i].draw(numbers, this->coord.batch, this->coord.head,
                        first_row - lane / 4 + 16 * i, key_begin);
      }
    }
    return kept;
  }

  __device__ void apply_mask(int key_begin) {
    const auto tile_mask = mask.counted_from(key_begin + lane % 4 * 2);
    // Without `opaque`, the compiler hoists row / group out of the loop and keeps it in registers.
    const int first_row = Config::group > 1 ? ptx::opaque(this->first_row) : this->first_row;
    softmax.mask(
        scores, [&](int i, int half) { return tile_mask.visible_end(row_of(first_row, i, half)); });
    if constexpr (Config::window_left) {
      softmax.mask_before(scores, [&](int i, int half) {
        return mask.visible_begin(row_of(first_row, i, half)) - key_begin - lane % 4 * 2;
      });
    }
  }

  // Divides by the row sums and writes the output and the log-sum-exp.
  __device__ void finish() {
    // The tile coordinates are recomputed, so that they take no registers in the loops.
    if constexpr (Config::has_seqlens) {
      const SequenceView<Config> tile_view(view->p, RowSelection<Config>::tile());
      const Params local = tile_view.params();
      finish(local, tile_view.coord, &tile_view);
      if (may_have_degenerate_rows()) fix_rows(local, tile_view.coord, &tile_view);
      tile_view.clear_unowned_rows();
    } else {
      finish(p, tile_coord<Br>(p, RowSelection<Config>::tile()), nullptr);
      if (may_have_degenerate_rows()) {
        fix_rows(p, tile_coord<Br>(p, RowSelection<Config>::tile()), nullptr);
      }
    }
  }

  // Returns whether fix_rows() is needed. The check saves recomputing the tile coordinates for
  // fix_rows(), which costs 1 to 2% with 512 keys.
  __device__ bool may_have_degenerate_rows() const {
    return !Config::modified &&
           mask.visible_end(first_row - lane / 4) <= max_degenerate_keys<Element>;
  }

  __device__ static void fix_rows(const Params& p, const TileCoord& coord,
                                  const SequenceView<Config>* view) {
    const unsigned group = threadIdx.x / 32 / column_warps;
    const int first = coord.q_begin + group * warp_rows;
    // Waits until all warps with the same rows have written them.
    if constexpr (column_warps > 1) {
      ptx::barrier_sync_aligned(1 + group, 32 * column_warps);
      if (Products::column_warp() > 0) return;
    }
    fix_degenerate_rows<Config>(p, coord, view, first, min(first + warp_rows, p.seqlen_q));
  }

  __device__ void finish(const Params& p, const TileCoord& coord,
                         const SequenceView<Config>* view) {
    const auto partials = partials_of(p, view);
    unsigned one_key_rows = 0;  // bit 2 * i + half is set if the row's sum equals its largest p
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const SoftmaxRow& state = softmax.add_lanes(i, half);
        if constexpr (fixes_one_key_rows) {
          const float largest = Softmax::largest_probability(state, scale_log2);
          if (state.sum > 0 && state.sum == largest) one_key_rows |= 1 << (2 * i + half);
        }
        float normalizer = state.normalizer();
        if constexpr (Config::dropout) normalizer *= kept_weight<Config, float>(p);
        scale_row<Products::columns_v / 8>(out[i][0] + 2 * half, normalizer);
        const int row = row_of(first_row_of(coord), i, half);
        if constexpr (Config::modified) {
          finish_modified(p, score_row(p, coord, view, row).head, state, out[i][0] + 2 * half);
        }
        if (lane % 4 == 0 && Products::column_warp() == 0 && row < p.seqlen_q &&
            RowSelection<Config>::include(row - coord.q_begin)) {
          const int64 index = index_of(p, coord, view, row);
          if constexpr (Config::split_keys) {
            partials.template set<Softmax::factor>(p, coord.split, index, state, scale_log2);
          } else if (p.lse != nullptr) {
            float lse = log_sum_exp(state);
            if constexpr (Config::sinks) {
              apply_sink<Config>(p, score_row(p, coord, view, row).head, lse);
            }
            static_cast<float*>(p.lse)[index] = lse;
          }
          if constexpr (has_statistics<Config>) {
            RowSummary<float> summary =
                state.template summary<Softmax::factor>(logit_unit<Config, float>(p));
            if constexpr (Config::split_keys) {
              partials.set_statistics(p, coord.split, index, summary);
            } else {
              float lse = log_sum_exp(state);
              summary.scale_weights(
                  apply_sink<Config>(p, score_row(p, coord, view, row).head, lse));
              write_statistics<Config>(p, index, summary);
            }
          }
        }
      }
    }
    if constexpr (Config::split_keys) {
      write_partial(partials, p, coord, view);
    } else {
      write_output(p, coord, view);
    }
    if constexpr (fixes_one_key_rows) fix_one_key_rows(one_key_rows, partials, p, coord, view);
  }

  __device__ void fix_one_key_rows(unsigned one_key_rows, const Partials<Config>& partials,
                                   const Params& p, const TileCoord& coord,
                                   const SequenceView<Config>* view) const {
    if (!__any_sync(~0u, one_key_rows != 0)) return;
    const KvTileRange tiles = kv_tile_range<Bc, Config::split_keys>(
        Mask<Config, Config::group>(p, coord.batch), coord.q_begin,
        min(coord.q_begin + Br, p.seqlen_q), coord.split, p.num_splits);
    const int first_of_warp = first_row_of(coord) - lane / 4;
#pragma unroll 1
    for (int r = 0; r < 2 * row_tiles; ++r) {
      // Keep one bit per row: the bit of the first of the four lanes that hold the row.
      unsigned left = __ballot_sync(~0u, one_key_rows >> r & 1) & 0x11111111;
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int row = row_of(first_of_warp + (__ffs(left) - 1) / 4, r / 2, r % 2);
        if (row >= p.seqlen_q || !RowSelection<Config>::include(row - coord.q_begin)) continue;
        // Orders the next writes after those of the lanes that wrote the row.
        __syncwarp();
        if constexpr (Config::split_keys) {
          fix_one_key_row<Config>(p, coord, view, tiles, row,
                                  partials.out_row(coord.split, index_of(p, coord, view, row)));
        } else {
          Element* head = p.out.head<Element>(coord.batch, coord.head);
          fix_one_key_row<Config>(p, coord, view, tiles, row, out_row(head, p, view, row));
        }
      }
    }
  }

  __device__ float log_sum_exp(const SoftmaxRow& state) const {
    return state.template log_sum_exp<Softmax::factor>(scale_log2);
  }

  // Multiplies an output row by the factor of the sink, unless KV is split: then the merge does so.
  // A fully masked row holds 0 times values that other rows attend to, maybe NaN: it is set to 0.
  __device__ void finish_modified(const Params& p, int head, const SoftmaxRow& state,
                                  float* row) const {
    if constexpr (Config::sinks && !Config::split_keys) {
      float lse = log_sum_exp(state);
      scale_row<Products::columns_v / 8>(row, apply_sink<Config>(p, head, lse));
    }
    if (state.is_fully_masked()) fill_row_from<Products::columns_v / 8>(row, 0, 0);
  }

  __device__ void write_partial(const Partials<Config>& partials, const Params& p,
                                const TileCoord& coord, const SequenceView<Config>* view) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(first_row_of(coord), i, half);
        if (row >= p.seqlen_q) continue;
        float* target = partials.out_row(coord.split, index_of(p, coord, view, row));
        write_row<Products::columns_v / 8, Config::head_dim_v>(
            target, out[i][0] + 2 * half, [&](int j, int c) { return products.column(j, c); });
      }
    }
  }

  // Writes the output through shared memory in 16-byte chunks. Warps write the rows they computed.
  __device__ void write_output(const Params& p, const TileCoord& coord,
                               const SequenceView<Config>* view) {
    __syncthreads();
    const int warp_row = group * warp_rows;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        products.stage_row(out, i, half, q_shared, warp_row + 16 * i + 8 * half + lane / 4);
      }
    }
    if constexpr (column_warps == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync_aligned(1 + group, 32 * column_warps);
    }
    Element* output = p.out.head<Element>(coord.batch, coord.head);
    constexpr int elements = ValueLayout::chunk_elements;
#pragma unroll
    for (int pass = 0; pass < warp_rows * ValueLayout::chunks; pass += 32 * column_warps) {
      const int first = pass + 32 * Products::column_warp();
      const int row = warp_row + (first + lane) / ValueLayout::chunks;
      const int chunk = (first + lane) % ValueLayout::chunks;
      if (coord.q_begin + row >= p.seqlen_q || !RowSelection<Config>::include(row)) continue;
      unsigned bits[4];
      ptx::ld_shared_v4(bits, q_shared + ValueLayout::offset(row, chunk));
      store_chunk<Element, Config::out_alignment>(
          out_row(output, p, view, coord.q_begin + row, chunk * elements),
          reinterpret_cast<const Vector<Element, elements>&>(bits),
          Config::head_dim_v - chunk * elements);
    }
  }
};

template <class Config>
__device__ void mma_forward(const Params& params, int tile = blockIdx.x) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  if constexpr (Config::has_seqlens) {
    const SequenceView<Config> view(params, tile);
    if (view.coord.q_begin >= view.rows()) {
      view.clear_unowned_rows();
      return;
    }
    const Params local = view.params();
    MmaForward<Config>(local, view.coord, ptx::shared_address(shared_memory), &view).run();
  } else {
    MmaForward<Config>(params, tile_coord<Config::Br>(params, tile),
                       ptx::shared_address(shared_memory))
        .run();
  }
}

#endif  // __CUDA_ARCH__ >= 800
