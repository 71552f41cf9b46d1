// Gradients of attention on tensor cores, sm_80 and newer: five products in one pass. Of float16
// and bfloat16, and of float32 in pairs of float16 (pieces.cuh), of which a kernel makes tiles
// first (images.cuh).
//
// FlashAttention-2 (Dao 2023, algorithm 2): a thread block owns a tile of keys, whose dk and dv it
// keeps in registers while tiles of queries of all query heads stream by, from the last to the
// first:
//
//   s' = k q',  dp' = v dout',  p and ds from these,  dv += p' dout,  dk += ds' q,  dq = ds k
//
// The blocks of a head add their dq of a tile in turns (turns.cuh), the order is fixed. Scores are
// transposed: a warp that has all queries of its keys has p' and ds' in registers for its products.
// Where registers do not hold dk and dv of whole rows, side_warps warps share keys: each makes
// scores of its part of the queries and has its part of the columns of dk and dv, and they exchange
// p' and ds' through shared memory.
#include "backward/images.cuh"
#include "backward/operands.cuh"
#include "backward/params.cuh"
#include "backward/pieces.cuh"
#include "backward/query_sums.cuh"
#include "backward/row_terms.cuh"
#include "backward/turns.cuh"
#include "backward/weigh.cuh"
#include "backward/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "score/mask.cuh"
#include "tile/access.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MmaGradients {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using Piece = typename Pieces<Element>::type;  // what shared memory holds
  static constexpr int pieces = Pieces<Element>::count;
  static constexpr bool in_pieces = pieces > 1;
  static constexpr bool wants_q = Config::wants_q;
  static constexpr bool wants_k = Config::wants_k;
  static constexpr bool wants_v = Config::wants_v;
  static constexpr bool wants_ds = wants_q || wants_k;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int stages = Config::stages;
  static constexpr int warps = Config::warps;
  static constexpr int threads = 32 * warps;
  static constexpr int key_warps = Config::key_warps;
  static constexpr int side_warps = warps / key_warps;
  static_assert(key_warps * side_warps == warps, "all have as much");

  // A warp's keys, and the queries that it makes scores of at once.
  static constexpr int warp_keys = Bc / key_warps;
  static constexpr int row_tiles = warp_keys / 16;
  static constexpr int columns = Config::columns;
  static constexpr int passes = Br / (columns * side_warps);
  static constexpr int steps = columns / 16;
  static_assert(warp_keys * key_warps == Bc && row_tiles * 16 == warp_keys, "whole fragments");
  static_assert(passes * columns * side_warps == Br && steps * 16 == columns, "whole fragments");

  // Of dq, rows and columns of warps.
  static constexpr int sum_row_warps = Config::sum_row_warps;
  static constexpr int sum_column_warps = warps / sum_row_warps;
  static constexpr int sum_row_tiles = Br / 16 / sum_row_warps;

  static constexpr int dim = Config::padded_dim;
  static constexpr int dim_v = Config::padded_dim_v;
  template <int Dim, int Columns>
  struct ProductConfig {
    using Element = Piece;
    static constexpr int Bc = Columns;
    static constexpr int head_dim = Dim;
    static constexpr int head_dim_v = Dim;
    static constexpr bool q_in_registers = false;
  };
  // Of a pair of warps that share keys, one makes scores and the other gradients of p, of the
  // queries of both, and each gives the other half of them: fewer operands are read for larger
  // products.
  static constexpr bool paired = Config::paired && wants_ds;
  static_assert(!paired || side_warps % 2 == 0, "pairs");

  // Whether all p may be far below its bound, and whether all ds may be, or any beyond: each warp
  // then finds second units of those that it makes at once.
  static constexpr bool finds_p = in_pieces && wants_v && Config::sinks;
  static constexpr bool finds_ds =
      in_pieces && wants_ds && (Config::sinks || changes_slope<typename Config::Mods>());
  static constexpr int units_of_each = key_warps * (Br / columns);

  using Scores = float[row_tiles][columns / 8][4];
  using Layout = SwizzledRows<Piece, pieces * dim>;     // of q and k
  using LayoutV = SwizzledRows<Piece, pieces * dim_v>;  // of v and dout
  using Pairs = Exchange<Piece, pieces * Br>;           // of p' and ds': keys by queries
  using Columns = SharedColumns<Piece, Layout, dim, side_warps>;
  using ColumnsV = SharedColumns<Piece, LayoutV, dim_v, side_warps>;
  using ColumnsOfSums = SharedColumns<Piece, Layout, dim, sum_column_warps>;
  using Fragments = SumFragments<Br, dim, sum_row_warps, sum_column_warps>;

  // Whether queries see other keys than their sequence's.
  static constexpr bool is_bounded = Config::causal || Config::modified;

  // Shared memory: k and v, ds', p' where warps share keys, stages of q, dout and row terms. Of
  // pieces, k and v, and a stage, are images with scales behind them; behind those of keys there is
  // place for second units.
  using Terms = RowTerms<float>;
  using Images = TileImages<Config>;
  static constexpr int scales_bytes =
      in_pieces ? Images::OfKeys::bytes - Images::OfKeys::scales_at : 0;
  static constexpr int row_bytes = Layout::row_bytes + LayoutV::row_bytes;
  static constexpr int keys_bytes = Bc * row_bytes + scales_bytes;
  static constexpr int units_at = Images::OfKeys::scales_at + int(sizeof(KeyScales));
  static_assert(units_at + (finds_p + finds_ds) * units_of_each * int(sizeof(float)) <=
                    Images::OfKeys::bytes,
                "as the host has seen");
  static constexpr int pairs_bytes = Bc * Pairs::Layout::row_bytes;
  static constexpr bool exchanges_p = side_warps > 1 && wants_v;
  static constexpr bool exchanges_ds = wants_q || (side_warps > 1 && wants_k);
  static constexpr int stage_bytes = Br * (row_bytes + int(sizeof(Terms))) + scales_bytes;
  static constexpr int stages_at = keys_bytes + (1 + (side_warps > 1)) * pairs_bytes;
  static_assert(stages_at + stages * stage_bytes == Config::shared_memory, "as the host planned");

  template <int Rows, int Dim, class TileLayout>
  using Copy = RowCopy<TileLayout, Element, Rows, Dim, threads, Config::alignment>;

  const GradientParams& p;
  const GradientWork work;
  const Sequence at;
  const Mask<Config> mask;
  unsigned char* const memory;
  const unsigned shared;
  const float scale_log2;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const QueryTiles tiles;
  int full_end;

  float sums_k[row_tiles][2 * Columns::steps][4];
  float sums_v[row_tiles][2 * ColumnsV::steps][4];
  float seen[row_tiles][2];  // sums of p, where a modification may hide all of a key
  int passing = -1;          // place of the sums whose turn is to be passed on

  __device__ MmaGradients(const GradientParams& p, const GradientWork& work, const Sequence& at,
                            unsigned char* memory)
      : p(p),
        work(work),
        at(at),
        mask(mask_of<Config>(p, at, work.batch)),
        memory(memory),
        shared(ptx::shared_address(memory)),
        scale_log2(signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e),
        tiles(find_query_tiles<Br>(mask, work.begin, min(work.begin + Bc, at.seqlen_k),
                                   at.seqlen_q)),
        full_end(tiles.full_end) {
    // Rows behind the last are no rows to modifications.
    if (Config::modified && at.seqlen_q % Br != 0) full_end = min(full_end, at.seqlen_q / Br);
  }

  __device__ void run() {
    clear(sums_k);
    clear(sums_v);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) seen[i][0] = seen[i][1] = 0;
    if (tiles.begin < tiles.end) sweep();
    finish();
  }

 private:
  __device__ int key_warp() const { return warp / side_warps; }
  __device__ int side() const { return warp % side_warps; }

  // Where a head's rows of q or dout begin, and those of k or v.
  __device__ const Element* queries(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(at.q_batch, head) + at.q_first * tensor.row_stride;
  }
  __device__ const Element* keys(const Tensor& tensor) const {
    return tensor.head<const Element>(at.k_batch, work.head) +
           (int64(at.k_first) + work.begin) * tensor.row_stride;
  }

  __device__ unsigned keys_at() const { return shared; }
  __device__ unsigned values_at() const { return shared + Bc * Layout::row_bytes; }
  __device__ unsigned ds_at() const { return shared + keys_bytes; }
  __device__ unsigned p_at() const { return ds_at() + pairs_bytes; }
  __device__ unsigned queries_at(int stage) const {
    return shared + stages_at + stage * stage_bytes;
  }
  __device__ unsigned douts_at(int stage) const {
    return queries_at(stage) + Br * Layout::row_bytes;
  }
  __device__ unsigned terms_at(int stage) const { return queries_at(stage) + Br * row_bytes; }

  // A tile of queries of one head.
  struct Step {
    int head;
    int tile;
  };

  template <int Rows, int Dim, class TileLayout>
  __device__ static void start(unsigned target, const Element* source, const Tensor& tensor,
                               int left) {
    using TileCopy = Copy<Rows, Dim, TileLayout>;
    TileCopy::template start<true>(target, TileCopy::source(source, tensor.row_stride),
                                   tensor.row_stride, left);
  }

  template <class Image>
  __device__ static void start_image(unsigned target, const char* source) {
#pragma unroll
    for (int first = 0; first < Image::bytes; first += 16 * threads) {
      const int at = first + 16 * int(threadIdx.x);
      if (first + 16 * threads > Image::bytes && at >= Image::bytes) break;
      ptx::cp_async<16>(target + at, source + at, 16);
    }
  }

  __device__ void load_keys() {
    if constexpr (in_pieces) {
      start_image<typename Images::OfKeys>(
          keys_at(), Images::of_keys(p, at, work.batch, work.head, work.begin / Bc));
    } else {
      const int left = at.seqlen_k - work.begin;
      start<Bc, Config::head_dim, Layout>(keys_at(), keys(p.k), p.k, left);
      if constexpr (wants_ds) {
        start<Bc, Config::head_dim_v, LayoutV>(values_at(), keys(p.v), p.v, left);
      }
    }
  }

  __device__ void load(int stage, const Step& step) {
    if constexpr (in_pieces) {
      start_image<typename Images::OfQueries>(
          queries_at(stage), Images::of_queries(p, at, work.batch, step.head, step.tile));
    } else {
      load_queries(stage, step.head, step.tile * Br);
    }
    ptx::cp_async_commit_group();
  }

  __device__ void load_queries(int stage, int head, int first) {
    const int left = at.seqlen_q - first;
    start<Br, Config::head_dim, Layout>(queries_at(stage),
                                        queries(p.q, head) + first * p.q.row_stride, p.q, left);
    start<Br, Config::head_dim_v, LayoutV>(
        douts_at(stage), queries(p.dout, head) + first * p.dout.row_stride, p.dout, left);
    const Terms* terms = row_terms<Config>(p) + first_row_of_head(p, at, head) + first;
#pragma unroll
    for (int first_row = 0; first_row < Br; first_row += threads) {
      const int i = first_row + threadIdx.x;
      if (Br % threads != 0 && i >= Br) break;
      ptx::cp_async<sizeof(Terms)>(terms_at(stage) + i * int(sizeof(Terms)),
                                   terms + (i < left ? i : 0), i < left ? sizeof(Terms) : 0);
    }
  }

  __device__ void sweep() {
    load_keys();
    Step step = {work.head * group(), tiles.end - 1};
    load(0, step);
    int stage = 0;
    while (true) {
      ptx::cp_async_wait_group<0>();
      // Nobody reads the tile before any more, whose place the next one takes.
      __syncthreads();
      if (stages > 1 && !is_last(step)) load(1 - stage, step_behind(step));
      visit(stage, step.head, step.tile);
      if (is_last(step)) break;
      step = step_behind(step);
      if (stages > 1) {
        stage = 1 - stage;
      } else {
        __syncthreads();
        load(0, step);
      }
    }
    __syncthreads();
    pass();
  }

  __device__ int group() const { return p.heads_q / p.heads_kv; }
  __device__ bool is_last(const Step& step) const {
    return step.tile == tiles.begin && step.head == (work.head + 1) * group() - 1;
  }
  __device__ Step step_behind(const Step& step) const {
    if (step.tile > tiles.begin) return {step.head, step.tile - 1};
    return {step.head + 1, tiles.end - 1};
  }

  // Of all tiles of keys that a tile of queries sees, how many come before this one.
  __device__ int turn_of(int tile) const {
    return work.begin / Bc - (Config::window_left ? mask.visible_begin(tile * Br) / Bc : 0);
  }

  // Passes on the turn of the tile before, to which all have added when the barrier behind it is
  // passed.
  __device__ void pass() {
    if constexpr (wants_q) {
      if (threadIdx.x != 0) return;
      pass_turn(passing < 0 ? nullptr : QuerySums<Config>(p).counters + passing);
    }
  }

  __device__ void visit(int stage, int head, int tile) {
    // Scores of keys behind the last are 0, and their p may be infinite: 0 times that is no part of
    // dq.
    const bool is_masked = work.begin + Bc > at.seqlen_k ||
                           (is_bounded && (tile < tiles.full_begin || tile >= full_end));
    int found = 0;  // by one thread: whose turn it is
    if constexpr (wants_q) {
      if (threadIdx.x == 0) {
        const QuerySums<Config> sums(p);
        found = look_at_turn(sums.counter(p, at, work.batch, head, tile));
      }
    }
    make_pairs<true>(stage, head, tile, side() * columns, is_masked);
#pragma unroll
    for (int i = 1; i < passes; ++i) {
      make_pairs<false>(stage, head, tile, (i * side_warps + side()) * columns, is_masked);
    }
    if constexpr (wants_q) {
      const QuerySums<Config> sums(p);
      const int place = sums.place(p, at, work.batch, head, tile);
      const int turn = turn_of(tile);
      if (threadIdx.x == 0) await_turn(sums.counters + place, turn, found);
      __syncthreads();
      add_others(stage);
      add_query_gradients(stage, head, tile, turn);
      passing = place;
    } else if constexpr (side_warps > 1) {
      __syncthreads();
      add_others(stage);
    }
  }

  // p' and ds' of the warp's keys and of `columns` queries from `first` of the tile on, and what
  // those alone add to its columns of dk and dv.
  template <bool First>
  __device__ void make_pairs(int stage, int head, int tile, int first, bool is_masked) {
    const unsigned query_rows = queries_at(stage) + first * Layout::row_bytes;
    const unsigned dout_rows = douts_at(stage) + first * LayoutV::row_bytes;
    Scores scores;     // then p'
    Scores gradients;  // of p', then of the scores
    if constexpr (paired) {
      multiply_in_pair(scores, gradients, stage, first);
    } else {
      clear(scores);
      clear(gradients);
      multiply_keys_queries<columns>(scores, query_rows);
      if constexpr (wants_ds) multiply_values_douts<columns>(gradients, dout_rows);
    }
    if (First) pass();
    if (is_masked) {
      weigh<true>(scores, gradients, stage, head, tile, first);
    } else {
      weigh<false>(scores, gradients, stage, head, tile, first);
    }
    const float second_of_ds = take_unit<finds_ds>(gradients, first_of_ds, exchanges_ds, first);
    const float second_of_p = take_unit<finds_p>(scores, first_of_p, exchanges_p, first);
    Left of_p, of_ds;
    make_left<exchanges_ds>(of_ds, gradients, ds_at(), first);
    make_left<exchanges_p>(of_p, scores, p_at(), first);
    if constexpr (wants_k) {
      add_product<Columns, Layout>(sums_k, of_ds, query_rows, units(stage).of_k * second_of_ds);
    }
    if constexpr (wants_v) {
      add_product<ColumnsV, LayoutV>(sums_v, of_p, dout_rows, units(stage).of_v * second_of_p);
    }
  }

  // p' or ds' of the warp's keys and of `columns` queries, as a left operand.
  using Left = LeftStep<row_tiles>[steps][pieces];

  // To where others find it, too, if Exchanges.
  template <bool Exchanges>
  __device__ void make_left(Left& left, const Scores& of, unsigned target, int first) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if constexpr (in_pieces) {
        split_step(left[step][0], left[step][1], of, step);
      } else {
        pack_step<Element>(left[step][0], of, step);
      }
      if constexpr (Exchanges) {
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
          Pairs::write(target, left[step][piece], key_warp() * warp_keys,
                       (piece * Br + first) / 16 + step);
        }
      }
    }
  }

  // The same of another warp, of the queries from `first` on.
  __device__ void read(Left& left, unsigned source, int first) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        Pairs::read(left[step][piece], source, key_warp() * warp_keys,
                    (piece * Br + first) / 16 + step);
      }
    }
  }

  // sums += factor left right, where only products of pieces have a factor.
  template <class OwnColumns, class RightLayout, class Sums>
  __device__ void add_product(Sums& sums, const Left& left, unsigned right_rows, float factor) {
    const unsigned right = OwnColumns::lane_address(right_rows, side());
    if constexpr (in_pieces) {
      OwnColumns::add_product(sums, left, right, [&](int) { return factor; });
    } else {
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        OwnColumns::multiply(sums, left[step][0], right + 16 * step * RightLayout::row_bytes);
      }
    }
  }

  template <int Columns>
  __device__ void multiply_keys_queries(float (&scores)[row_tiles][Columns / 8][4],
                                        unsigned query_rows) {
    multiply_rows<Layout, dim>(scores, keys_at(), query_rows);
  }
  template <int Columns>
  __device__ void multiply_values_douts(float (&gradients)[row_tiles][Columns / 8][4],
                                        unsigned dout_rows) {
    multiply_rows<LayoutV, dim_v>(gradients, values_at(), dout_rows);
  }

  // sums += left right' of the warp's keys.
  template <class TileLayout, int Dim, int column_tiles>
  __device__ void multiply_rows(float (&sums)[row_tiles][column_tiles][4], unsigned left_rows,
                                unsigned right_rows) {
    const unsigned left = left_rows + key_warp() * warp_keys * TileLayout::row_bytes;
    if constexpr (in_pieces) {
      ::multiply_rows<TileLayout, Dim>(sums, left, right_rows);
    } else {
      Products16Bit<ProductConfig<Dim, 8 * column_tiles>, row_tiles>().multiply_queries_keys(
          sums, left, right_rows);
    }
  }

  // A warp gives the other what that needs where that will put its p' and ds'.
  __device__ void multiply_in_pair(Scores& scores, Scores& gradients, int stage, int first) {
    const bool has_scores = side() % 2 == 0;  // else gradients, of the second half of the queries
    const int first_of_pair = has_scores ? first : first - columns;
    float both[row_tiles][2 * columns / 8][4];
    clear(both);
    if (has_scores) {
      multiply_keys_queries<2 * columns>(
          both, queries_at(stage) + first_of_pair * Layout::row_bytes);
      give_half(both, columns / 8, first_of_pair + columns);
    } else {
      multiply_values_douts<2 * columns>(
          both, douts_at(stage) + first_of_pair * LayoutV::row_bytes);
      give_half(both, 0, first_of_pair);
    }
    ptx::barrier_sync_aligned(1 + warp / 2, 64);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
        unsigned taken[4];
        ptx::ld_shared_v4(taken, place_of_given(i, j, first));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float other = __uint_as_float(taken[c]);
          scores[i][j][c] = has_scores ? both[i][j][c] : other;
          gradients[i][j][c] = has_scores ? other : both[i][j + columns / 8][c];
        }
      }
    }
    // All have taken before the first puts its p' there.
    __syncwarp();
  }

  __device__ void give_half(const float (&both)[row_tiles][2 * columns / 8][4], int begin,
                            int first) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
        unsigned given[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) given[c] = __float_as_uint(both[i][begin + j][c]);
        ptx::st_shared_v4(place_of_given(i, j, first), given);
      }
    }
  }

  // Half of the lanes find it in p', the others in ds', of the queries from `first` on.
  __device__ unsigned place_of_given(int i, int j, int first) const {
    const int key = key_warp() * warp_keys + 16 * i + lane % 16;
    return (lane < 16 ? p_at() : ds_at()) + Pairs::Layout::offset(key, first / 8 + j);
  }

  // Of float32: p is made in units of 2^-14, below 2^15 even where lse is rounded down, and ds in
  // one that its bound gives: p (|dp| + |delta|) is at most what norms of rows and the largest
  // delta say. Warps so need not look for the largest before they split theirs, but where sinks may
  // leave next to nothing to all keys, and of ds where slopes of scores have no bound: there second
  // units come on top of these.
  struct Units {
    float score;             // of products of q and k
    float gradient;          // of those of dout and v, with p's, over that of ds
    float delta;             // p's over that of ds
    float of_q, of_k, of_v;  // of what is added to dq, dk and dv
    static constexpr float log2_of_p = 14;
    static constexpr float unit_of_p = 0x1p-14f;

    __device__ Terms of(const Terms& terms) const {
      if constexpr (!in_pieces) return terms;
      return {terms.lse_log2 - log2_of_p, terms.delta * delta};
    }
  };
  __device__ Units units(int stage) const {
    if constexpr (!in_pieces) return {};
    const auto& queries = *reinterpret_cast<const QueryScales*>(
        memory + (queries_at(ptx::opaque(stage)) - shared) + Images::OfQueries::scales_at);
    const auto& keys = *reinterpret_cast<const KeyScales*>(memory + Images::OfKeys::scales_at);
    const Unit ds = Unit::of(fma(queries.dout_norm, keys.v_norm, queries.delta));
    const float inverse = ds.inverse * Units::unit_of_p;
    Units units;
    units.score = queries.q * keys.k;
    units.gradient = keys.v * inverse * queries.dout;
    units.delta = inverse;
    units.of_q = ds.size * keys.k;
    units.of_k = ds.size * queries.q;
    units.of_v = queries.dout * Units::unit_of_p;
    return units;
  }

  // Second units: of a warp's keys, and of `columns` queries from `first` on. Those of p and those
  // of ds begin at
  static constexpr int first_of_p = 0;
  static constexpr int first_of_ds = finds_p ? units_of_each : 0;
  __device__ float& second_unit(int begin, int key_warp, int first) {
    return reinterpret_cast<float*>(memory + units_at)[begin + key_warp * (Br / columns) +
                                                       first / columns];
  }

  // Brings what the warp has made into a unit that it finds, and tells others; without Finds 1.
  template <bool Finds>
  __device__ float take_unit(Scores& scores, int begin, bool tells, int first) {
    if constexpr (!Finds) return 1;
    float top = 0;
    for_each(scores, [&](float& x) {
      const float size = fabsf(x);
      if (size < SoftmaxMath<float>::infinity()) top = fmaxf(top, size);
    });
    const Unit unit = Unit::of(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top))));
    for_each(scores, [&](float& x) { x *= unit.inverse; });
    if (tells && lane == 0) second_unit(begin, key_warp(), first) = unit.size;
    return unit.size;
  }

  template <class Visit>
  __device__ static void for_each(Scores& scores, Visit visit) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) visit(scores[i][j][c]);
      }
    }
  }

  __device__ static void scale(Scores& scores, Scores& gradients, const Units& unit) {
    if (Config::Mods::changes_scores) for_each(scores, [&](float& x) { x *= unit.score; });
    for_each(gradients, [&](float& x) { x *= unit.gradient; });
  }

  template <bool Masked>
  __device__ void weigh(Scores& scores, Scores& gradients, int stage, int head, int tile,
                        int first) {
    const int column = first + lane % 4 * 2;  // of the lane's first element in the tile
    const Terms* terms =
        reinterpret_cast<const Terms*>(memory + (terms_at(stage) - shared)) + column;
    const Units unit = units(stage);
    constexpr bool of_scaled = in_pieces && !Config::Mods::changes_scores;
    const Weigh<Config, columns / 4, 2 * row_tiles> weigh = {
        p, mask, at, work.batch, head, of_scaled ? scale_log2 * unit.score : scale_log2};
    const auto element = [](auto& of, int r, int n) -> float& {
      return of[n / 2][r / 2][2 * (n % 2) + r % 2];
    };
    if constexpr (in_pieces) scale(scores, gradients, unit);
    weigh.template run<Masked>(
        [&](int r) { return tile * Br + column + r / 2 * 8 + r % 2; },
        work.begin + key_warp() * warp_keys + lane / 4,
        [&](int r) { return unit.of(terms[r / 2 * 8 + r % 2]); },
        [&](int r, int n) -> float& { return element(scores, r, n); },
        [&](int r, int n) -> float& { return element(gradients, r, n); },
        [](int n) { return n / 2 * 16 + n % 2 * 8; });
    if constexpr (Config::Mods::hides_pairs) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) seen[i][c / 2] += scores[i][j][c];
        }
      }
    }
  }

  // What the queries of the warps that share its keys add.
  __device__ void add_others(int stage) {
#pragma unroll
    for (int other = 1; other < side_warps; ++other) {
#pragma unroll
      for (int pass = 0; pass < passes; ++pass) {
        const int first = (pass * side_warps + (side() + other) % side_warps) * columns;
        Left left;
        if constexpr (wants_v) {
          read(left, p_at(), first);
          float factor = units(stage).of_v;
          if constexpr (finds_p) factor *= second_unit(first_of_p, key_warp(), first);
          add_product<ColumnsV, LayoutV>(sums_v, left, douts_at(stage) + first * LayoutV::row_bytes,
                                         factor);
        }
        if constexpr (wants_k) {
          read(left, ds_at(), first);
          float factor = units(stage).of_k;
          if constexpr (finds_ds) factor *= second_unit(first_of_ds, key_warp(), first);
          add_product<Columns, Layout>(sums_k, left, queries_at(stage) + first * Layout::row_bytes,
                                       factor);
        }
      }
    }
  }

  __device__ void add_query_gradients(int stage, int head, int tile, int turn) {
    const TurnOfWarp<Fragments> own(
        QuerySums<Config>(p).template sums<Fragments::floats>(p, at, work.batch, head, tile),
        turn);
    typename TurnOfWarp<Fragments>::Sums sums;
    const unsigned right = ColumnsOfSums::lane_address(keys_at(), warp % sum_column_warps);
    if constexpr (in_pieces) {
      constexpr int depth = finds_ds ? row_tiles : Bc % 32 == 0 ? 2 : 1;  // summed alone
      clear(sums);
#pragma unroll 1
      for (int key = 0; key < Bc; key += 16 * depth) {
        LeftStep<sum_row_tiles> left[depth][2];
#pragma unroll
        for (int step = 0; step < depth; ++step) read_ds(left[step], key + 16 * step);
        ColumnsOfSums::add_product(sums, left, right + key * Layout::row_bytes, [&](int i) {
          if constexpr (!finds_ds) return 1.0f;
          return second_unit(first_of_ds, key / warp_keys, 16 * (first_sum_tile() + i));
        });
      }
      own.add(sums, units(stage).of_q);
    } else {
      own.begin(sums);
#pragma unroll
      for (int key = 0; key < Bc; key += 16) {
        LeftStep<sum_row_tiles> left[1];
        read_ds(left, key);
        ColumnsOfSums::multiply(sums, left[0], right + key * Layout::row_bytes);
      }
      own.end(sums);
    }
  }

  // ds of the warp's rows of dq, and of 16 keys.
  __device__ void read_ds(LeftStep<sum_row_tiles> (&left)[pieces], int key) {
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      Pairs::read_transposed(left[piece], ds_at(), key,
                             piece * Br / 16 + first_sum_tile());
    }
  }

  // Of dq, the first of the warp's tiles of 16 rows.
  __device__ int first_sum_tile() const { return warp / sum_column_warps * sum_row_tiles; }

  // Whether a key is seen at all: of one that is not, the sums hold 0 times the queries.
  __device__ bool is_seen(int i, int half) {
    const int row = key_warp() * warp_keys + 16 * i + 8 * half + lane / 4;
    const int key = work.begin + row;
    bool found = mask.first_row(key, at.seqlen_q) < mask.last_row(key, at.seqlen_q);
    if constexpr (Config::Mods::hides_pairs) {
      found = found && reinterpret_cast<const int*>(memory + stages_at)[row] != 0;
    }
    return found;
  }

  // Where modifications hide pairs, warps that share keys tell each other which they saw.
  __device__ void share_seen() {
    int* flags = reinterpret_cast<int*>(memory + stages_at);
    static_assert(stages * stage_bytes >= Bc * int(sizeof(int)), "place for a flag of each key");
    for (int i = threadIdx.x; i < Bc; i += threads) flags[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (seen[i][half] != 0) {
          flags[key_warp() * warp_keys + 16 * i + 8 * half + lane / 4] = 1;
        }
      }
    }
    __syncthreads();
  }

  __device__ void finish() {
    const float scale = signed_scale<Config, float>(p);
    if constexpr (Config::Mods::hides_pairs) share_seen();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool found = is_seen(i, half);
        scale_row<2 * Columns::steps>(sums_k[i][0] + 2 * half, scale);
        if (!found) {
          fill_row_from<2 * Columns::steps>(sums_k[i][0] + 2 * half, 0, 0);
          fill_row_from<2 * ColumnsV::steps>(sums_v[i][0] + 2 * half, 0, 0);
        }
      }
    }
    if constexpr (wants_k) write<Config::head_dim, Layout, Columns>(p.dk, sums_k, keys_at());
    if constexpr (wants_v) write<Config::head_dim_v, LayoutV, ColumnsV>(p.dv, sums_v, values_at());
  }

  // A gradient of its inputs' type goes through shared memory, so that global memory sees whole
  // chunks. Nobody reads what lay at `target` any more.
  template <int Dim, class TileLayout, class OwnColumns, class Accumulators>
  __device__ void write(const Tensor& tensor, const Accumulators& of, unsigned target) {
    Gradient* output = tensor.head<Gradient>(at.k_batch, work.head) +
                       (int64(at.k_first) + work.begin) * tensor.row_stride;
    const int left = at.seqlen_k - work.begin;
    constexpr int column_tiles = 2 * OwnColumns::steps;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = key_warp() * warp_keys + 16 * i + 8 * half + lane / 4;
        if constexpr (sizeof(Gradient) != sizeof(Piece)) {
          if (row >= left) continue;
          write_row<column_tiles, Dim>(
              output + row * tensor.row_stride, of[i][0] + 2 * half,
              [&](int j, int c) { return OwnColumns::column(j, side()) + c; });
        } else {
#pragma unroll
          for (int j = 0; j < column_tiles; ++j) {
            const int chunk = OwnColumns::column(j, side()) / 8;
            ptx::st_shared(target + TileLayout::offset(row, chunk) + lane % 4 * 4,
                           pack<Piece>(of[i][j][2 * half], of[i][j][2 * half + 1]));
          }
        }
      }
    }
    if constexpr (sizeof(Gradient) == sizeof(Piece)) {
      __syncthreads();
      constexpr int elements = TileLayout::chunk_elements;
#pragma unroll 4
      for (int place = threadIdx.x; place < Bc * TileLayout::chunks; place += threads) {
        const int row = place / TileLayout::chunks;
        const int chunk = place % TileLayout::chunks;
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
  // The first keys of a causal mask are seen by most queries.
  const GradientWork work = find_gradient_work<Config, Config::Bc, true, false>(p, blockIdx.x);
  const Sequence at = sequence_of<Config>(p, work.batch);
  if (work.begin >= at.seqlen_k) return;
  MmaGradients<Config>(p, work, at, shared_memory).run();
}

template <class Config>
__device__ void mma_tile_images(const GradientParams& p) {
  make_tile_images<Config>(p);
}

template <class Config>
__device__ void mma_query_gradients(const GradientParams& p) {
  using Tile = QueryGradientTile<Config, typename MmaGradients<Config>::Fragments>;
  __shared__ typename Tile::Shared shared;
  Tile::write(p, shared);
}

#endif  // __CUDA_ARCH__ >= 800
