// Preprocess kernel of the backward pass: computes lse_log2 and delta of each query row, clears the
// dq semaphores, and zeroes gradient rows that no other kernel writes.
#pragma once

#include "backward/kv_tile_list.cuh"
#include "backward/packed_order.cuh"
#include "backward/params.cuh"
#include "backward/dq/accumulate.cuh"
#include "backward/preprocess/zero_rows.cuh"
#include "score/capture.cuh"
#include "score/dropout.cuh"
#include "tile/access.cuh"
#include "scheduler/tile_coord.cuh"

template <class Config>
struct Preprocess {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  static constexpr int width = 16 / int(sizeof(Element));  // elements that a lane loads at once
  static constexpr int chunks = ceil_div(Config::head_dim_v, width);
  static constexpr int lanes = Config::row_lanes;  // lanes that process one row
  static_assert(lanes <= 32 && (lanes & (lanes - 1)) == 0, "a power of two of a warp's lanes");

  // Clears semaphores and rows, and computes the statistics of one query row per `lanes` lanes.
  __device__ static void compute(const GradientParams& p) {
    if constexpr (Config::dq_Br > 0) {
      const DqSums<Config> sums(p);
      const int64 step = int64(gridDim.x) * blockDim.x;
      for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < sums.count; i += step) {
        sums.semaphores[i] = 0;
      }
    }
    if constexpr (Config::splits_queries) {
      const int64 step = int64(gridDim.x) * blockDim.x;
      for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.kv_semaphores; i += step) {
        static_cast<int*>(p.kv_sums)[i] = 0;
      }
    }
    if constexpr (Config::fetches_kv_tiles) KvTileList<Config>(p).write();
    if constexpr (Config::orders_sequences) PackedOrder<Config>::write(p);
    UnwrittenRows<Config>::clear(p);
    const int64 rows =
        p.heads_q * (Config::packed ? int64(p.total_q) : int64(p.batch) * p.seqlen_q);
    const int64 number = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
    // All lanes of a warp take part in the shuffles. Lanes past the last row process it once more.
    const int64 index = number < rows ? number : rows - 1;
    const int rows_per_head = Config::packed ? p.total_q : p.seqlen_q;
    const int64 head = index / rows_per_head;
    const int row = index % rows_per_head;
    const int batch = Config::packed ? 0 : head / p.heads_q;
    const int head_q = Config::packed ? head : head % p.heads_q;
    bool is_zero = true;  // whether the lane's part of the output row is 0
    const T sum = product(p.out.head<const Element>(batch, head_q) + row * p.out.row_stride,
                          p.dout.head<const Element>(batch, head_q) + row * p.dout.row_stride,
                          is_zero);
    if constexpr (Config::sinks) {
#pragma unroll
      for (int bit = 1; bit < lanes; bit *= 2) {
        is_zero &= bool(__shfl_xor_sync(~0u, int(is_zero), bit));
      }
    }
    if (number >= rows) return;
    if (threadIdx.x % lanes != 0) return;
    const T lse = static_cast<const T*>(p.lse)[index];
    T lse_log2 = lse * SoftmaxMath<T>::log2_e;
    // Modified scores are kept finite by `mod_finite_sum()`, and so must be their log-sum-exp.
    if constexpr (Config::Mods::changes_scores) {
      lse_log2 = mod_finite_sum(lse, SoftmaxMath<T>::log2_e, T(0));
    }
    bool is_masked = lse == -SoftmaxMath<T>::infinity();
    // If scores are very low or very high, their log-sum-exp is rounded too coarsely to compute P.
    // Rows with such scores are taken for padding, and have no gradient.
    if constexpr (Config::Mods::changes_scores) {
      const T size = lse_log2 < 0 ? -lse_log2 : lse_log2;
      is_masked |= size > -low_score<T> && size < SoftmaxMath<T>::infinity();
    }
    // With sinks, the log-sum-exp of a row that attends to no key is the sink alone.
    if constexpr (Config::sinks) {
      is_masked |= is_zero && lse_log2 == sink_of(p, head_q) * SoftmaxMath<T>::log2_e;
    }
    // The output of a row that attends to no key depends on no input, so its delta is 0.
    T delta = (Config::inspects || Config::sinks) && is_masked ? T(0) : sum;
    if constexpr (Config::has_dlse) delta -= static_cast<const T*>(p.dlse)[index];
    const T infinity =
        Config::sinks || Config::Mods::changes_scores ? SoftmaxMath<T>::infinity() : -lse;
    if constexpr (Config::dropout) {
      // P then includes the factor of the weights that dropout keeps, see `softmax_backward.cuh`.
      const T factor = kept_weight<Config, T>(p);
      lse_log2 -= SoftmaxMath<T>::log2(factor);
      delta /= factor;
    }
    row_stats<Config>(p)[index] = {is_masked ? infinity : lse_log2, delta};
  }

 private:
  // A template, because `mods.sinks` exists only in translation units with modifications.
  template <class AnyParams>
  __device__ static T sink_of(const AnyParams& p, int head) {
    return p.mods.sinks.at(head);
  }

  // Returns rowsum(out * dout). Sets `is_zero` to false unless the lane's part of `out` is 0.
  __device__ static T product(const Element* out, const Element* dout, bool& is_zero) {
    T sum = 0;
#pragma unroll
    for (int first = 0; first < chunks; first += lanes) {
      const int column = (first + threadIdx.x % lanes) * width;
      const int left = max(0, min(width, Config::head_dim_v - column));
      const auto x = load_elements<width, Config::alignment>(out + column, left);
      const auto y = load_elements<width, Config::alignment>(dout + column, left);
#pragma unroll
      for (int e = 0; e < width; ++e) {
        sum = fma(widen(x.data[e]), widen(y.data[e]), sum);
        if constexpr (Config::sinks) is_zero &= widen(x.data[e]) == T(0);
      }
    }
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    return sum;
  }
};

template <class Config>
__device__ void preprocess(const GradientParams& p) {
  Preprocess<Config>::compute(p);
}
