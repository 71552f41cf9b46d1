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
    /* a and b in shared memory; d is cleared first unless accumulate. */                          \
    __device__ static void multiply(float (&d)[COUNT], unsigned long long a, unsigned long long b, \
                                    int accumulate) {                                              \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred accumulate;\n"                                                               \
          "setp.ne.b32 accumulate, %" #i2                                                          \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N                                                   \
          "k32.f32.e4m3.e4m3"                                                                      \
          " {" ACCUMULATORS_##COUNT "}, %" #i0 ", %" #i1                                           \
                                    ", accumulate, 1, 1;\n"                                        \
                                    "}"                                                            \
          : OPERANDS_##COUNT                                                                       \
          : "l"(a), "l"(b), "r"(accumulate));                                                      \
    }                                                                                              \
    /* a in registers. */                                                                          \
    __device__ static void multiply_k_contiguous(float (&d)[COUNT], const unsigned* a,             \
                                                 unsigned long long b, int accumulate) {           \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred accumulate;\n"                                                               \
          "setp.ne.b32 accumulate, %" #i5                                                          \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N                                                   \
          "k32.f32.e4m3.e4m3"                                                                      \
          " {" ACCUMULATORS_##COUNT "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4           \
                                    ", accumulate, 1, 1;\n"                                        \
                                    "}"                                                            \
          : OPERANDS_##COUNT                                                                       \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                  \
    }                                                                                              \
  };

WGMMA_FLOAT8(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_FLOAT8(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_FLOAT8(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA_FLOAT8(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_FLOAT8(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_FLOAT8(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_FLOAT8(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA_FLOAT8(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_FLOAT8(144, 72, 72, 73, 74, 75, 76, 77)
WGMMA_FLOAT8(160, 80, 80, 81, 82, 83, 84, 85)
WGMMA_FLOAT8(176, 88, 88, 89, 90, 91, 92, 93)
WGMMA_FLOAT8(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_FLOAT8(208, 104, 104, 105, 106, 107, 108, 109)
WGMMA_FLOAT8(224, 112, 112, 113, 114, 115, 116, 117)
WGMMA_FLOAT8(240, 120, 120, 121, 122, 123, 124, 125)
WGMMA_FLOAT8(256, 128, 128, 129, 130, 131, 132, 133)

#endif  // __CUDA_ARCH__ == 900
