// Gradients of attention on CUDA cores, for every dtype and architecture. One template makes two
// kernels. A CTA of either owns the gradient rows that it sums, so no CTAs add to the same memory:
//
//   kernel   CTA owns   iterates over
//   keys:    k, v       q, dout         S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
//   queries: q, dout    k, v            S = Q K^T,   dP = dO V^T,   dQ += dS K
#include "backward/params.cuh"
#include "backward/preprocess/preprocess.cuh"
#include "backward/simt/products.cuh"
#include "backward/softmax_backward.cuh"
#include "backward/tile_coord.cuh"
#include "score/mask.cuh"

template <class Config, bool OfKv>
struct SimtGradients {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using T = Accumulator<Element>;
  static constexpr int rows = OfKv ? Config::Bc : Config::Br;
  static constexpr int columns = OfKv ? Config::Br : Config::Bc;
  using Products = SimtProducts<Element, rows, columns>;
  static constexpr int side = Products::side;
  static constexpr int rows_per_thread = Products::rows_per_thread;
  static constexpr int columns_per_thread = Products::columns_per_thread;
  static constexpr int dims_per_thread = Products::dims_per_thread;
  static constexpr int slices = ceil_div(Config::head_dim, Products::slice);
  // Whether pairs in a tile may be masked.
  static constexpr bool may_mask_pairs = Config::causal || Config::modified;
  static constexpr int slices_v = ceil_div(Config::head_dim_v, Products::slice);

  struct Shared {
    typename Products::Shared operands;
    T p[rows * (columns + 1)];
    T ds[rows * (columns + 1)];
  };
  static_assert(sizeof(Shared) == Config::shared_memory, "as the host planned");

  const GradientParams& p;
  const GradientTileCoord coord;
  const Sequence sequence;
  const Mask<Config> mask;
  Shared& shared;
  const T scale_log2;
  const int x = Products::x();
  const int y = Products::y();

  T scores[rows_per_thread][columns_per_thread];     // S, then P
  T gradients[rows_per_thread][columns_per_thread];  // dP, then dS
  T sums[slices][rows_per_thread][dims_per_thread];  // dk, or dq
  T dv_sums[slices_v][rows_per_thread][dims_per_thread];
  T p_sums[rows_per_thread];  // row sums of P, to detect rows whose pairs are all masked

  __device__ SimtGradients(const GradientParams& p, const GradientTileCoord& coord,
                           const Sequence& sequence, Shared& shared)
      : p(p),
        coord(coord),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        shared(shared),
        scale_log2(signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e) {}

  __device__ void run() {
    clear(sums);
    clear(dv_sums);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) p_sums[i] = 0;
    const int stop = min(coord.begin + rows, row_count());
    const int group = p.heads_q / p.heads_kv;
    if constexpr (OfKv) {
      const QueryTileRange tiles =
          query_tile_range<columns>(mask, coord.begin, stop, sequence.seqlen_q);
      for (int head = coord.head * group; head < (coord.head + 1) * group; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
          process_tile(keys(p.k, coord.head), keys(p.v, coord.head), queries(p.q, head),
                       queries(p.dout, head), head, tile * columns);
        }
      }
    } else {
      const KvTileRange tiles = kv_tile_range<columns, false>(mask, coord.begin, stop, 0, 1);
      const int head_kv = coord.head / group;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        process_tile(queries(p.q, coord.head), queries(p.dout, coord.head), keys(p.k, head_kv),
                     keys(p.v, head_kv), coord.head, tile * columns);
      }
    }
    finish();
  }

 private:
  using Rows = HeadRows<Element>;

  template <int Count>
  __device__ static void clear(T (&values)[Count][rows_per_thread][dims_per_thread]) {
#pragma unroll
    for (int s = 0; s < Count; ++s) {
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
        for (int d = 0; d < dims_per_thread; ++d) values[s][i][d] = 0;
      }
    }
  }

  __device__ int row_count() const { return OfKv ? sequence.seqlen_k : sequence.seqlen_q; }
  __device__ Rows queries(const Tensor& tensor, int head) const {
    return query_rows<Element>(tensor, sequence, head);
  }
  __device__ Rows keys(const Tensor& tensor, int head) const {
    return key_rows<Element>(tensor, sequence, head);
  }

  // Processes one tile of columns: computes P and dS, and adds their products to the sums.
  __device__ void process_tile(Rows first, Rows first_v, Rows second, Rows second_v, int head,
                               int column) {
    Products::template multiply<Config::head_dim>(scores, shared.operands, first, coord.begin,
                                                  second, column);
    Products::template multiply<Config::head_dim_v>(gradients, shared.operands, first_v,
                                                    coord.begin, second_v, column);
    unsigned kept = ~0u;  // a bit for each pair of the thread
    if constexpr (Config::dropout) kept = drop_dp(head, column + x);
    softmax_backward(head, column + x, kept);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < columns_per_thread; ++j) {
        const int index = (y + i * side) * (columns + 1) + x + j * side;
        shared.p[index] = keeps(kept, i, j) ? scores[i][j] : T(0);
        shared.ds[index] = gradients[i][j];
        if constexpr (Config::Mods::masks_pairs) p_sums[i] += scores[i][j];
      }
    }
    Products::template add<Config::head_dim, may_mask_pairs>(sums, shared.operands, shared.ds,
                                                             second, column);
    if constexpr (OfKv) {
      Products::template add<Config::head_dim_v, may_mask_pairs>(dv_sums, shared.operands, shared.p,
                                                                 second_v, column);
    }
  }

  // Sets dP of the pairs that dropout drops to 0. Returns a bit for each pair, set if it is kept.
  __device__ unsigned drop_dp(int head, int column) {
    static_assert(rows_per_thread * columns_per_thread <= 32, "a bit for each pair");
    const DropoutNumbers numbers = dropout_numbers<Config>(p);
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < columns_per_thread; ++j) {
        const int row = coord.begin + y + i * side, other = column + j * side;
        const bool keeps = numbers.keeps(coord.batch, head, OfKv ? other : row, OfKv ? row : other);
        kept |= unsigned(keeps) << (i * columns_per_thread + j);
        if (!keeps) gradients[i][j] = 0;
      }
    }
    return kept;
  }

  __device__ static bool keeps(unsigned kept, int i, int j) {
    return !Config::dropout || kept >> (i * columns_per_thread + j) & 1;
  }

  // Converts S and dP to P and dS. `column` is the thread's first column. `kept` has a bit for each
  // pair.
  __device__ void softmax_backward(int head, int column, unsigned kept) {
    const auto* row_stats_of_head =
        row_stats<Config>(p) + lse_index<Config>(p, sequence, head, 0);
    const auto stats = [&](int row) {
      return row < sequence.seqlen_q ? row_stats_of_head[row]
                                     : RowStats<T>{SoftmaxMath<T>::infinity(), 0};
    };
    const int row = coord.begin + y;
    const auto step = [](int n) { return n * side; };
    if constexpr (OfKv) {
      const SoftmaxBackward<Config, columns_per_thread, rows_per_thread> softmax_backward = {
          p, mask, sequence, coord.batch, head, scale_log2, kept_weight<Config, T>(p)};
      softmax_backward.template run<true>([&](int r) { return column + r * side; }, row,
                                          [&](int r) { return stats(column + r * side); },
                                          [&](int r, int n) -> T& { return scores[n][r]; },
                                          [&](int r, int n) -> T& { return gradients[n][r]; },
                                          step, [&](int r, int n) { return keeps(kept, n, r); });
    } else {
      const SoftmaxBackward<Config, rows_per_thread, columns_per_thread> softmax_backward = {
          p, mask, sequence, coord.batch, head, scale_log2, kept_weight<Config, T>(p)};
      softmax_backward.template run<true>([&](int r) { return row + r * side; }, column,
                                          [&](int r) { return stats(row + r * side); },
                                          [&](int r, int n) -> T& { return scores[r][n]; },
                                          [&](int r, int n) -> T& { return gradients[r][n]; },
                                          step, [&](int r, int n) { return keeps(kept, r, n); });
    }
  }

  // Returns whether row `i` has a visible pair. Otherwise its sums may be NaN, due to 0 times NaN.
  __device__ bool has_visible_pair(int i) const {
    const int row = coord.begin + y + i * side;
    bool is_visible;
    if constexpr (OfKv) {
      is_visible = mask.row_begin(row, sequence.seqlen_q) < mask.row_end(row, sequence.seqlen_q);
    } else {
      is_visible = mask.visible_begin(row) < mask.visible_end(row);
    }
    if constexpr (Config::Mods::masks_pairs) {
      T sum = p_sums[i];
#pragma unroll
      for (int bit = 1; bit < side; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      is_visible = is_visible && sum != 0;
    }
    return is_visible;
  }

  __device__ void finish() {
    const T scale = signed_scale<Config, T>(p);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      const bool is_visible = has_visible_pair(i);
      if constexpr (OfKv) {
        write<Config::head_dim>(p.dk, i, sums, is_visible, scale);
        write<Config::head_dim_v>(p.dv, i, dv_sums, is_visible, T(1));
      } else {
        write<Config::head_dim>(p.dq, i, sums, is_visible, scale);
      }
    }
  }

  template <int Dim, int Slices>
  __device__ void write(const Tensor& tensor, int i,
                        const T (&values)[Slices][rows_per_thread][dims_per_thread],
                        bool is_visible, T factor) {
    const int row = coord.begin + y + i * side;
    if (tensor.data == nullptr || row >= row_count()) return;
    const int batch = OfKv ? sequence.k_batch : sequence.q_batch;
    const int64 output_row = (OfKv ? sequence.k_first : sequence.q_first) + int64(row);
    Gradient* output = tensor.head<Gradient>(batch, coord.head) + output_row * tensor.row_stride;
#pragma unroll
    for (int s = 0; s < Slices; ++s) {
#pragma unroll
      for (int d = 0; d < dims_per_thread; ++d) {
        const int column = s * Products::slice + x + d * side;
        if (column < Dim) {
          output[column] = narrow<Gradient>(is_visible ? values[s][i][d] * factor : T(0));
        }
      }
    }
  }
};

template <class Config, bool OfKv>
__device__ void simt_gradients(const GradientParams& p) {
  using Kernel = SimtGradients<Config, OfKv>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const GradientTileCoord coord =
      gradient_tile_coord<Config, Kernel::rows, OfKv, !OfKv>(p, blockIdx.x);
  const Sequence sequence = sequence_of<Config>(p, coord.batch);
  if (coord.begin >= (OfKv ? sequence.seqlen_k : sequence.seqlen_q)) return;
  Kernel(p, coord, sequence, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)).run();
}

template <class Config>
__device__ void simt_key_gradients(const GradientParams& p) {
  simt_gradients<Config, true>(p);
}

template <class Config>
__device__ void simt_query_gradients(const GradientParams& p) {
  simt_gradients<Config, false>(p);
}
