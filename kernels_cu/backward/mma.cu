// Gradients of attention on tensor cores, sm_80 and newer: float16, bfloat16, and float32 by three
// TF32 products.
//
// FlashAttention-2 (Dao 2023, algorithm 2) in two kernels, each of which owns the rows that it
// sums up, so that nothing is added in memory and the same inputs give the same bits:
//
//   rows of keys:     dv += p' dout, dk += ds' q   over the tiles of queries, of all query heads
//   rows of queries:  dq += ds k                   over the tiles of keys
//
// Both make p and ds anew, seven products of rows and columns in all where five would do. As in
// forward a warp owns 16 or 32 rows, and p and ds never leave its registers. Where those do not
// hold dk and dv together, a kernel has dk and another dv. All are one text: what stays is called
// rows, what streams by columns.
//
//             rows         columns
//   keys:     k, v         q, dout     s' = k q',  dp' = v dout'
//   queries:  q, dout      k, v        s = q k',   dp = dout v'
#include "backward/params.cuh"
#include "backward/row_terms.cuh"
#include "backward/weigh.cuh"
#include "backward/work.cuh"
#include "ptx/base.cuh"
#include "score/mask.cuh"
#include "tile/access.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"
#include "tile/products_tf32x3.cuh"

#if __CUDA_ARCH__ >= 800

// Operands of both products of a tile have one layout: of floats whole groups of 32 columns.
template <class Element>
struct GradientProductsOf {
  static constexpr int unit = 16;
  template <class Config, int row_tiles>
  using type = Products16Bit<Config, row_tiles>;
};
template <>
struct GradientProductsOf<float> {
  static constexpr int unit = 32;
  template <class Config, int row_tiles>
  using type = ProductsTf32x3<Config, row_tiles>;
};

// What a kernel sums up.
enum class Sums { of_keys_and_values, of_keys, of_values, of_queries };

template <class Config, Sums Kind>
struct MmaGradients {
  static constexpr bool OfKeys = Kind != Sums::of_queries;
  // Whether dk or dq is among them, and whether dv is.
  static constexpr bool from_ds = Kind != Sums::of_values;
  static constexpr bool from_p = Kind == Sums::of_keys_and_values || Kind == Sums::of_values;
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using Kinds = GradientProductsOf<Element>;
  static constexpr int rows = OfKeys ? Config::Bc : Config::dq_Br;
  static constexpr int columns = OfKeys ? Config::Br : Config::dq_Bc;
  static constexpr int warps = OfKeys ? Config::warps : Config::dq_warps;
  static constexpr int threads = 32 * warps;
  static constexpr int warp_rows = rows / warps;
  static constexpr int row_tiles = warp_rows / 16;
  static_assert(warp_rows == 16 || warp_rows == 32, "a warp owns one or two tiles of 16 rows");
  static_assert(rows % warps == 0 && columns % 16 == 0, "tiles are whole fragments");

  static constexpr int dim = round_up(Config::head_dim, Kinds::unit);
  static constexpr int dim_v = round_up(Config::head_dim_v, Kinds::unit);
  template <int Dim, int DimOut>
  struct ProductConfig {
    using Element = typename Config::Element;
    static constexpr int Bc = columns;
    static constexpr int head_dim = Dim;
    static constexpr int head_dim_v = DimOut;
    static constexpr bool q_in_registers = false;
  };
  // s from q and k, and what p is multiplied by; dp from dout and v, and what ds is multiplied by.
  using OfScores = typename Kinds::template type<ProductConfig<dim, dim_v>, row_tiles>;
  using OfWeights = typename Kinds::template type<ProductConfig<dim_v, dim>, row_tiles>;
  using Layout = typename OfScores::KeyLayout;
  using LayoutV = typename OfScores::ValueLayout;
  static_assert(Layout::row_bytes == OfWeights::ValueLayout::row_bytes, "one layout of q and k");
  static_assert(LayoutV::row_bytes == OfWeights::KeyLayout::row_bytes, "and one of v and dout");

  // Shared memory: both arrays of rows, whose places the results take at the end, then two stages
  // of both arrays of columns, and of the terms of query columns.
  using Terms = RowTerms<float>;
  static constexpr int row_bytes = Layout::row_bytes + LayoutV::row_bytes;
  static constexpr int terms_bytes = OfKeys ? columns * int(sizeof(Terms)) : 0;
  static constexpr int stage_bytes = columns * row_bytes + terms_bytes;
  static constexpr int shared_memory = rows * row_bytes + 2 * stage_bytes;
  static_assert(shared_memory == (OfKeys ? Config::shared_memory : Config::dq_shared_memory),
                "as the host planned");

  template <int Rows, int Columns, class TileLayout>
  using Copy = RowCopy<TileLayout, Element, Rows, Columns, threads, Config::alignment>;

  const GradientParams& p;
  const GradientWork work;
  const Sequence at;
  const Mask<Config> mask;
  unsigned char* const memory;
  const unsigned shared;
  const float scale_log2;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  // The tiles of columns that the rows visit, and those of them that need no mask.
  int begin;
  int full_begin;
  int full_end;
  int end;

  OfScores of_scores;
  OfWeights of_weights;
  typename OfScores::Scores scores;      // then p
  typename OfWeights::Scores gradients;  // of p, then of the scores
  typename OfWeights::Output sums;       // dk, or dq
  typename OfScores::Output sums_v;      // dv
  float seen[row_tiles][2];              // sums of p, where a modification may hide all of a row

  __device__ MmaGradients(const GradientParams& p, const GradientWork& work, const Sequence& at,
                          unsigned char* memory)
      : p(p),
        work(work),
        at(at),
        mask(mask_of<Config>(p, at, work.batch)),
        memory(memory),
        shared(ptx::shared_address(memory)),
        scale_log2(signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e) {
    const int stop = min(work.begin + rows, row_count());
    if constexpr (OfKeys) {
      const QueryTiles tiles =
          find_query_tiles<columns>(mask, work.begin, stop, at.seqlen_q);
      begin = tiles.begin, end = tiles.end;
      full_begin = tiles.full_begin, full_end = tiles.full_end;
      // Rows behind the last are no rows to modifications.
      if (Config::modified && at.seqlen_q % columns != 0) {
        full_end = min(full_end, at.seqlen_q / columns);
      }
    } else {
      const KeyTiles tiles = find_key_tiles<columns, false>(mask, work.begin, stop, 0, 1);
      begin = tiles.begin, end = tiles.end;
      full_begin = Config::window_left ? mask.template first_full_tile<columns>(stop - 1) : begin;
      full_end = tiles.full_end;
    }
  }

  __device__ int row_count() const { return OfKeys ? at.seqlen_k : at.seqlen_q; }
  __device__ int column_count() const { return OfKeys ? at.seqlen_q : at.seqlen_k; }
  __device__ int group() const { return p.heads_q / p.heads_kv; }
  __device__ int first_head() const { return OfKeys ? work.head * group() : work.head; }

  __device__ void run() {
    if constexpr (from_ds) clear(sums);
    if constexpr (from_p) clear(sums_v);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) seen[i][0] = seen[i][1] = 0;
    if (begin < end) sweep();
    finish();
  }

 private:
  // Where a head's rows of q or dout begin, and those of k or v.
  __device__ const Element* queries(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(at.q_batch, head) + at.q_first * tensor.row_stride;
  }
  __device__ const Element* keys(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(at.k_batch, head) + at.k_first * tensor.row_stride;
  }

  __device__ void sweep() {
    const int head_kv = OfKeys ? work.head : work.head / group();
    const int left = row_count() - work.begin;
    if constexpr (OfKeys) {
      start<rows, Config::head_dim, Layout>(rows_at(), keys(p.k, head_kv), p.k, work.begin, left);
      if constexpr (from_ds) {
        start<rows, Config::head_dim_v, LayoutV>(rows_v_at(), keys(p.v, head_kv), p.v, work.begin,
                                                 left);
      }
    } else {
      start<rows, Config::head_dim, Layout>(rows_at(), queries(p.q, work.head), p.q, work.begin,
                                            left);
      start<rows, Config::head_dim_v, LayoutV>(rows_v_at(), queries(p.dout, work.head), p.dout,
                                               work.begin, left);
    }
    // Of query rows, each lane's own terms.
    Terms own[row_tiles][2];
    if constexpr (!OfKeys) {
      const Terms* terms = row_terms<Config>(p) + first_row_of_head(p, at, work.head);
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row_of(i, half);
          own[i][half] = row < at.seqlen_q ? terms[row] : Terms{SoftmaxMath<float>::infinity(), 0};
        }
      }
    }
    // One round of tiles for each query head.
    const int last_head = first_head() + (OfKeys ? group() : 1) - 1;
    load(0, first_head(), begin);
    int stage = 0;
    for (int head = first_head(); head <= last_head; ++head) {
      for (int tile = begin; tile < end; ++tile) {
        ptx::cp_async_wait_group<0>();
        // Nobody reads the tile before any more, whose place the next one takes.
        __syncthreads();
        if (tile + 1 < end) {
          load(1 - stage, head, tile + 1);
        } else if (head < last_head) {
          load(1 - stage, head + 1, begin);
        }
        if (tile < full_begin || tile >= full_end) {
          visit<true>(stage, head, tile, own);
        } else {
          visit<false>(stage, head, tile, own);
        }
        stage = 1 - stage;
      }
    }
  }

  __device__ unsigned rows_at() const { return shared; }
  __device__ unsigned rows_v_at() const { return shared + rows * Layout::row_bytes; }
  __device__ unsigned columns_at(int stage) const {
    return shared + rows * row_bytes + stage * stage_bytes;
  }
  __device__ unsigned columns_v_at(int stage) const {
    return columns_at(stage) + columns * Layout::row_bytes;
  }
  __device__ unsigned terms_at(int stage) const {
    return columns_at(stage) + columns * row_bytes;
  }

  template <int Rows, int Columns, class TileLayout>
  __device__ static void start(unsigned target, const Element* head, const Tensor& tensor,
                               int first, int left) {
    using TileCopy = Copy<Rows, Columns, TileLayout>;
    const Element* source = head + int64(first) * tensor.row_stride;
    TileCopy::template start<true>(target, TileCopy::source(source, tensor.row_stride),
                                   tensor.row_stride, left);
  }

  __device__ void load(int stage, int head, int tile) {
    const int first = tile * columns;
    const int left = column_count() - first;
    if constexpr (OfKeys) {
      start<columns, Config::head_dim, Layout>(columns_at(stage), queries(p.q, head), p.q, first,
                                               left);
      start<columns, Config::head_dim_v, LayoutV>(columns_v_at(stage), queries(p.dout, head),
                                                  p.dout, first, left);
      const Terms* terms = row_terms<Config>(p) + first_row_of_head(p, at, head) + first;
      for (int i = threadIdx.x; i < columns; i += threads) {
        ptx::cp_async<sizeof(Terms)>(terms_at(stage) + i * int(sizeof(Terms)),
                                     terms + (i < left ? i : 0), i < left ? sizeof(Terms) : 0);
      }
    } else {
      const int head_kv = head / group();
      start<columns, Config::head_dim, Layout>(columns_at(stage), keys(p.k, head_kv), p.k, first,
                                               left);
      start<columns, Config::head_dim_v, LayoutV>(columns_v_at(stage), keys(p.v, head_kv), p.v,
                                                  first, left);
    }
    ptx::cp_async_commit_group();
  }

  // The row of the sequence that the accumulators' upper (0) or lower (1) half in row tile i is of.
  __device__ int row_of(int i, int half) const {
    return work.begin + warp * warp_rows + 16 * i + 8 * half + lane / 4;
  }

  template <bool Masked>
  __device__ void visit(int stage, int head, int tile, const Terms (&own)[row_tiles][2]) {
    const int warp_row = warp * warp_rows;
    clear(scores);
    of_scores.multiply_queries_keys(scores, rows_at() + warp_row * Layout::row_bytes,
                                    columns_at(stage));
    clear(gradients);
    if constexpr (from_ds) {
      of_weights.multiply_queries_keys(gradients, rows_v_at() + warp_row * LayoutV::row_bytes,
                                       columns_v_at(stage));
    }
    weigh<Masked>(stage, head, tile, own);
    const auto nothing = [](int, int) {};
    if constexpr (from_p) {
      of_scores.multiply_probabilities_values(sums_v, scores, columns_v_at(stage), nothing);
    }
    if constexpr (from_ds) {
      of_weights.multiply_probabilities_values(sums, gradients, columns_at(stage), nothing);
    }
  }

  template <bool Masked>
  __device__ void weigh(int stage, int head, int tile, const Terms (&own)[row_tiles][2]) {
    const int first = tile * columns + lane % 4 * 2;  // column of the lane's first element
    if constexpr (OfKeys) {
      const Terms* terms =
          reinterpret_cast<const Terms*>(memory + (terms_at(stage) - shared)) + lane % 4 * 2;
      const Weigh<Config, columns / 4, 2 * row_tiles> weigh = {p,          mask, at, work.batch,
                                                               head,       scale_log2};
      const auto element = [](auto& of, int r, int n) -> float& {
        return of[n / 2][r / 2][2 * (n % 2) + r % 2];
      };
      weigh.template run<Masked>(
          [&](int r) { return first + r / 2 * 8 + r % 2; }, row_of(0, 0),
          [&](int r) { return terms[r / 2 * 8 + r % 2]; },
          [&](int r, int n) -> float& { return element(scores, r, n); },
          [&](int r, int n) -> float& { return element(gradients, r, n); },
          [](int n) { return n / 2 * 16 + n % 2 * 8; });
    } else {
      const Weigh<Config, 2 * row_tiles, columns / 4> weigh = {p,          mask, at, work.batch,
                                                               head,       scale_log2};
      const auto element = [](auto& of, int r, int n) -> float& {
        return of[r / 2][n / 2][2 * (r % 2) + n % 2];
      };
      weigh.template run<Masked>([&](int r) { return row_of(r / 2, r % 2); }, first,
                                 [&](int r) { return own[r / 2][r % 2]; },
                                 [&](int r, int n) -> float& { return element(scores, r, n); },
                                 [&](int r, int n) -> float& { return element(gradients, r, n); },
                                 [](int n) { return n / 2 * 8 + n % 2; });
    }
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

  // Whether a row has a pair at all: of one without, the sums hold 0 times what others see.
  __device__ bool is_seen(int i, int half) const {
    const int row = row_of(i, half);
    bool found;
    if constexpr (OfKeys) {
      found = mask.first_row(row, at.seqlen_q) < mask.last_row(row, at.seqlen_q);
    } else {
      found = mask.visible_begin(row) < mask.visible_end(row);
    }
    if constexpr (Config::Mods::hides_pairs) {
      // All lanes take part in the sum, found or not.
      const float sum = sum_of_lanes(seen[i][half]);
      found = found && sum != 0;
    }
    return found;
  }

  __device__ void finish() {
    const float scale = signed_scale<Config, float>(p);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool found = is_seen(i, half);
        if constexpr (from_ds) {
          scale_row<dim / 8>(sums[i][0] + 2 * half, scale);
          if (!found) fill_row_from<dim / 8>(sums[i][0] + 2 * half, 0, 0);
        }
        if constexpr (from_p) {
          if (!found) fill_row_from<dim_v / 8>(sums_v[i][0] + 2 * half, 0, 0);
        }
      }
    }
    if constexpr (from_ds) {
      write<Config::head_dim, Layout>(OfKeys ? p.dk : p.dq, of_weights, sums, rows_at());
    }
    if constexpr (from_p) {
      write<Config::head_dim_v, LayoutV>(p.dv, of_scores, sums_v, rows_v_at());
    }
  }

  // A gradient of its inputs' type goes through shared memory, each warp its own rows, so that
  // global memory sees whole chunks. `target` held rows that nobody else reads.
  template <int Columns, class TileLayout, class Products, class Accumulators>
  __device__ void write(const Tensor& tensor, const Products& products, const Accumulators& of,
                        unsigned target) {
    if (tensor.data == nullptr) return;
    const int batch = OfKeys ? at.k_batch : at.q_batch;
    const int64 first_row = (OfKeys ? at.k_first : at.q_first) + int64(work.begin);
    Gradient* output = tensor.head<Gradient>(batch, work.head) + first_row * tensor.row_stride;
    const int left = row_count() - work.begin;
    const int warp_row = warp * warp_rows;
    if constexpr (sizeof(Gradient) != sizeof(Element)) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + 16 * i + 8 * half + lane / 4;
          if (row >= left) continue;
          write_row<TileLayout::row_bytes / int(8 * sizeof(Element)), Columns>(
              output + row * tensor.row_stride, of[i][0] + 2 * half,
              [&](int j, int c) { return products.column(j, c); });
        }
      }
    } else {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          products.stage_row(of, i, half, target, warp_row + 16 * i + 8 * half + lane / 4);
        }
      }
      __syncwarp();
      constexpr int elements = TileLayout::chunk_elements;
#pragma unroll
      for (int first = 0; first < warp_rows * TileLayout::chunks; first += 32) {
        const int row = warp_row + (first + lane) / TileLayout::chunks;
        const int chunk = (first + lane) % TileLayout::chunks;
        if (row >= left) continue;
        unsigned bits[4];
        ptx::ld_shared_v4(bits, target + TileLayout::offset(row, chunk));
        store_chunk<Gradient, Config::out_alignment>(
            output + row * tensor.row_stride + chunk * elements,
            reinterpret_cast<const Vector<Gradient, elements>&>(bits),
            Columns - chunk * elements);
      }
    }
  }
};

template <class Config, Sums Kind>
__device__ void mma_gradients(const GradientParams& p) {
  using Kernel = MmaGradients<Config, Kind>;
  constexpr bool of_keys = Kernel::OfKeys;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int heads = of_keys ? p.heads_kv : p.heads_q;
  const int section = of_keys ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads;
  // Of causal masks the first keys are seen by most queries, and the last queries see most keys.
  const GradientWork work = find_gradient_work<Kernel::rows, !of_keys>(
      of_keys ? p.seqlen_k : p.seqlen_q, p.batch, heads, section, blockIdx.x);
  const Sequence at = sequence_of<Config>(p, work.batch);
  if (work.begin >= (of_keys ? at.seqlen_k : at.seqlen_q)) return;
  Kernel(p, work, at, shared_memory).run();
}

template <class Config>
__device__ void mma_key_and_value_gradients(const GradientParams& p) {
  mma_gradients<Config, Sums::of_keys_and_values>(p);
}

template <class Config>
__device__ void mma_key_gradients(const GradientParams& p) {
  mma_gradients<Config, Sums::of_keys>(p);
}

template <class Config>
__device__ void mma_value_gradients(const GradientParams& p) {
  mma_gradients<Config, Sums::of_values>(p);
}

template <class Config>
__device__ void mma_query_gradients(const GradientParams& p) {
  mma_gradients<Config, Sums::of_queries>(p);
}

#endif  // __CUDA_ARCH__ >= 800
