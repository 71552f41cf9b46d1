// Log-sum-exp of a query row as an exponent of two, for kernels that read it from the forward pass.
#pragma once

#include "backward/params.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"

// Returns the log-sum-exp of a row as an exponent of two, from which P follows; +inf for a row that
// does not exist or attends to no key, whose P is then 0. Rows with scores of very large magnitude
// are taken for padding, as in the backward pass (preprocess/preprocess.cuh).
template <class Config, class T = Accumulator<typename Config::Element>>
__device__ T lse_log2_of(const Params& p, const Sequence& sequence, int head, int row) {
  const T infinity = SoftmaxMath<T>::infinity();
  if (row >= sequence.seqlen_q) return infinity;
  const T lse = static_cast<const T*>(p.lse)[lse_index<Config>(p, sequence, head, row)];
  if (lse == -infinity) return infinity;
  if constexpr (Config::Mods::changes_scores) {
    const T lse_log2 = mod_finite_sum(lse, SoftmaxMath<T>::log2_e, T(0));
    const T size = lse_log2 < 0 ? -lse_log2 : lse_log2;
    return size > -low_score<T> && size < infinity ? infinity : lse_log2;
  } else {
    return lse * SoftmaxMath<T>::log2_e;
  }
}
