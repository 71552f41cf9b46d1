// Merges the results of attention over KV splits: out = sum_s exp(lse_s - lse) out_s with
// lse = log sum_s exp(lse_s). A few lanes of a warp merge one query row, each a 16-byte chunk of
// its columns at a time. A sink of the head acts as one more split, without values.
#include "params.cuh"
#include "score/lse_merge.cuh"
#include "score/softmax.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"

struct CombineParams {
  Tensor out_partial;       // first split: (batch, seqlen_q, heads_q, head_dim_v)
  Tensor out;               // (batch, seqlen_q, heads_q, head_dim_v)
  int64 split_stride;       // distance between the splits of out_partial, in elements
  const void* lse_partial;  // (num_splits, batch, heads_q, seqlen_q), contiguous
  void* lse;                // (batch, heads_q, seqlen_q), contiguous
  int64 num_splits;
  int batch;
  int seqlen_q;
  int heads_q;
  int head_dim_v;
  const void* sinks;  // (heads_q), contiguous; null without `Config::sinks`
};

namespace combine {

// Returns the reduction over a group of lanes: the same bits in each of these lanes.
template <int Lanes, class T, class Operation>
__device__ T reduce(T x, Operation operation) {
#pragma unroll
  for (int bit = 1; bit < Lanes; bit *= 2) {
    x = operation(x, __shfl_xor_sync(0xffffffffu, x, bit));
  }
  return x;
}

template <class Config>
__device__ void combine(const CombineParams& p) {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  using Math = SoftmaxMath<T>;
  constexpr int width = 16 / int(sizeof(Element));
  constexpr int lanes = Config::lanes;
  static_assert(32 % lanes == 0, "a row's lanes are in one warp");

  const int64 rows = int64(p.batch) * p.heads_q * p.seqlen_q;
  const int64 group = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  // Groups past the end also merge the last row, because all lanes of a warp take part in its
  // shuffles; they do not write the result.
  const int64 index = min(group, rows - 1);
  const int lane = threadIdx.x % lanes;
  const T* lse_partial = static_cast<const T*>(p.lse_partial) + index;

  T max = -Math::infinity();
  for (int64 s = lane; s < p.num_splits; s += lanes) max = fmax(max, lse_partial[s * rows]);
  max = reduce<lanes>(max, [](T a, T b) { return fmax(a, b); });
  T sink = -Math::infinity();
  if constexpr (Config::sinks) {
    const auto* sinks = static_cast<const typename Config::SinkElement*>(p.sinks);
    sink = widen(sinks[index / p.seqlen_q % p.heads_q]);
    max = fmax(max, sink);
  }
  // If the maximum is infinite, the base is 0. The sum is then 0 if no split has a visible key, and
  // inf or NaN if the log-sum-exp of a split is.
  const T base = fabs(max) == Math::infinity() ? T(0) : max;
  LseMerge<T> merge = {base};
  for (int64 s = lane; s < p.num_splits; s += lanes) {
    merge.sum += merge.weight_of(lse_partial[s * rows]);
  }
  merge.sum = reduce<lanes>(merge.sum, [](T a, T b) { return a + b; });
  if constexpr (Config::sinks) merge.sum += merge.weight_of(sink);
  const T normalizer = merge.normalizer();
  if (group >= rows) return;

  const int64 batch_head = index / p.seqlen_q;
  const int row = index % p.seqlen_q;
  const int batch = batch_head / p.heads_q;
  const int head = batch_head % p.heads_q;
  const Element* source =
      p.out_partial.head<const Element>(batch, head) + row * p.out_partial.row_stride;
  Element* target = p.out.head<Element>(batch, head) + row * p.out.row_stride;
  for (int column = lane * width; column < p.head_dim_v; column += lanes * width) {
    const int elements = min(width, p.head_dim_v - column);
    T merged[width] = {};
#pragma unroll 4
    for (int64 s = 0; s < p.num_splits; ++s) {
      const T lse = lse_partial[s * rows];
      const T weight = merge.weight_of(lse) * normalizer;
      const auto x =
          load_elements<width, Config::alignment>(source + s * p.split_stride + column, elements);
      // Splits without a visible key are loaded too, so that the loads of several splits overlap.
      // Their outputs may hold anything, and are not used.
      const bool is_masked = lse == -Math::infinity();
#pragma unroll
      for (int e = 0; e < width; ++e) {
        merged[e] = fma(weight, is_masked ? T(0) : widen(x.data[e]), merged[e]);
      }
    }
    Vector<Element, width> result;
#pragma unroll
    for (int e = 0; e < width; ++e) result.data[e] = narrow<Element>(merged[e]);
    store_chunk<Element, Config::out_alignment>(target + column, result, elements);
  }
  if (lane == 0) static_cast<T*>(p.lse)[index] = merge.lse();
}

}  // namespace combine
