// Host versions of the instructions in kernels_cu/ptx/base.cuh that kernels for sm_80 use.
// Asynchronous copies to shared memory complete immediately.
#pragma once

#include "cuda.h"

namespace ptx {

inline unsigned shared_address(const void* pointer) { return __cvta_generic_to_shared(pointer); }
inline int cta_index() { return blockIdx.x; }
inline int opaque(int x) { return x; }

inline float ex2_approx(float x) { return std::exp2(x); }
inline float rcp_approx(float x) { return 1 / x; }
inline float div_rn(float x, float y) { return x / y; }
inline float mul_rn(float x, float y) { return x * y; }
inline float min_magnitude(float x, float bound) { return std::fmin(std::fmax(x, -bound), bound); }

inline float cvt_f32_f16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const float size = exponent == 31  ? (digits ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(digits), -24)
                                     : std::ldexp(float(digits + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}
inline unsigned short cvt_rn_f16_f32(float x) {
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size != size) return sign | 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  // If rounding reaches the next power of two, the addition below carries into the exponent.
  const int exponent = size < 0x1p-14f ? -15 : std::ilogb(size);
  const int digits = int(std::nearbyint(std::ldexp(size, exponent < -14 ? 24 : 10 - exponent)));
  return sign | (exponent < -14 ? digits : ((exponent + 14) << 10) + digits);
}
inline unsigned short cvt_rn_bf16_f32(float x) {
  const unsigned bits = bits_as<unsigned>(x);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned cvt_rn_f16x2_f32(float low, float high) {
  return cvt_rn_f16_f32(low) | unsigned(cvt_rn_f16_f32(high)) << 16;
}
inline unsigned cvt_rn_bf16x2_f32(float low, float high) {
  return cvt_rn_bf16_f32(low) | unsigned(cvt_rn_bf16_f32(high)) << 16;
}

// Rounds to the nearest number with a 10-bit mantissa. Ties round away from 0.
inline unsigned cvt_tf32_f32(float x) {
  const unsigned bits = bits_as<unsigned>(x);
  return std::isfinite(x) ? (bits + 0x1000) & ~0x1fffu : bits;
}

inline void st_shared(unsigned shared, unsigned x) {
  std::memcpy(shared_memory + shared, &x, sizeof x);
}
inline void st_shared_v4(unsigned shared, const unsigned (&x)[4]) {
  std::memcpy(shared_memory + shared, x, sizeof x);
}
inline void ld_shared_v4(unsigned (&x)[4], unsigned shared) {
  std::memcpy(x, shared_memory + shared, sizeof x);
}

template <int Bytes>
void cp_async(unsigned shared, const void* global, int source_bytes) {
  if (shared % Bytes != 0 || reinterpret_cast<unsigned long long>(global) % Bytes != 0) std::abort();
  unsigned char* target = shared_memory + shared;
  std::memset(target, 0, Bytes);
  std::memcpy(target, global, source_bytes);
}
inline void cp_async_commit_group() {}
template <int Pending>
void cp_async_wait_group() {}

// Returns read(words), where words[lane] holds the `count` words of every lane of the warp.
template <int count, class Read>
auto with_words(const unsigned (&own)[count], Read read) {
  struct Words {
    unsigned of[count];
  } words;
  std::memcpy(words.of, own, sizeof own);
  return among_lanes(words, read);
}

// Loads four 8 x 8 matrices. Lane l receives two elements of row l / 4 of each matrix or, if
// `Transposed`, of column l / 4.
template <bool Transposed>
void load_matrices(unsigned (&result)[4], unsigned shared) {
  if (shared % 16 != 0) std::abort();
  const int lane = threadIdx.x % 32;
  among_lanes(shared, [&](const unsigned* addresses) {
    for (int i = 0; i < 4; ++i) {
      unsigned short pair[2];
      for (int c = 0; c < 2; ++c) {
        const int row = Transposed ? lane % 4 * 2 + c : lane / 4;
        const int column = Transposed ? lane / 4 : lane % 4 * 2 + c;
        std::memcpy(pair + c, shared_memory + addresses[8 * i + row] + 2 * column, 2);
      }
      std::memcpy(&result[i], pair, sizeof pair);
    }
    return 0;
  });
}
inline void ldmatrix_x4(unsigned (&r)[4], unsigned shared) { load_matrices<false>(r, shared); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned shared) { load_matrices<true>(r, shared); }

// d += a b with operands of 16 bits, given the conversion of an element to float32.
template <class Widen>
void multiply_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                      Widen widen) {
  const int lane = threadIdx.x % 32;
  const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto half = [&](unsigned word, int k) {
    return widen(static_cast<unsigned short>(word >> k % 2 * 16));
  };
  with_words(own, [&](const auto* words) {
    for (int i = 0; i < 4; ++i) {
      const int row_half = i / 2, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const int pair = k % 8 / 2;
        const unsigned left = words[lane / 4 * 4 + pair].of[k / 8 * 2 + row_half];
        const unsigned right = words[column * 4 + pair].of[4 + k / 8];
        d[i] += half(left, k) * half(right, k);
      }
    }
    return 0;
  });
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_16x8x16(d, a, b0, b1, cvt_f32_f16);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_16x8x16(d, a, b0, b1,
                   [](unsigned short x) { return bits_as<float>(unsigned(x) << 16); });
}

// d += a b with TF32 operands, whose low 13 bits are ignored.
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32;
  const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto number = [](unsigned word) { return bits_as<float>(word & ~0x1fffu); };
  with_words(own, [&](const auto* words) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 8; ++k) {
        const auto& left = words[lane / 4 * 4 + k % 4];
        const auto& right = words[(lane % 4 * 2 + i % 2) * 4 + k % 4];
        d[i] += number(left.of[k / 4 * 2 + i / 2]) * number(right.of[4 + k / 4]);
      }
    }
    return 0;
  });
}

}  // namespace ptx
