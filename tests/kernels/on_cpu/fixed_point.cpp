// Library that sums numbers with `backward/inputs/fixed_point.cuh`, by the threads of one CTA.
#include "cuda_on_cpu.h"

#include <cmath>

using std::rint;

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof x);
  To result;
  std::memcpy(&result, &x, sizeof x);
  return result;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  return expected;
}

#include "backward/inputs/fixed_point.cuh"

template <class T>
void add_up(const T* numbers, const long long* elements, int count, T largest, int bits,
            Fixed* sums, double* values, int size) {
  static FixedSlots slots;
  const FixedUnit<T> unit(largest, bits);
  run_block(64, [&] {
    slots.clear();
    // Two passes, like a CTA that processes one query tile after another.
    for (int begin : {0, count / 2}) {
      const int end = begin == 0 ? count / 2 : count;
      for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        slots.add(sums, elements[i], unit.to_fixed(numbers[i]));
      }
      slots.flush(sums);
    }
  });
  for (int i = 0; i < size; ++i) values[i] = unit.value(sums[i]);
}

extern "C" void add_floats(const float* numbers, const long long* elements, int count,
                           float largest, int bits, Fixed* sums, double* values, int size) {
  add_up(numbers, elements, count, largest, bits, sums, values, size);
}
extern "C" void add_doubles(const double* numbers, const long long* elements, int count,
                            double largest, int bits, Fixed* sums, double* values, int size) {
  add_up(numbers, elements, count, largest, bits, sums, values, size);
}
