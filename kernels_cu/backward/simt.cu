// Gradients of attention on the CUDA cores: every dtype, every architecture. Two kernels as in
// mma.cu, which says what rows and columns are; both are blocked products: arrays come through
// shared memory a slice of head_dim at a time, and each thread has rows and columns that are `side`
// apart.
#include "backward/params.cuh"
#include "backward/row_terms.cuh"
#include "backward/weigh.cuh"
#include "backward/work.cuh"
#include "score/mask.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"

template <class Config, bool OfKeys>
struct SimtGradients {
  using Element = typename Config::Element;
  using Gradient = typename Config::Gradient;
  using T = Accumulator<Element>;
  static constexpr int side = 16;  // threads along the rows, and along the columns
  static constexpr int threads = side * side;
  static constexpr int rows = OfKeys ? Config::Bc : Config::Br;
  static constexpr int columns = OfKeys ? Config::Br : Config::Bc;
  static constexpr int own_rows = rows / side;
  static constexpr int own_columns = columns / side;
  static_assert(rows % side == 0 && columns % side == 0, "whole rows and columns of threads");

  // One more than a slice, so that what a warp reads lies in different banks.
  static constexpr int slice = 32;
  static constexpr int slice_stride = slice + 1;
  static constexpr int slices = ceil_div(Config::head_dim, slice);
  static constexpr int slices_v = ceil_div(Config::head_dim_v, slice);
  static constexpr int own_dims = slice / side;
  static constexpr int weights_stride = columns + 1;

  struct Shared {
    T rows_slice[rows * slice_stride];
    T columns_slice[columns * slice_stride];
    T p[rows * weights_stride];
    T ds[rows * weights_stride];
  };
  static_assert(sizeof(Shared) == Config::shared_memory, "as the host planned");

  const GradientParams& p;
  const GradientWork work;
  const Sequence at;
  const Mask<Config> mask;
  Shared& shared;
  const T scale_log2;
  const int x = threadIdx.x % side;
  const int y = threadIdx.x / side;

  T scores[own_rows][own_columns];      // then p
  T gradients[own_rows][own_columns];   // of p, then of the scores
  T sums[slices][own_rows][own_dims];   // dk, or dq
  T sums_v[slices_v][own_rows][own_dims];
  T seen[own_rows];  // sums of p, where a modification may hide all of a row

  __device__ SimtGradients(const GradientParams& p, const GradientWork& work, const Sequence& at,
                           Shared& shared)
      : p(p),
        work(work),
        at(at),
        mask(at.seqlen_k, Config::sequences ? at.q_offset<Config>(p) : p.q_offset,
             {p, work.batch}),
        shared(shared),
        scale_log2(signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e) {}

  __device__ void run() {
    clear(sums);
    clear(sums_v);
#pragma unroll
    for (int i = 0; i < own_rows; ++i) seen[i] = 0;
    const int stop = min(work.begin + rows, row_count());
    const int group = p.heads_q / p.heads_kv;
    if constexpr (OfKeys) {
      const QueryTiles tiles = find_query_tiles<columns>(mask, work.begin, stop, at.seqlen_q);
      for (int head = work.head * group; head < (work.head + 1) * group; ++head) {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
          visit({keys(p.k, work.head), p.k.row_stride}, {keys(p.v, work.head), p.v.row_stride},
                {queries(p.q, head), p.q.row_stride}, {queries(p.dout, head), p.dout.row_stride},
                head, tile);
        }
      }
    } else {
      const KeyTiles tiles = find_key_tiles<columns, false>(mask, work.begin, stop, 0, 1);
      const int head_kv = work.head / group;
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        visit({queries(p.q, work.head), p.q.row_stride},
              {queries(p.dout, work.head), p.dout.row_stride}, {keys(p.k, head_kv), p.k.row_stride},
              {keys(p.v, head_kv), p.v.row_stride}, work.head, tile);
      }
    }
    finish();
  }

 private:
  struct Rows {
    const Element* begin;
    int64 stride;
  };

  template <int Count>
  __device__ static void clear(T (&values)[Count][own_rows][own_dims]) {
#pragma unroll
    for (int s = 0; s < Count; ++s) {
#pragma unroll
      for (int i = 0; i < own_rows; ++i) {
#pragma unroll
        for (int d = 0; d < own_dims; ++d) values[s][i][d] = 0;
      }
    }
  }

  __device__ int row_count() const { return OfKeys ? at.seqlen_k : at.seqlen_q; }
  __device__ int column_count() const { return OfKeys ? at.seqlen_q : at.seqlen_k; }
  // Where a head's rows of q or dout begin, and those of k or v.
  __device__ const Element* queries(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(at.q_batch, head) + at.q_first * tensor.row_stride;
  }
  __device__ const Element* keys(const Tensor& tensor, int head) const {
    return tensor.head<const Element>(at.k_batch, head) + at.k_first * tensor.row_stride;
  }

  // One tile of columns: s and dp from the rows and columns, and what they add to the sums.
  __device__ void visit(Rows first, Rows first_v, Rows second, Rows second_v, int head, int tile) {
    multiply<Config::head_dim>(scores, first, second, tile);
    multiply<Config::head_dim_v>(gradients, first_v, second_v, tile);
    weigh(head, tile);
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
#pragma unroll
      for (int j = 0; j < own_columns; ++j) {
        const int place = (y + i * side) * weights_stride + x + j * side;
        shared.p[place] = scores[i][j];
        shared.ds[place] = gradients[i][j];
        if constexpr (Config::Mods::hides_pairs) seen[i] += scores[i][j];
      }
    }
    add<Config::head_dim>(sums, shared.ds, second, tile);
    if constexpr (OfKeys) add<Config::head_dim_v>(sums_v, shared.p, second_v, tile);
  }

  // A slice of Dim columns of some rows, zeros where there are none. What was there before is read
  // by nobody any more.
  template <int Count, int Dim>
  __device__ static void load(T (&target)[Count * slice_stride], const Rows& source, int first,
                              int end, int begin_dim) {
    for (int i = threadIdx.x; i < Count * slice; i += threads) {
      const int row = first + i / slice, d = begin_dim + i % slice;
      const bool is_there = row < end && d < Dim;
      target[i / slice * slice_stride + i % slice] =
          is_there ? widen(source.begin[row * source.stride + d]) : T(0);
    }
  }

  template <int Dim>
  __device__ void multiply(T (&product)[own_rows][own_columns], const Rows& first,
                           const Rows& second, int tile) {
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
#pragma unroll
      for (int j = 0; j < own_columns; ++j) product[i][j] = 0;
    }
#pragma unroll 1
    for (int begin = 0; begin < Dim; begin += slice) {
      __syncthreads();
      load<rows, Dim>(shared.rows_slice, first, work.begin, row_count(), begin);
      load<columns, Dim>(shared.columns_slice, second, tile * columns, column_count(), begin);
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < slice; ++d) {
        T left[own_rows];
#pragma unroll
        for (int i = 0; i < own_rows; ++i) {
          left[i] = shared.rows_slice[(y + i * side) * slice_stride + d];
        }
#pragma unroll
        for (int j = 0; j < own_columns; ++j) {
          const T right = shared.columns_slice[(x + j * side) * slice_stride + d];
#pragma unroll
          for (int i = 0; i < own_rows; ++i) product[i][j] = fma(left[i], right, product[i][j]);
        }
      }
    }
  }

  // of += weights times columns, each tile's share summed alone: long sums lose less to rounding.
  template <int Dim, int Slices>
  __device__ void add(T (&of)[Slices][own_rows][own_dims], const T* weights, const Rows& second,
                      int tile) {
#pragma unroll
    for (int s = 0; s < Slices; ++s) {
      __syncthreads();
      load<columns, Dim>(shared.columns_slice, second, tile * columns, column_count(), s * slice);
      __syncthreads();
      T share[own_rows][own_dims] = {};
#pragma unroll 4
      for (int c = 0; c < columns; ++c) {
        T right[own_dims];
#pragma unroll
        for (int d = 0; d < own_dims; ++d) {
          right[d] = shared.columns_slice[c * slice_stride + x + d * side];
        }
#pragma unroll
        for (int i = 0; i < own_rows; ++i) {
          const T left = weights[(y + i * side) * weights_stride + c];
#pragma unroll
          for (int d = 0; d < own_dims; ++d) share[i][d] = fma(left, right[d], share[i][d]);
        }
      }
#pragma unroll
      for (int i = 0; i < own_rows; ++i) {
#pragma unroll
        for (int d = 0; d < own_dims; ++d) of[s][i][d] += share[i][d];
      }
    }
  }

  __device__ void weigh(int head, int tile) {
    const auto* of_rows = row_terms<Config>(p) + first_row_of_head(p, at, head);
    const auto terms = [&](int row) {
      return row < at.seqlen_q ? of_rows[row] : RowTerms<T>{SoftmaxMath<T>::infinity(), 0};
    };
    const int row = work.begin + y, column = tile * columns + x;
    const auto step = [](int n) { return n * side; };
    if constexpr (OfKeys) {
      const Weigh<Config, own_columns, own_rows> weigh = {p, mask, at, work.batch, head, scale_log2};
      weigh.template run<true>([&](int r) { return column + r * side; }, row,
                               [&](int r) { return terms(column + r * side); },
                               [&](int r, int n) -> T& { return scores[n][r]; },
                               [&](int r, int n) -> T& { return gradients[n][r]; }, step);
    } else {
      const Weigh<Config, own_rows, own_columns> weigh = {p, mask, at, work.batch, head, scale_log2};
      weigh.template run<true>([&](int r) { return row + r * side; }, column,
                               [&](int r) { return terms(row + r * side); },
                               [&](int r, int n) -> T& { return scores[r][n]; },
                               [&](int r, int n) -> T& { return gradients[r][n]; }, step);
    }
  }

  // Whether a row has a pair at all: of one without, the sums hold 0 times what others see.
  __device__ bool is_seen(int i) const {
    const int row = work.begin + y + i * side;
    bool found;
    if constexpr (OfKeys) {
      found = mask.first_row(row, at.seqlen_q) < mask.last_row(row, at.seqlen_q);
    } else {
      found = mask.visible_begin(row) < mask.visible_end(row);
    }
    if constexpr (Config::Mods::hides_pairs) {
      T sum = seen[i];
#pragma unroll
      for (int bit = 1; bit < side; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      found = found && sum != 0;
    }
    return found;
  }

  __device__ void finish() {
    const T scale = signed_scale<Config, T>(p);
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
      const bool found = is_seen(i);
      if constexpr (OfKeys) {
        write<Config::head_dim>(p.dk, at.k_batch, at.k_first, i, sums, found, scale);
        write<Config::head_dim_v>(p.dv, at.k_batch, at.k_first, i, sums_v, found, T(1));
      } else {
        write<Config::head_dim>(p.dq, at.q_batch, at.q_first, i, sums, found, scale);
      }
    }
  }

  template <int Dim, int Slices>
  __device__ void write(const Tensor& tensor, int batch, int first_row, int i,
                        const T (&of)[Slices][own_rows][own_dims], bool found, T factor) {
    const int row = work.begin + y + i * side;
    if (tensor.data == nullptr || row >= row_count()) return;
    Gradient* output = tensor.head<Gradient>(batch, work.head) +
                       (first_row + int64(row)) * tensor.row_stride;
#pragma unroll
    for (int s = 0; s < Slices; ++s) {
#pragma unroll
      for (int d = 0; d < own_dims; ++d) {
        const int column = s * slice + x + d * side;
        if (column < Dim) output[column] = narrow<Gradient>(found ? of[s][i][d] * factor : T(0));
      }
    }
  }
};

template <class Config, bool OfKeys>
__device__ void simt_gradients(const GradientParams& p) {
  using Kernel = SimtGradients<Config, OfKeys>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int heads = OfKeys ? p.heads_kv : p.heads_q;
  const int section = OfKeys ? p.section_heads / (p.heads_q / p.heads_kv) : p.section_heads;
  const GradientWork work = find_gradient_work<Kernel::rows, !OfKeys>(
      OfKeys ? p.seqlen_k : p.seqlen_q, p.batch, heads, section, blockIdx.x);
  const Sequence at = sequence_of<Config>(p, work.batch);
  if (work.begin >= (OfKeys ? at.seqlen_k : at.seqlen_q)) return;
  Kernel(p, work, at, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)).run();
}

template <class Config>
__device__ void simt_key_gradients(const GradientParams& p) {
  simt_gradients<Config, true>(p);
}

template <class Config>
__device__ void simt_query_gradients(const GradientParams& p) {
  simt_gradients<Config, false>(p);
}
