// Order-independent sums: numbers are added as integers, so that any order gives the same bits.
//
// Numbers of magnitude up to M < 2^e are stored as two integers each: x = high u + low u 2^-s,
// rounded to nearest. For fewer than 2^b numbers, u = 2^(e + b - 62) and s = 63 - b keep the sums
// of `high` and of `low` within 2^62. The error of a number is at most u 2^-s / 2, or
// 2^(e + 2b - 126).
#pragma once

#include "scheduler/sequences.cuh"

// Conversions between powers of two and their exponents.
template <class T>
struct Binary;
template <>
struct Binary<float> {
  static constexpr int largest = 126;
  // Returns an exponent with 2^exponent > x, for x > 0. It is the least one if x is normal.
  __device__ static int exponent_above(float x) { return (__float_as_int(x) >> 23) - 126; }
  __device__ static float power(int exponent) { return __int_as_float((exponent + 127) << 23); }
};
template <>
struct Binary<double> {
  static constexpr int largest = 1022;
  __device__ static int exponent_above(double x) {
    return int(__double_as_longlong(x) >> 52) - 1022;
  }
  __device__ static double power(int exponent) {
    return __longlong_as_double((exponent + 1023ll) << 52);
  }
};

struct alignas(16) Fixed {
  int64 high;
  int64 low;
};

// Unit of the fixed-point representation of numbers of type T.
template <class T>
struct FixedUnit {
  int exponent;  // log2 of 1 / u, limited to the range of type T
  int shift;     // s in the formula at the top of this file

  FixedUnit() = default;
  __device__ FixedUnit(T largest, int bits)
      : exponent(min(Binary<T>::largest, 62 - bits - Binary<T>::exponent_above(largest))),
        shift(63 - bits) {}

  __device__ Fixed to_fixed(T x) const {
    const T scaled = x * Binary<T>::power(exponent);
    const T whole = rint(scaled);
    return {int64(whole), int64(rint((scaled - whole) * Binary<T>::power(shift)))};
  }

  __device__ double value(const Fixed& x) const {
    const double low = double(x.low) * Binary<double>::power(-shift);
    return (double(x.high) + low) * Binary<double>::power(-exponent);
  }
};

__device__ inline void add(Fixed* sum, const Fixed& x) {
  using Word = unsigned long long;
  if (x.high != 0) atomicAdd(reinterpret_cast<Word*>(&sum->high), Word(x.high));
  if (x.low != 0) atomicAdd(reinterpret_cast<Word*>(&sum->low), Word(x.low));
}

// Per-CTA cache of sums in shared memory. A slot belongs to the first element that maps to it;
// other elements are added in global memory. Sums of integers are the same either way.
struct FixedSlots {
  static constexpr int count = 512;
  static constexpr int words = 4;  // 32-bit words of a `Fixed`, each added by its own atomic
  unsigned owners[count];          // 0 if the slot is free, otherwise element / count + 1
  unsigned sums[words][count];

  // Called by all threads of the CTA. Frees all slots.
  __device__ void clear() {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      owners[i] = 0;
#pragma unroll
      for (int word = 0; word < words; ++word) sums[word][i] = 0;
    }
    __syncthreads();
  }

  __device__ void add(Fixed* memory, int64 element, const Fixed& x) {
    const int slot = element % count;
    const unsigned owner = element / count + 1;
    unsigned holder = owners[slot];
    if (holder == 0) {
      holder = atomicCAS(&owners[slot], 0u, owner);
      if (holder == 0) holder = owner;
    }
    if (holder == owner) {
      add(0, slot, x.high);
      add(2, slot, x.low);
    } else {
      ::add(memory + element, x);
    }
  }

  // Called by all threads of the CTA. Adds the sums to `memory`, and frees the slots.
  __device__ void flush(Fixed* memory) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      if (owners[i] == 0) continue;
      const int64 element = int64(owners[i] - 1) * count + i;
      ::add(memory + element, {number(0, i), number(2, i)});
    }
    __syncthreads();
    clear();
  }

 private:
  // Adds a 64-bit number as two 32-bit words. The carry of the lower word goes into the upper word.
  __device__ void add(int word, int slot, int64 x) {
    if (x == 0) return;
    const unsigned low = unsigned(x);
    const unsigned before = atomicAdd(&sums[word][slot], low);
    const bool carries = before + low < low;
    atomicAdd(&sums[word + 1][slot], unsigned(x >> 32) + carries);
  }

  __device__ int64 number(int word, int slot) const {
    return int64((unsigned long long)(sums[word + 1][slot]) << 32 | sums[word][slot]);
  }
};
