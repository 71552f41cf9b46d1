// Sums of numbers that come in no fixed order, with the same bits every time: of integers.
//
// A number x of magnitude below M is high u + low u 2^-s, rounded to nearest. Of fewer than 2^b
// numbers, with M <= 2^e, u = 2^(e + b - 62) and s = 63 - b: then the sums of high and of low are
// both within 2^62. A number is off by u 2^-s / 2 = 2^(e + 2b - 126) at most.
#pragma once

#include "grid/sequences.cuh"

// Powers of two by their exponents.
template <class T>
struct Binary;
template <>
struct Binary<float> {
  static constexpr int largest = 126;
  // Of a power that a positive number is below, by less than a factor of two if it is normal.
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

// What numbers of type T are counted in.
template <class T>
struct FixedUnit {
  int exponent;  // of 1 / u: where that is no number of type T, of the largest that is
  int shift;     // s

  FixedUnit() = default;
  __device__ FixedUnit(T largest, int bits)
      : exponent(min(Binary<T>::largest, 62 - bits - Binary<T>::exponent_above(largest))),
        shift(63 - bits) {}

  __device__ Fixed of(T x) const {
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

// A thread block's sums for elements of an array in memory that it adds to often: those that come
// first have a slot. Which ones these are makes no difference to the bits.
struct FixedSlots {
  static constexpr int count = 512;
  static constexpr int words = 4;  // of a number: shared memory adds 32 bits at a time
  unsigned owners[count];          // 0, or 1 more than the element's number among those of a slot
  unsigned sums[words][count];

  // By all threads.
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
    unsigned found = owners[slot];
    if (found == 0) {
      found = atomicCAS(&owners[slot], 0u, owner);
      if (found == 0) found = owner;
    }
    if (found == owner) {
      add(0, slot, x.high);
      add(2, slot, x.low);
    } else {
      ::add(memory + element, x);
    }
  }

  // By all threads: adds them to memory.
  __device__ void empty(Fixed* memory) {
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
  // 64 bits, by what the lower ones carry.
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
