// Host versions of instructions in kernels_cu/ptx/bytes.cuh.
#pragma once

namespace ptx {

inline unsigned long long mul_wide_u32(unsigned x, unsigned y) {
  return static_cast<unsigned long long>(x) * y;
}

inline unsigned prmt_sign_bytes(unsigned x, unsigned y, int byte) {
  const unsigned low = x >> (8 * byte + 7) & 1 ? 0xffff : 0;
  const unsigned high = y >> (8 * byte + 7) & 1 ? 0xffff0000 : 0;
  return low | high;
}

}  // namespace ptx
