// Gradients of sinks: -sum over a head's rows of exp(sink - lse) delta. A CTA handles one head.
#pragma once

#include "backward/inputs/compensated_sum.cuh"
#include "backward/params.cuh"
#include "scheduler/sequences.cuh"
#include "score/capture.cuh"
#include "score/dropout.cuh"

template <class Config>
struct SinkGradients {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  using Math = SoftmaxMath<T>;
  static constexpr int threads = 1024;

  template <class Input, class Offset, int Rank, bool ContiguousLast>
  __device__ static void write(const GradientParams& p,
                               const Capture<Input, Offset, Rank, ContiguousLast>& sinks) {
    const int head = blockIdx.x;
    const T sink = sinks.at(head);
    const T total = sink == -Math::infinity() ? T(0) : sum(p, head, sink);
    if (threadIdx.x != 0) return;
    using Gradient = typename GradientType<Config, Input>::type;
    static_cast<Gradient*>(p.dsinks)[head] = narrow<Gradient>(-total);
  }

 private:
  // Returns the sum over all rows of the head, in thread 0.
  __device__ static T sum(const GradientParams& p, int head, T sink) {
    __shared__ T warp_totals[threads / 32];
    // Packed sequences are consecutive. Rows before the first or after the last belong to none.
    const int begin = Config::packed ? clamp(p.cu_seqlens_q[0], 0, p.total_q) : 0;
    const int64 end = Config::packed ? int64(clamp(p.cu_seqlens_q[p.batch], begin, p.total_q))
                                     : int64(p.batch) * p.seqlen_q;
    CompensatedSum<T> terms;
    for (int64 i = begin + int(threadIdx.x); i < end; i += threads) {
      const int batch = Config::packed ? 0 : i / p.seqlen_q;
      const int64 row = Config::packed ? i : i % p.seqlen_q;
      const int rows = Config::packed ? p.total_q : p.seqlen_q;
      terms.add(term(p, (int64(batch) * p.heads_q + head) * rows + row, sink));
    }
    T total = terms.total();
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) total += __shfl_xor_sync(~0u, total, bit);
    if (threadIdx.x % 32 == 0) warp_totals[threadIdx.x / 32] = total;
    __syncthreads();
    total = warp_totals[threadIdx.x % 32];
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) total += __shfl_xor_sync(~0u, total, bit);
    return total;
  }

  // Returns the term of one row; `index` is the row's index in lse. A row that attends to no key is
  // no special case, because its lse, too, includes the sink.
  __device__ static T term(const GradientParams& p, int64 index, T sink) {
    const T lse = static_cast<const T*>(p.lse)[index];
    if (lse == -Math::infinity()) return 0;
    T result = Math::exp2((sink - lse) * Math::log2_e) * row_stats<Config>(p)[index].delta;
    // The stored delta is divided by the factor of the weights that dropout keeps.
    if constexpr (Config::dropout) result *= kept_weight<Config, T>(p);
    return result;
  }
};

template <class Config>
__device__ void sink_gradients(const GradientParams& p) {
  SinkGradients<Config>::write(p, p.mods.sinks);
}
