// Unfused attention, the baseline of the benchmarks. Three kernels communicate through the whole
// score matrix in the workspace, of shape (batch * heads_q, seqlen_q, seqlen_k). Products use
// 32 x 32 tiles in shared memory, with one thread for each element of the result.
#include "params.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "scheduler/tile_coord.cuh"

namespace naive {

constexpr int tile = 32;
// Rows of 33 elements place a column of the tile in 32 different banks (16 for double).
template <class T>
using Shared = T[tile][tile + 1];

// The 32 x 32 tile of S or O that a CTA computes, and the element of it that this thread computes.
struct ResultElement {
  int64 batch_head;
  int row_begin, column_begin;
  int y, x;

  __device__ ResultElement(int rows, int columns) {
    const unsigned column_tiles = ceil_div(columns, tile);
    const unsigned row_tiles = ceil_div(rows, tile);
    const unsigned row_block = blockIdx.x / column_tiles;
    column_begin = blockIdx.x % column_tiles * tile;
    row_begin = row_block % row_tiles * tile;
    batch_head = row_block / row_tiles;
    y = threadIdx.x / tile;
    x = threadIdx.x % tile;
  }
  __device__ int row() const { return row_begin + y; }
  __device__ int column() const { return column_begin + x; }
};

template <class T>
__device__ T* score_row(const Params& p, int64 batch_head, int row) {
  return static_cast<T*>(p.workspace) + (batch_head * p.seqlen_q + row) * p.seqlen_k;
}

__device__ inline int kv_head(const Params& p, int head) { return head / (p.heads_q / p.heads_kv); }

// Computes S = Q K^T, with -inf for masked pairs. The scale is applied in softmax().
template <class Config>
__device__ void scores(const Params& p) {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  constexpr int dim = Config::head_dim;
  __shared__ Shared<T> q_tile, k_tile;
  if (p.seqlen_k == 0) return;

  const ResultElement element(p.seqlen_q, p.seqlen_k);
  const int batch = element.batch_head / p.heads_q;
  const int head = element.batch_head % p.heads_q;
  const int k_row = element.column_begin + element.y;
  const Element* q = p.q.head<const Element>(batch, head) + element.row() * p.q.row_stride;
  const Element* k = p.k.head<const Element>(batch, kv_head(p, head)) + k_row * p.k.row_stride;

  T sum = 0;
  for (int begin = 0; begin < dim; begin += tile) {
    const int d = begin + element.x;
    q_tile[element.y][element.x] = element.row() < p.seqlen_q && d < dim ? widen(q[d]) : T(0);
    k_tile[element.y][element.x] = k_row < p.seqlen_k && d < dim ? widen(k[d]) : T(0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < tile; ++i) sum = fma(q_tile[element.y][i], k_tile[element.x][i], sum);
    __syncthreads();
  }
  if (element.row() >= p.seqlen_q || element.column() >= p.seqlen_k) return;
  if constexpr (prior_factor<Config> != 1) sum *= prior_factor<Config>;
  modify_rows<Config, 1, 1>(
      p,
      [&](int) {
        const int q_offset = first_position<Config>(p, batch, p.q_offset);
        return ScoreRow{batch, head, element.row(), q_offset, 0, 0};
      },
      element.column(), [&](int, int) -> T& { return sum; }, [](int) { return 0; });
  const Mask<Config> mask(p, batch);
  bool is_visible = element.column() < mask.visible_end(element.row());
  if constexpr (Config::window_left) {
    is_visible &= element.column() >= mask.visible_begin(element.row());
  }
  score_row<T>(p, element.batch_head, element.row())[element.column()] =
      is_visible ? sum : -SoftmaxMath<T>::infinity();
}

// Computes P = softmax(scale * S) in place, one warp per row, and writes the log-sum-exp.
template <class Config>
__device__ void softmax(const Params& p) {
  using T = Accumulator<typename Config::Element>;
  const int64 index = int64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index >= int64(p.batch) * p.heads_q * p.seqlen_q) return;

  T* row = static_cast<T*>(p.workspace) + index * p.seqlen_k;
  const T scale_log2 = exponent_scale<Config, T>(p);
  T max = -SoftmaxMath<T>::infinity();
  for (int key = lane; key < p.seqlen_k; key += 32) max = fmax(max, row[key]);
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) max = fmax(max, __shfl_xor_sync(0xffffffffu, max, bit));

  using Row = SoftmaxRow<T, StatisticsOf<Config, T>>;
  Row state;
  state.reset();
  state.include_score(max);
  state.update_max(max, scale_log2);
  const T base = state.base(scale_log2);
  for (int key = lane; key < p.seqlen_k; key += 32) {
    const T exponent = Row::template exponent<true>(row[key], scale_log2, base);
    row[key] = SoftmaxMath<T>::exp2(exponent);
    state.sum += row[key];
    state.include_exponent(row[key], exponent);
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    state.sum += __shfl_xor_sync(0xffffffffu, state.sum, bit);
    if constexpr (Config::entropy) state.moment += __shfl_xor_sync(~0u, state.moment, bit);
  }
  const int head = index / p.seqlen_q % p.heads_q;
  T normalizer = state.normalizer();
  if constexpr (Config::sinks) {
    T lse = state.log_sum_exp(scale_log2);
    normalizer *= apply_sink<Config>(p, head, lse);
  }
  for (int key = lane; key < p.seqlen_k; key += 32) row[key] *= normalizer;
  if (lane == 0 && p.lse != nullptr) {
    T lse = state.log_sum_exp(scale_log2);
    apply_sink<Config>(p, head, lse);
    static_cast<T*>(p.lse)[index] = lse;
  }
  if (has_statistics<Config> && lane == 0) {
    RowSummary<T> summary = state.summary(logit_unit<Config, T>(p));
    T lse = state.log_sum_exp(scale_log2);
    summary.scale_weights(apply_sink<Config>(p, head, lse));
    write_statistics<Config>(p, index, summary);
  }
}

// Computes O = P V.
template <class Config>
__device__ void output(const Params& p) {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  constexpr int dim = Config::head_dim_v;
  __shared__ Shared<T> p_tile, v_tile;

  const ResultElement element(p.seqlen_q, dim);
  const int batch = element.batch_head / p.heads_q;
  const int head = element.batch_head % p.heads_q;
  const T* probabilities = score_row<const T>(p, element.batch_head, element.row());
  const Element* v = p.v.head<const Element>(batch, kv_head(p, head)) + element.column();

  T sum = 0;
  T weight = 0;  // sum of P over all keys
  for (int begin = 0; begin < p.seqlen_k; begin += tile) {
    const int p_key = begin + element.x;
    const int v_key = begin + element.y;
    p_tile[element.y][element.x] =
        element.row() < p.seqlen_q && p_key < p.seqlen_k ? probabilities[p_key] : T(0);
    v_tile[element.y][element.x] =
        v_key < p.seqlen_k && element.column() < dim ? widen(v[v_key * p.v.row_stride]) : T(0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < tile; ++i) {
      sum = fma(p_tile[element.y][i], v_tile[i][element.x], sum);
      if constexpr (Config::modified) weight += p_tile[element.y][i];
    }
    __syncthreads();
  }
  if (element.row() >= p.seqlen_q || element.column() >= dim) return;
  Element* out = p.out.head<Element>(batch, head) + element.row() * p.out.row_stride;
  const bool has_visible_keys =
      Config::modified ? weight != 0 : Mask<Config>(p, batch).visible_end(element.row()) > 0;
  out[element.column()] = narrow<Element>(has_visible_keys ? sum : T(0));
}

}  // namespace naive
