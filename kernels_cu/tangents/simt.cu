// Tangents of attention on CUDA cores, for every dtype and architecture. The forward pass has
// computed `out` and `lse`.
//
// A CTA owns Br query rows and iterates over the KV tiles. A dot marks a tangent:
//
//   S = Q K^T,  S. = Q. K^T + Q K.^T,  P and H from these (row.cuh),  O. += H V + P V.
#include "backward/simt/products.cuh"
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "scheduler/tile_coord.cuh"
#include "tangents/row.cuh"

template <class Config>
struct SimtTangents {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  using Products = SimtProducts<Element, Br, Bc>;
  static constexpr int side = Products::side;
  static constexpr int rows_per_thread = Products::rows_per_thread;
  static constexpr int keys_per_thread = Products::columns_per_thread;
  static constexpr int dims_per_thread = Products::dims_per_thread;
  static constexpr int slices = ceil_div(Config::head_dim_v, Products::slice);
  static constexpr bool moves_scores = Config::moves_q || Config::moves_k;
  static constexpr bool may_mask_pairs = Config::causal || Config::modified;
  using Softmax = SoftmaxBackward<Config, rows_per_thread, keys_per_thread, TangentParams>;
  using Rows = HeadRows<Element>;
  using Pairs = T[rows_per_thread][keys_per_thread];

  struct Shared {
    typename Products::Shared operands;
    T p[Br * (Bc + 1)];
    T h[Br * (Bc + 1)];
  };
  static_assert(sizeof(Shared) == Config::shared_memory, "as the host planned");

  const TangentParams& p;
  const TileCoord coord;
  const Sequence sequence;
  const Mask<Config> mask;
  Shared& shared;
  const T scale;
  const int x = Products::x();
  const int y = Products::y();

  Pairs scores;    // S, then P
  Pairs tangents;  // S., then H
  T sums[slices][rows_per_thread][dims_per_thread];
  TangentRow<T, side, false, Config::sinks> rows[rows_per_thread];

  __device__ SimtTangents(const TangentParams& p, const TileCoord& coord, const Sequence& sequence,
                          Shared& shared)
      : p(p),
        coord(coord),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, coord.batch)),
        shared(shared),
        scale(signed_scale<Config, T>(p)) {}

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      rows[i].begin(lse_log2_of<Config>(p, sequence, coord.head, row_of(i)));
    }
    process_tiles();
    if (moves_scores && __syncthreads_or(sum_rows())) {
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) rows[i].restart();
      process_tiles();
      sum_rows();
    }
    finish();
  }

 private:
  __device__ void process_tiles() {
    clear(sums);
    const KvTileRange tiles = kv_tile_range<Bc, false>(
        mask, coord.q_begin, min(coord.q_begin + Br, sequence.seqlen_q), 0, 1);
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) process_tile(tile * Bc);
  }

  // Completes the sums of the thread's rows. Returns whether one of them is inaccurate.
  __device__ bool sum_rows() {
    bool is_inaccurate = false;
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      rows[i].add_lanes();
      is_inaccurate |= rows[i].is_inaccurate();
    }
    return is_inaccurate;
  }

  __device__ static void clear(T (&values)[slices][rows_per_thread][dims_per_thread]) {
#pragma unroll
    for (int i = 0; i < slices * rows_per_thread * dims_per_thread; ++i) values[0][0][i] = 0;
  }

  __device__ int row_of(int i) const { return coord.q_begin + y + i * side; }
  __device__ Rows queries(const Tensor& tensor) const {
    return query_rows<Element>(tensor, sequence, coord.head);
  }
  __device__ Rows keys(const Tensor& tensor) const {
    return key_rows<Element>(tensor, sequence, coord.head_kv);
  }

  __device__ void process_tile(int key) {
    const auto multiply = [&](Pairs& product, const Tensor& left, const Tensor& right) {
      Products::template multiply<Config::head_dim>(product, shared.operands, queries(left),
                                                    coord.q_begin, keys(right), key);
    };
    multiply(scores, p.q, p.k);
    if constexpr (Config::moves_q) {
      multiply(tangents, p.q_tangent, p.k);
    } else {
      for_each([&](int i, int j) { tangents[i][j] = 0; });
    }
    if constexpr (Config::moves_k) {
      Pairs of_keys;
      multiply(of_keys, p.q, p.k_tangent);
      for_each([&](int i, int j) { tangents[i][j] += of_keys[i][j]; });
    }
    compute_weights(key + x);
    const DropoutNumbers numbers = dropout();
    for_each([&](int i, int j) {
      const int index = (y + i * side) * (Bc + 1) + x + j * side;
      const bool is_kept = !Config::dropout || numbers.keeps(coord.batch, coord.head, row_of(i),
                                                             key + x + j * side);
      shared.p[index] = is_kept ? scores[i][j] : T(0);
      shared.h[index] = is_kept ? tangents[i][j] : T(0);
    });
    if constexpr (moves_scores) add(shared.h, p.v, key);
    if constexpr (Config::moves_v) add(shared.p, p.v_tangent, key);
  }

  template <class Function>
  __device__ static void for_each(Function function) {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < keys_per_thread; ++j) function(i, j);
    }
  }

  __device__ DropoutNumbers dropout() const {
    if constexpr (Config::dropout) {
      return dropout_numbers<Config>(p);
    } else {
      return {};
    }
  }

  __device__ void add(const T* weights, const Tensor& values, int key) {
    Products::template add<Config::head_dim_v, may_mask_pairs>(sums, shared.operands, weights,
                                                               keys(values), key);
  }

  // Replaces S and S. by P and H. `key` is the thread's first key.
  __device__ void compute_weights(int key) {
    const Softmax softmax = {p,          mask,
                             sequence,   coord.batch,
                             coord.head, T(signed_scale<Config, double>(p) *
                                           SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<true, true>(
        [&](int r) { return row_of(r); }, key,
        [&](int r) {
          return RowStats<T>{rows[r].lse_log2, 0};
        },
        [&](int r, int n) -> T& { return scores[r][n]; }, [](int n) { return n * side; },
        [&](int r, int n, bool is_visible, bool has_one_key, T exponent, T slope) {
          T probability = is_visible ? SoftmaxMath<T>::exp2(exponent) : T(0);
          // Above the threshold, P differs from 1 by no more than its rounding error, so it is set
          // to 1. A row that attends to one key then has exactly the tangent of that key's value.
          const bool is_one = probability > softmax.threshold({rows[r].lse_log2, 0});
          if (is_one || (has_one_key && probability != 0)) probability = 1;
          scores[r][n] = probability;
          // A score of -inf also masks its pair, whose tangent may be NaN.
          tangents[r][n] = probability != 0 ? tangents[r][n] * (scale * slope) : T(0);
        },
        0, rows_per_thread);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      rows[i].template find_center<keys_per_thread>([&](int n) { return scores[i][n]; },
                                                    [&](int n) { return tangents[i][n]; });
    }
    for_each([&](int i, int j) { tangents[i][j] = rows[i].add(scores[i][j], tangents[i][j]); });
  }

  __device__ void finish() {
    const T weight = kept_weight<Config, T>(p);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
      const int row = row_of(i);
      if (row >= sequence.seqlen_q) continue;
      const T distance = rows[i].distance();
      const bool has_key = rows[i].has_key;
      if (p.lse_tangent != nullptr && x == 0) {
        static_cast<T*>(p.lse_tangent)[lse_index<Config>(p, sequence, coord.head, row)] =
            has_key ? rows[i].lse_tangent() : T(0);
      }
      const Rows primal_rows = queries(p.out);
      const Element* primal = primal_rows.begin + row * primal_rows.stride;
      Element* target = p.out_tangent.head<Element>(sequence.q_batch, coord.head) +
                        (sequence.q_first + int64(row)) * p.out_tangent.row_stride;
#pragma unroll
      for (int s = 0; s < slices; ++s) {
#pragma unroll
        for (int d = 0; d < dims_per_thread; ++d) {
          const int column = s * Products::slice + x + d * side;
          if (column >= Config::head_dim_v) continue;
          const T product = sums[s][i][d] * weight;
          target[column] = narrow<Element>(
              has_key ? fma(-distance, widen(primal[column]), product) : T(0));
        }
      }
    }
  }
};

template <class Config>
__device__ void simt_tangents(const TangentParams& p) {
  using Kernel = SimtTangents<Config>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const TileCoord coord = tile_coord<Config::Br>(p, blockIdx.x);
  const Sequence sequence = sequence_of<Config>(p, coord.batch);
  if (coord.q_begin >= sequence.seqlen_q) return;
  Kernel(p, coord, sequence, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)).run();
}
