// What masks leave out is selected, but sums over a tile multiply it by 0, and 0 times NaN or
// infinity is NaN. So such numbers are taken out of what is multiplied where they change nothing:
//
// - rows of q and dout whose query sees no key (row_terms.cuh finds them) become zeros;
// - so do rows of q whose lse is NaN, as p of all keys that they see is NaN anyhow;
// - NaN in k becomes 0, and infinities the largest number. Scores with such a key are NaN or
//   infinite, and stay what they were for queries that see it: where one is not -inf, the row's lse
//   is no finite number, and all of its p are NaN; where it is, p is 0.
//
// A NaN in dout of a row that sees keys reaches dv of those that it does not see, too, where they
// share a tile, as one in v of a hidden key does the output of forward.
#pragma once

#include "backward/params.cuh"
#include "ptx/base.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"

// Which rows of queries are cleared.
__device__ inline bool clears_q(const RowTerms<float>& terms) {
  return !(terms.lse_log2 < SoftmaxMath<float>::infinity());
}
__device__ inline bool clears_dout(const RowTerms<float>& terms) {
  return terms.lse_log2 == SoftmaxMath<float>::infinity();
}

// The bits of an infinity.
template <class Element>
constexpr unsigned infinite_bits = 0;
template <>
constexpr unsigned infinite_bits<half_t> = 0x7c00;
template <>
constexpr unsigned infinite_bits<bfloat16_t> = 0x7f80;

// Two 16-bit elements of k in one register.
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

// 16 bytes of k in shared memory.
template <class Element>
__device__ void clean_chunk(unsigned shared) {
  unsigned found[4], clean[4];
  ptx::ld_shared_v4(found, shared);
  bool is_clean = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    clean[i] = clean_pair<Element>(found[i]);
    is_clean = is_clean && clean[i] == found[i];
  }
  if (!is_clean) ptx::st_shared_v4(shared, clean);
}
