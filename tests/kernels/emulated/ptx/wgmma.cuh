// Host versions of the products in kernels_cu/ptx/wgmma.cuh whose left operand is in registers and
// whose right operand has k contiguous in shared memory.
#pragma once

#include "tile/element.cuh"
#include "ptx/sm90a.cuh"

// A matrix descriptor (PTX ISA, "Matrix-descriptor format for wgmma").
struct MatrixDescriptor {
  unsigned start, stride;
  int row_bytes;  // of the swizzle

  explicit MatrixDescriptor(unsigned long long bits)
      : start((bits & 0x3fff) * 16),
        stride((bits >> 32 & 0x3fff) * 16),
        row_bytes(bits >> 62 == 1 ? 128 : 64) {}

  unsigned short operator()(int row, int k) const {
    unsigned short element;
    const unsigned address = start + row / 8 * stride + row % 8 * row_bytes + 2 * k;
    std::memcpy(&element, shared_memory + ptx::swizzled(address, row_bytes), sizeof element);
    return element;
  }
};

template <class Element, int N>
struct Wgmma {
  static void multiply_k_contiguous(float (&d)[N / 2], const unsigned* a, unsigned long long b,
                                    int accumulate) {
    const int lane = threadIdx.x % 32;
    const unsigned own[4] = {a[0], a[1], a[2], a[3]};
    const MatrixDescriptor right(b);
    ptx::with_words(own, [&](const auto* words) {
      for (int i = 0; i < N / 2; ++i) {
        const int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = accumulate ? d[i] : 0;
        for (int k = 0; k < 16; ++k) {
          const unsigned word = words[lane / 4 * 4 + k % 8 / 2].of[k / 8 * 2 + half];
          sum += to_float(word >> k % 2 * 16) * to_float(right(column, k));
        }
        d[i] = sum;
      }
      return 0;
    });
  }

 private:
  static float to_float(unsigned short bits) {
    return std::is_same_v<Element, half_t> ? ptx::cvt_f32_f16(bits)
                                           : bits_as<float>(unsigned(bits) << 16);
  }
};
