// What products of float8 take: wgmma.mma_async.m64nNk32, the warpgroup's asynchronous product d
// (+)= a b of e4m3 operands with float32 accumulators, one specialization of `Wgmma` for each N
// that is a multiple of 16, and the conversion of a.
//
// The result lies as in wgmma.cuh. Of the 64 x 32 operand a thread t of the warpgroup has, of row
// 16 (t / 32) + t % 32 / 4 + 8 h, the columns 4 (t % 4) to 4 (t % 4) + 3 in register h, and the
// same sixteen columns further on in register 2 + h. Both operands have k contiguous: of 8 bits
// there is no other way.
#pragma once

#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "tile/stored_bytes.cuh"

#if __CUDA_ARCH__ == 900

namespace ptx {

// cvt.rn.satfinite.e4m3x2.f32: two numbers, the first in the lower byte; what is larger than the
// largest becomes that.
__device__ inline unsigned short cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  unsigned short result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

// mov.b32: of two halves, the lower one first.
__device__ inline unsigned mov_b32(unsigned short low, unsigned short high) {
  unsigned result;
  asm("mov.b32 %0, {%1, %2};" : "=r"(result) : "h"(low), "h"(high));
  return result;
}

}  // namespace ptx

#define WGMMA_FLOAT8(N, COUNT, i0, i1, i2, i3, i4, i5)                                             \
  template <>                                                                                      \
  struct Wgmma<float8_e4m3_t, N> {                                                                 \
    WGMMA_FROM_SHARED(multiply, "k32.f32.e4m3.e4m3", "1, 1", N, COUNT, i0, i1, i2)                 \
    WGMMA_FROM_REGISTERS(multiply_k_contiguous, "k32.f32.e4m3.e4m3", "1, 1", N, COUNT, i0, i1, i2, \
                         i3, i4, i5)                                                               \
  };

WGMMA_OF_EACH_WIDTH(WGMMA_FLOAT8)

#endif  // __CUDA_ARCH__ == 900
