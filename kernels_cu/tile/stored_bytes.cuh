// The 8-bit element types of a KV cache, and their conversions to float16, which are exact.
#pragma once

#include "ptx/base.cuh"
#include "ptx/bytes.cuh"

// float8 e4m3: a sign, four bits of exponent and three of mantissa; no infinity, one NaN per sign.
struct float8_e4m3_t {
  unsigned char bits;
};
struct signed_byte_t {
  signed char bits;
};

#if __CUDA_ARCH__ >= 800

// pair<first, second>(four) converts two of the four bytes of a register to a pair of float16.
template <class Stored>
struct WidenBytes;

#if __CUDA_ARCH__ >= 890
template <>
struct WidenBytes<float8_e4m3_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    const unsigned two = ptx::prmt<first + 16 * second>(four, 0);
    return ptx::cvt_rn_f16x2_e4m3x2(static_cast<unsigned short>(two));
  }
};
#endif

// The float16 with upper byte 0x64 and lower byte b is 1024 + b. Flipping the sign bit of an int8 x
// gives b = x + 128, so the float16 is 1152 + x, and subtracting 1152 yields x exactly.
template <>
struct WidenBytes<signed_byte_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    constexpr unsigned digits = first + 16 * 4 + 256 * second + 4096 * 4;
    const unsigned raised = ptx::prmt<digits>(four ^ 0x80808080u, 0x64);
    return ptx::sub_rn_f16x2(raised, 0x64806480u);
  }
};

#endif  // __CUDA_ARCH__ >= 800
