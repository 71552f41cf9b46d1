// Numbers of 8 bits as caches hold them, and the float16 ones that they become, which are the same
// numbers.
#pragma once

#include "ptx/base.cuh"
#include "ptx/bytes.cuh"

// A sign, four bits of exponent, three of mantissa; no infinity, and one NaN of each sign.
struct float8_e4m3_t {
  unsigned char bits;
};
struct signed_byte_t {
  signed char bits;
};

#if __CUDA_ARCH__ >= 800

// pair<first, second>(four): two of the four bytes of a register as a pair of float16.
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

// A byte below the upper byte of 1024 is 1024 + itself, with its sign bit flipped 1152 + a number.
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
