// Cleaning of operands that belong to masked pairs. Masking sets P and dS of such a pair to 0 by
// selection, but products over a tile multiply that 0 by the other operand, and 0 times NaN or
// infinity is NaN. So NaN and infinity are removed from operands where this changes no result. On
// Hopper, this is done in tiles that are inspected (`HopperGradientCta::inspects_tile`):
//
// - Rows of q and dout whose query attends to no key become zeros. The preprocess kernel marks them
//   by an lse_log2 of +inf.
// - Rows of q whose lse is NaN become zeros, too: their P is NaN for all visible keys anyway.
// - NaN in k becomes 0, and infinity becomes the largest finite number. The true scores of such a
//   key are NaN or infinite. P does not change for queries that attend to the key: if the score is
//   -inf, P is 0; otherwise the row's lse is not finite, and all of its P are NaN.
//
// A NaN in dout of a row that attends to some keys can still reach dv of masked keys of the same
// tile, just as a NaN in v of a masked key can reach the output of the forward pass.
#pragma once

#include "backward/params.cuh"
#include "ptx/base.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"

// Return whether the row of q, or of dout, with these row statistics is set to zeros.
__device__ inline bool clears_q(const RowStats<float>& stats) {
  return !(stats.lse_log2 < SoftmaxMath<float>::infinity());
}
__device__ inline bool clears_dout(const RowStats<float>& stats) {
  return stats.lse_log2 == SoftmaxMath<float>::infinity();
}

// Bit pattern of +infinity in a 16-bit type.
template <class Element>
constexpr unsigned infinite_bits = 0;
template <>
constexpr unsigned infinite_bits<half_t> = 0x7c00;
template <>
constexpr unsigned infinite_bits<bfloat16_t> = 0x7f80;

// Cleans two 16-bit elements of k that are packed in one register.
template <class Element>
__device__ unsigned clean_pair(unsigned pair) {
  constexpr unsigned infinity = infinite_bits<Element>;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned size = pair >> shift & 0x7fff;
    if (size > infinity) pair &= ~(0xffffu << shift);
    if (size == infinity) pair -= 1u << shift;
  }
  return pair;
}

// Cleans 16 bytes of k in shared memory, and writes them only if they change.
template <class Element>
__device__ void clean_chunk(unsigned shared) {
  unsigned words[4], cleaned[4];
  ptx::ld_shared_v4(words, shared);
  bool is_clean = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    cleaned[i] = clean_pair<Element>(words[i]);
    is_clean = is_clean && cleaned[i] == words[i];
  }
  if (!is_clean) ptx::st_shared_v4(shared, cleaned);
}
