// Evaluates a score function, or a mask, for every (query, key) pair. This checks generated CUDA
// source against its Python function. cupy_flash/gpu/evaluate.py declares the same struct.
//
// The translation unit declares `ModArguments` and `Mods` before this file.
#include "score/softmax.cuh"

using int64 = long long;

struct EvaluateParams {
  const Mods::Real* scores;  // (batch, heads, seqlen_q, seqlen_k)
  Mods::Real* results;       // same shape: new scores or, for a mask, 1 if visible and 0 if masked
  int64 pairs;               // number of (query, key) pairs: batch * heads * seqlen_q * seqlen_k
  int heads;
  int seqlen_q;
  int seqlen_k;
  int q_offset;
  alignas(8) ModArguments mods;
};

// Kernel: each thread evaluates one pair.
__device__ inline void evaluate(const EvaluateParams& p) {
  using Real = Mods::Real;
  const int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= p.pairs) return;
  const int key = index % p.seqlen_k;
  const int row = index / p.seqlen_k % p.seqlen_q;
  const int64 batch_head = index / p.seqlen_k / p.seqlen_q;
  const auto mod_row =
      Mods::row(p.mods, batch_head / p.heads, batch_head % p.heads, row + p.q_offset, row, 0, 0, 0);
  const auto keys = Mods::keys(p.mods, mod_row, key);
  if constexpr (Mods::changes_scores) {
    // `Mods::exponent()` returns the new score times log2(e), an exponent of two.
    const Real exponent = Mods::exponent(p.mods, mod_row, keys, 0, p.scores[index]);
    p.results[index] = exponent * SoftmaxMath<Real>::ln_2;
  } else {
    p.results[index] = Mods::is_visible(p.mods, mod_row, keys, 0);
  }
}
