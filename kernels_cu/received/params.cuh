// Argument struct of the kernels that sum attention weights over queries.
// cupy_flash/families/params.py declares the same struct as a NumPy dtype and asserts at compile
// time that sizes and offsets agree.
#pragma once

#include "backward/lse_exponent.cuh"

// The inherited `lse` is a result of the forward pass, and is only read. `v` and `out` are unused.
struct ReceivedParams : Params {
  void* received;   // (batch, heads, seqlen_k), contiguous, of the type of lse: query heads or,
                    // with Config::grouped, KV heads
  int first_query;  // only the queries [first_query, last_query) count
  int last_query;
};

// Returns the log-sum-exp of a query row as an exponent of two; +inf for a row that does not count,
// so that its weights are 0.
template <class Config, class T = Accumulator<typename Config::Element>>
__device__ T counted_lse_log2(const ReceivedParams& p, const Sequence& sequence, int head,
                              int row) {
  const bool counts =
      row >= p.first_query && row < min(p.last_query, sequence.seqlen_q);
  return counts ? lse_log2_of<Config, T>(p, sequence, head, row)
                : SoftmaxMath<T>::infinity();
}
