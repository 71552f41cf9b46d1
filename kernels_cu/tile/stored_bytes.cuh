// Numbers of 8 bits as caches hold them, and the 16-bit ones that they become, which hold all of them
// exactly.
#pragma once

#include "ptx/base.cuh"
#include "ptx/bytes.cuh"
#include "tile/element.cuh"

// A sign, four bits of exponent, three of mantissa; no infinity, and one NaN of each sign.
struct float8_e4m3_t {
  unsigned char bits;
};
struct signed_byte_t {
  signed char bits;
};

#if __CUDA_ARCH__ >= 800

// pair<first, second>(four): two of the four bytes of a register as a pair of Elements.
template <class Element, class Stored>
struct WidenBytes;

#if __CUDA_ARCH__ >= 890
template <>
struct WidenBytes<half_t, float8_e4m3_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    const unsigned two = ptx::prmt<first + 16 * second>(four, 0);
    return ptx::cvt_rn_f16x2_e4m3x2(static_cast<unsigned short>(two));
  }
};

// By way of float16 and float: NaN stays NaN, as it would not by shifting bits.
template <>
struct WidenBytes<bfloat16_t, float8_e4m3_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    const unsigned two = WidenBytes<half_t, float8_e4m3_t>::template pair<first, second>(four);
    return pack<bfloat16_t>(ptx::cvt_f32_f16(static_cast<unsigned short>(two)),
                            ptx::cvt_f32_f16(static_cast<unsigned short>(two >> 16)));
  }
};
#endif

// Two bytes, each below one of `upper`.
template <int first, int second>
__device__ unsigned below(unsigned four, unsigned upper) {
  return ptx::prmt<first + 16 * 4 + 256 * second + 4096 * 4>(four, upper);
}

// A byte below the upper byte of 1024 is 1024 + itself, with its sign bit flipped 1152 + the number.
template <>
struct WidenBytes<half_t, signed_byte_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    const unsigned raised = below<first, second>(four ^ 0x80808080u, 0x64);
    return ptx::sub_rn_f16x2(raised, 0x64806480u);
  }
};

// The lower seven bits below the upper byte of 128 are 128 + themselves; the sign bit makes of that
// 128 a 256, and this, or 128, is subtracted.
template <>
struct WidenBytes<bfloat16_t, signed_byte_t> {
  template <int first, int second>
  __device__ static unsigned pair(unsigned four) {
    const unsigned raised = below<first, second>(four, 0x43);
    return ptx::fma_rn_bf16x2(raised & 0xff80ff80u, 0xbf80bf80u, raised & 0xff7fff7fu);
  }
};

#endif  // __CUDA_ARCH__ >= 800
