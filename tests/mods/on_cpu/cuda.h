// The part of CUDA that the functions of a modification need on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
using std::max;
using std::min;

template <class To, class From>
To bits_as(From x) {
  To result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline double __dmul_rn(double x, double y) { return x * y; }
