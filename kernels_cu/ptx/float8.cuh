// wgmma.mma_async.m64nNk32: the asynchronous warpgroup product d (+)= a b of e4m3 operands with
// float32 accumulators, for each N that is a multiple of 16; and conversions for operand a.
//
// The result has the register layout described in wgmma.cuh. Thread t of the warpgroup holds part
// of row 16 (t / 32) + t % 32 / 4 + 8 h of the 64 x 32 operand a: columns 4 (t % 4) to
// 4 (t % 4) + 3 in register h, and the columns 16 higher in register 2 + h. Both operands have k
// contiguous, as wgmma requires for 8-bit types.
#pragma once

#include "ptx/sm90a.cuh"
#include "ptx/wgmma.cuh"
#include "tile/stored_bytes.cuh"

#if __CUDA_ARCH__ == 900

namespace ptx {

// cvt.rn.satfinite.e4m3x2.f32: converts two numbers, `low` into the lower byte. Values out of range
// become the largest finite e4m3 number.
__device__ inline unsigned short cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  unsigned short result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

// mov.b32: packs two 16-bit halves into one register.
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
