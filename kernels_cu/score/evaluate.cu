// What a modification makes of every score of a matrix, or whether it sees every pair: for the
// check of device text against the Python function beside it. cupy_flash/gpu/evaluate.py lays the
// struct out.
//
// The unit declares ModArguments and Mods ahead of this file.
#include "score/softmax.cuh"

using int64 = long long;

struct EvaluateParams {
  const Mods::Real* scores;  // (batch, heads, seqlen_q, seqlen_k)
  Mods::Real* results;       // alike: new scores, or 1 where a pair is seen and 0 where not
  int64 pairs;               // in all
  int heads;
  int seqlen_q;
  int seqlen_k;
  int q_offset;
  alignas(8) ModArguments mods;
};

// A thread for each pair.
__device__ inline void evaluate(const EvaluateParams& p) {
  using Real = Mods::Real;
  const int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= p.pairs) return;
  const int key = index % p.seqlen_k;
  const int row = index / p.seqlen_k % p.seqlen_q;
  const int64 batch_head = index / p.seqlen_k / p.seqlen_q;
  const auto of_row = Mods::row(p.mods, batch_head / p.heads, batch_head % p.heads,
                                row + p.q_offset, row, 0, 0, 0);
  const auto keys = Mods::keys(p.mods, of_row, key);
  if constexpr (Mods::changes_scores) {
    // It gives exponents of two.
    const Real exponent = Mods::exponent(p.mods, of_row, keys, 0, p.scores[index]);
    p.results[index] = exponent * SoftmaxMath<Real>::ln_2;
  } else {
    p.results[index] = Mods::sees(p.mods, of_row, keys, 0);
  }
}
