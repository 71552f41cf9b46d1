// Host versions of the products in kernels_cu/ptx/wgmma.cuh.
#pragma once

#include "tile/element.cuh"
#include "ptx/sm90a.cuh"

// An operand in shared memory, given its matrix descriptor (PTX ISA, "Matrix-descriptor format for
// wgmma").
struct SharedOperand {
  unsigned start, leading, stride;
  int row_bytes;  // of the swizzle

  explicit SharedOperand(unsigned long long bits)
      : start((bits & 0x3fff) * 16),
        leading((bits >> 16 & 0x3fff) * 16),
        stride((bits >> 32 & 0x3fff) * 16),
        row_bytes(bits >> 62 == 1 ? 128 : 64) {}

  unsigned short at(unsigned address) const {
    unsigned short element;
    std::memcpy(&element, shared_memory + ptx::swizzled(address, row_bytes), sizeof element);
    return element;
  }
  // Return an element of a row (m or n) and k. In the first function k is contiguous, in the second
  // the rows are.
  unsigned short k_contiguous(int row, int k) const {
    return at(start + row / 8 * stride + row % 8 * row_bytes + 2 * k);
  }
  unsigned short row_contiguous(int row, int k) const {
    const int of_box = row_bytes / 2;
    return at(start + row / of_box * leading + k / 8 * stride + k % 8 * row_bytes +
              row % of_box * 2);
  }
};

template <class Element, int N>
struct Wgmma {
  static void multiply(float (&d)[N / 2], unsigned long long a, unsigned long long b,
                       int accumulate) {
    const SharedOperand left(a), right(b);
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    add(
        d, accumulate, [&](int half, int k) { return left.k_contiguous(row + 8 * half, k); },
        [&](int column, int k) { return right.k_contiguous(column, k); });
  }
  static void multiply_k_contiguous(float (&d)[N / 2], const unsigned* a, unsigned long long b,
                                    int accumulate) {
    const SharedOperand right(b);
    multiply_registers(d, a, accumulate,
                       [&](int column, int k) { return right.k_contiguous(column, k); });
  }
  static void multiply_n_contiguous(float (&d)[N / 2], const unsigned* a, unsigned long long b,
                                    int accumulate) {
    const SharedOperand right(b);
    multiply_registers(d, a, accumulate,
                       [&](int column, int k) { return right.row_contiguous(column, k); });
  }

 private:
  template <class Right>
  static void multiply_registers(float (&d)[N / 2], const unsigned* a, int accumulate,
                                 Right right) {
    const unsigned own[4] = {a[0], a[1], a[2], a[3]};
    ptx::with_words(own, [&](const auto* words) {
      const auto left = [&](int half, int k) -> unsigned short {
        const int lane = threadIdx.x % 32 / 4 * 4 + k % 8 / 2;
        return words[lane].of[k / 8 * 2 + half] >> k % 2 * 16;
      };
      add(d, accumulate, left, right);
      return 0;
    });
  }

  // d += a b, given left(half, k) of the lane's two rows and right(column, k).
  template <class Left, class Right>
  static void add(float (&d)[N / 2], int accumulate, Left left, Right right) {
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      float sum = accumulate ? d[i] : 0;
      for (int k = 0; k < 16; ++k) sum += to_float(left(i / 2 % 2, k)) * to_float(right(column, k));
      d[i] = sum;
    }
  }

  static float to_float(unsigned short bits) {
    return std::is_same_v<Element, half_t> ? ptx::cvt_f32_f16(bits)
                                           : bits_as<float>(unsigned(bits) << 16);
  }
};
