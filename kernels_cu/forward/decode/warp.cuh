// A warp of the decode kernel. It streams KV tiles through a ring of its own and writes a partial
// result, independently of other warps. If a head is wide, several column warps process the same
// keys, each with a slice of the columns, and exchange only scores (decode/team.cuh).
#pragma once

#include "forward/decode/block.cuh"
#include "ptx/base.cuh"
#include "ptx/here.cuh"
#include "score/softmax.cuh"
#include "score/warp_softmax.cuh"
#include "tile/element.cuh"
#include "tile/fragments.cuh"
#include "tile/key_rows.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeWarp : DecodeBlock<Config> {
  using Element = typename Config::Element;
  using Block = DecodeBlock<Config>;
  using Products = typename Block::Products;
  using Rows = KeyRows<Config, typename Block::Stored>;
  using Head = typename Rows::Head;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  using Team = typename Block::Team;
  static constexpr int teams = Team::teams;
  static constexpr int stages = Config::stages;
  static constexpr int row_tiles = Block::row_tiles;
  static constexpr int columns = Block::columns;
  static constexpr int stage_bytes = Block::stage_bytes;
  using Softmax =
      WarpSoftmax<typename Block::ProductsOf::Probability, row_tiles, Bc, columns>;

  using Block::lane;
  using Block::p;
  using Block::partial_tile;
  using Block::state;
  using Block::tile_rows;
  using Block::visible_begin;
  using Block::visible_end;
  using Block::warp;

  const unsigned ring;
  Head head;  // KV head of all partial tiles, if it is a grid axis
  float scale_log2 = 0;

  Products products;
  typename Products::Scores scores;  // S, later P
  typename Products::Output out;
  Softmax softmax;
  DecodeScales<Config> scales;
  Team team;

  __device__ DecodeWarp(const typename Block::Arguments& params)
      : Block(params),
        ring(ptx::shared_address(Block::shared_floats()) + threadIdx.x / 32 * Block::ring_bytes),
        head(params, Config::balanced ? blockIdx.y : 0),
        scales(params),
        team(ptx::shared_address(Block::shared_floats()) + Block::rings_bytes) {
    // `here` makes the compiler compute the addresses now, while warp 0 computes the work range.
    if constexpr (Config::balanced) {
      head.keys = ptx::here(head.keys);
      head.values = ptx::here(head.values);
    }
  }

  // Computes the partial result of this warp. Calls while_loading() after issuing the first loads.
  template <class WhileLoading>
  __device__ void attend(WhileLoading while_loading) {
    const int last_seen = visible_end(tile_rows() - 1);
    const int end = min(partial_tile.end * teams, ceil_div(last_seen, Bc));
    const int first = partial_tile.begin * teams + warp / Team::size;
    constexpr int last_stage = stages - 1;
    Rows rows_to_load(p, partial_tile, Config::balanced ? head : Head(p, partial_tile.head_kv), first);
    scales.begin(partial_tile);
    softmax.reset();
    const int seen_by_all = visible_end(0);
    // The window masks keys before `seen_from` for some rows.
    const int seen_from = Config::window_left ? visible_begin(tile_rows() - 1) : 0;
    // Loads run last_stage tiles ahead. One loop both fills the pipeline and computes, so that its
    // code is fetched from memory only once.
    int load_stage = 0;
    int tile = first - last_stage * teams;
    do {
      const bool visits = tile >= first;
      const int stage = load_stage == last_stage ? 0 : load_stage + 1;
      if (visits) ptx::cp_async_wait_group<stages - 2>();
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
      const int load_tile = tile + last_stage * teams;
      if (load_tile < end) {
        const int page =
            rows_to_load.template start<teams>(
                target, target + Block::values_offset, load_tile, Block::policy());
        scales.start(target + Block::scales_offset, load_tile, page, partial_tile.sequence.seqlen_k);
      }
      if (load_tile == first) {
        start_queries(ring + last_stage * stage_bytes);
        while_loading();
      }
      ptx::cp_async_commit_group();
      if (visits) {
        visit(ring + stage * stage_bytes, tile * Bc,
              (tile + 1) * Bc > seen_by_all || (Config::window_left && tile * Bc < seen_from));
      }
      load_stage = stage;
      tile += teams;
    } while (tile < end);
    ptx::cp_async_wait_group<0>();
  }

  // Starts copying Q to a stage of the ring that is not needed yet. Each warp loads all query rows.
  __device__ void start_queries(unsigned target) const {
    using Columns = typename Rows::KeyColumns;
    using Copy =
        WarpCopy<typename Block::QueryLayout, Element, Br, Columns::least, Config::alignment, true>;
    const Tensor& q = p.q;
    const int member = Team::member();
    const Element* queries =
        q.head<const Element>(partial_tile.sequence.q_batch, partial_tile.head_kv * Block::group) +
        partial_tile.sequence.q_first * q.row_stride + member * Columns::padded;
    const int inside = tile_rows();
    // Each lane computes the offset of one row.
    const int64 place =
        this->query_of(lane) * q.row_stride + this->head_of(lane) * q.head_stride;
    const AskedRows rows = {[&](int row, bool& exists) {
      exists = row < inside;
      return queries + __shfl_sync(~0u, place, row);
    }};
    Copy::start(target, Block::policy(), rows, Columns::left_of(member));
  }

  __device__ void visit(unsigned stage, int first_key, bool needs_mask) {
    clear(scores);
    multiply_keys(stage);
    team.add_up(scores);
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
      scales.multiply(scores, products.queries.factors, stage + Block::scales_offset);
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
      scales.multiply_probabilities(scores, stage + Block::scales_offset, out);
      products.multiply_probabilities_values(out, scores, stage + Block::values_offset);
    } else {
      products.multiply_probabilities_values(
          out, scores, stage + Block::values_offset,
          [&](int i, int j) { softmax.exponentiate(scores, i, j, base, scale_log2); });
    }
  }

  __device__ void modify_scores(int first_key) {
    if constexpr (Config::modified) {
      modify_fragments<Config, 2 * row_tiles, Bc / 8>(
          p, [&](int r) { return Block::score_row(row_of(r / 2, r % 2)); },
          first_key + lane % 4 * 2, [&](int r) { return scores[r / 2][0] + 2 * (r % 2); });
    }
  }

  // Writes the partial result to shared memory, over the ring of this warp or of its column warps.
  __device__ void leave_result() {
    softmax.add_lanes();
    float* result = Block::shared_floats() + warp / Team::size * (Block::team_bytes / 4);
    // Waits until all lanes, or all column warps, have finished reading their rings.
    Team::meet();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        if (row >= tile_rows()) continue;
        const SoftmaxRow<float>& state = softmax.rows[i][half];
        float* record = result + row * Block::record;
        float* target = record + warp % Team::size * columns;
        const float base = state.base(scale_log2);
        // A row with base -inf or without a visible key has weight 0, whatever its columns hold.
        const bool counts = !state.saw_nothing() && base > -SoftmaxMath<float>::infinity();
        if (!counts) {
#pragma unroll
          for (int j = 0; j < columns / 8; ++j) out[i][j][2 * half] = out[i][j][2 * half + 1] = 0;
        }
        float* kept = record + Block::record_columns;
        if constexpr (Config::quantized) {
          const auto left = scales.left(i, half);
          kept[0] = counts ? base + left.raise : -SoftmaxMath<float>::infinity();
          kept[1] = counts ? state.sum * left.lowered : 0;
          products.write_row(out, i, half, counts ? left.factor : 0, target);
        } else {
          kept[0] = counts ? base : -SoftmaxMath<float>::infinity();
          kept[1] = counts ? state.sum : 0;
#pragma unroll
          for (int j = 0; j < columns / 8; ++j) {
            *reinterpret_cast<Vector<float, 2>*>(target + products.column(j, 0)) = {
                {out[i][j][2 * half], out[i][j][2 * half + 1]}};
          }
        }
      }
    }
  }

  // Returns the tile row of the upper (0) or lower (1) accumulator half in row tile i.
  __device__ int row_of(int i, int half) const { return 16 * i + 8 * half + lane / 4; }
};

#endif  // __CUDA_ARCH__ >= 800
