// A warp of the decode kernel. It streams KV tiles through a ring of its own and writes a partial
// result, independently of other warps. If a head is wide, several column warps process the same
// keys, each with a slice of the columns, and exchange only scores (decode/column_warps.cuh).
#pragma once

#include "forward/decode/cta.cuh"
#include "ptx/base.cuh"
#include "ptx/compute_here.cuh"
#include "score/softmax.cuh"
#include "score/warp_softmax.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"
#include "tile/kv_rows.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeWarp : DecodeCta<Config> {
  using Element = typename Config::Element;
  using Cta = DecodeCta<Config>;
  using Products = typename Cta::Products;
  using Rows = KvRows<Config, typename Cta::Stored>;
  using Head = typename Rows::Head;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  using ColumnWarps = typename Cta::ColumnWarps;
  static constexpr int key_warps = ColumnWarps::key_warps;
  static constexpr int stages = Config::stages;
  static constexpr int row_tiles = Cta::row_tiles;
  static constexpr int columns = Cta::columns;
  static constexpr int stage_bytes = Cta::stage_bytes;
  using Softmax = WarpSoftmax<typename Cta::ProductsOf::Probability, row_tiles, Bc, columns,
                              StatisticsOf<Config, float>>;

  using Cta::lane;
  using Cta::p;
  using Cta::partial_tile;
  using Cta::state;
  using Cta::tile_rows;
  using Cta::visible_begin;
  using Cta::visible_end;
  using Cta::warp;

  const unsigned ring;
  Head head;  // KV head of all partial tiles of the CTA, if Config::balanced
  float scale_log2 = 0;

  Products products;
  typename Products::Scores scores;  // holds S, then P
  typename Products::Output out;
  Softmax softmax;
  DecodeScales<Config> scales;
  ColumnWarps column_warps;

  __device__ DecodeWarp(const typename Cta::Arguments& params)
      : Cta(params),
        ring(ptx::shared_address(Cta::shared_floats()) + threadIdx.x / 32 * Cta::ring_bytes),
        head(params, Config::balanced ? blockIdx.y : 0),
        scales(params),
        column_warps(ptx::shared_address(Cta::shared_floats()) + Cta::rings_bytes) {
    // `compute_here` keeps the compiler from computing the addresses later. Now is a good time:
    // other warps are idle while warp 0 computes the work range.
    if constexpr (Config::balanced) {
      head.keys = ptx::compute_here(head.keys);
      head.values = ptx::compute_here(head.values);
    }
  }

  // Computes the partial result of this warp. Calls while_loading() after issuing the first loads.
  template <class WhileLoading>
  __device__ void attend(WhileLoading while_loading) {
    const int last_visible_end = visible_end(tile_rows() - 1);
    const int end = min(partial_tile.end * key_warps, ceil_div(last_visible_end, Bc));
    const int first = partial_tile.begin * key_warps + warp / ColumnWarps::size;
    constexpr int last_stage = stages - 1;
    Rows kv_rows(p, partial_tile, Config::balanced ? head : Head(p, partial_tile.head_kv), first);
    scales.begin(partial_tile);
    softmax.reset();
    const int full_end = visible_end(0);
    // The window masks keys before `full_begin` for some rows.
    const int full_begin = Config::window_left ? visible_begin(tile_rows() - 1) : 0;
    // Loads run `last_stage` KV tiles ahead of the computation. One loop both fills the pipeline
    // and computes, so that its instructions are fetched from memory only once.
    int load_stage = 0;
    int tile = first - last_stage * key_warps;
    do {
      const bool computes = tile >= first;
      const int stage = load_stage == last_stage ? 0 : load_stage + 1;
      if (computes) ptx::cp_async_wait_group<stages - 2>();
      // All lanes' copies have landed, and the stage that the next load overwrites has been read.
      __syncwarp();
      // Q arrived with the first KV tile.
      if (tile == first) {
        products.queries.keep(ring + last_stage * stage_bytes);
        __syncwarp();
        clear(out);
        scale_log2 = state.scale_log2;
      }
      const unsigned target = ring + load_stage * stage_bytes;
      const int load_tile = tile + last_stage * key_warps;
      if (load_tile < end) {
        const int page = kv_rows.template start<key_warps>(target, target + Cta::values_offset,
                                                           load_tile, Cta::policy());
        scales.start(target + Cta::scales_offset, load_tile, page, partial_tile.sequence.seqlen_k);
      }
      if (load_tile == first) {
        start_queries(ring + last_stage * stage_bytes);
        while_loading();
      }
      ptx::cp_async_commit_group();
      if (computes) {
        process_tile(ring + stage * stage_bytes, tile * Bc,
                     (tile + 1) * Bc > full_end || (Config::window_left && tile * Bc < full_begin));
      }
      load_stage = stage;
      tile += key_warps;
    } while (tile < end);
    ptx::cp_async_wait_group<0>();
  }

  // Starts copying Q to a stage of the ring that is not needed yet. Each warp loads all query rows.
  __device__ void start_queries(unsigned target) const {
    using Columns = typename Rows::KeyColumns;
    using Copy = WarpCopy<typename Cta::QueryLayout, Element, Br, Columns::last_valid,
                          Config::alignment, true>;
    const Tensor& q = p.q;
    const int column_warp = ColumnWarps::column_warp();
    const Element* queries =
        q.head<const Element>(partial_tile.sequence.q_batch, partial_tile.head_kv * Cta::group) +
        partial_tile.sequence.q_first * q.row_stride + column_warp * Columns::padded;
    const int row_count = tile_rows();
    // Each lane computes the offset of one row.
    const int64 row_offset =
        this->query_of(lane) * q.row_stride + this->head_of(lane) * q.head_stride;
    const GatheredRows rows = {[&](int row, bool& exists) {
      exists = row < row_count;
      return queries + __shfl_sync(~0u, row_offset, row);
    }};
    Copy::start(target, Cta::policy(), rows, Columns::columns_from(column_warp));
  }

  __device__ void process_tile(unsigned stage, int first_key, bool needs_mask) {
    clear(scores);
    multiply_keys(stage);
    column_warps.reduce_scores(scores);
    Softmax::template apply_factor<Config>(scores);
    modify_scores(first_key);
    if (needs_mask) {
      Softmax::mask(scores, [&](int i, int half) {
        return visible_end(row_of(i, half)) - first_key - threadIdx.x % 4 * 2;
      });
      if constexpr (Config::window_left) {
        Softmax::mask_before(scores, [&](int i, int half) {
          return visible_begin(row_of(i, half)) - first_key - threadIdx.x % 4 * 2;
        });
      }
    }
    softmax.update_maxima(scores, out, scale_log2);
    typename Softmax::PerRow base;
    softmax.bases(base, scale_log2);
    multiply_values(stage, base);
  }

  __device__ void multiply_keys(unsigned stage) {
    if constexpr (Config::quantized) {
      products.multiply_queries_keys(scores, stage);
      scales.multiply(scores, products.queries.factors, stage + Cta::scales_offset);
    } else {
      products.multiply_queries_keys(scores, 0, stage);
    }
  }

  __device__ void multiply_values(unsigned stage, const typename Softmax::PerRow& base) {
    if constexpr (Config::quantized) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < Bc / 8; ++j) softmax.exponentiate(scores, i, j, base, scale_log2);
      }
      scales.multiply_probabilities(scores, stage + Cta::scales_offset, out);
      products.multiply_probabilities_values(out, scores, stage + Cta::values_offset);
    } else {
      products.multiply_probabilities_values(
          out, scores, stage + Cta::values_offset,
          [&](int i, int j) { softmax.exponentiate(scores, i, j, base, scale_log2); });
    }
  }

  __device__ void modify_scores(int first_key) {
    if constexpr (Config::modified) {
      modify_fragments<Config, 2 * row_tiles, Bc / 8>(
          p, [&](int r) { return Cta::score_row(row_of(r / 2, r % 2)); }, first_key + lane % 4 * 2,
          [&](int r) { return scores[r / 2][0] + 2 * (r % 2); });
    }
  }

  // Writes the partial result to shared memory, over the ring of this warp or of its column warps.
  __device__ void write_result() {
    softmax.add_lanes();
    float* result = Cta::shared_floats() + warp / ColumnWarps::size * (Cta::key_warp_bytes / 4);
    // Waits until all lanes, or all column warps, have finished reading their rings.
    ColumnWarps::sync();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        if (row >= tile_rows()) continue;
        const typename Softmax::Row& state = softmax.rows[i][half];
        float* record = result + row * Cta::record;
        float* target = record + warp % ColumnWarps::size * columns;
        const float base = state.base(scale_log2);
        // A row with base -inf or no visible key gets weight 0. Its output, maybe NaN, is cleared.
        const bool has_weight = !state.is_fully_masked() && base > -SoftmaxMath<float>::infinity();
        if (!has_weight) {
#pragma unroll
          for (int j = 0; j < columns / 8; ++j) out[i][j][2 * half] = out[i][j][2 * half + 1] = 0;
        }
        float* row_state = record + Cta::record_columns;
        if constexpr (Config::quantized) {
          const auto output_scale = scales.output_scale(i, half);
          row_state[0] =
              has_weight ? base + output_scale.base_offset : -SoftmaxMath<float>::infinity();
          row_state[1] = has_weight ? state.sum * output_scale.sum_factor : 0;
          products.write_row(out, i, half, has_weight ? output_scale.factor : 0, target);
        } else {
          row_state[0] = has_weight ? base : -SoftmaxMath<float>::infinity();
          row_state[1] = has_weight ? state.sum : 0;
#pragma unroll
          for (int j = 0; j < columns / 8; ++j) {
            *reinterpret_cast<Vector<float, 2>*>(target + products.column(j, 0)) = {
                {out[i][j][2 * half], out[i][j][2 * half + 1]}};
          }
        }
        if constexpr (Config::max_logits) {
          row_state[2] = has_weight ? state.largest : -SoftmaxMath<float>::infinity();
        }
        if constexpr (Config::entropy) {
          ExponentMoment<float, true> part = {state.moment};
          if constexpr (Config::quantized) {
            const auto output_scale = scales.output_scale(i, half);
            part.shift_base(output_scale.base_offset, state.sum, output_scale.sum_factor);
          }
          row_state[3] = has_weight ? part.moment : 0;
        }
      }
    }
  }

  // Returns the tile row of the upper (0) or lower (1) accumulator half in row tile i.
  __device__ int row_of(int i, int half) const { return 16 * i + 8 * half + lane / 4; }
};

#endif  // __CUDA_ARCH__ >= 800
