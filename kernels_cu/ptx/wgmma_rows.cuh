// Instructions that the backward pass needs in addition to wgmma.cuh: wgmma with both operands in
// shared memory and b contiguous along n, and stmatrix, which writes operand a to shared memory.
#pragma once

#include "ptx/wgmma.cuh"

#if __CUDA_ARCH__ == 900

template <class Element, int N>
struct WgmmaRows;

#define WGMMA_ROWS(ELEMENT, TYPE, N, COUNT, i0, i1, i2)                                            \
  template <>                                                                                      \
  struct WgmmaRows<ELEMENT, N> {                                                                   \
    /* a has k contiguous, b has n contiguous. */                                                  \
    WGMMA_FROM_SHARED(multiply, WGMMA_16_BITS(TYPE), "1, 1, 0, 1", N, COUNT, i0, i1, i2)           \
  };
#define WGMMA_ROWS_FOR_BOTH_TYPES(N, COUNT, ...)   \
  WGMMA_ROWS(half_t, "f16", N, COUNT, __VA_ARGS__) \
  WGMMA_ROWS(bfloat16_t, "bf16", N, COUNT, __VA_ARGS__)

WGMMA_ROWS_FOR_BOTH_TYPES(32, 16, 16, 17, 18)
WGMMA_ROWS_FOR_BOTH_TYPES(64, 32, 32, 33, 34)
WGMMA_ROWS_FOR_BOTH_TYPES(96, 48, 48, 49, 50)
WGMMA_ROWS_FOR_BOTH_TYPES(128, 64, 64, 65, 66)

namespace ptx {

// stmatrix.x4.trans: stores four 8 x 8 matrices of 16-bit elements, each transposed. Lane l passes
// the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix_x4_trans(unsigned shared, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace ptx

#endif  // __CUDA_ARCH__ == 900
