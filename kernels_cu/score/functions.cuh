// The functions that the text of a modification calls, of float and of double. NaN stays NaN, as in
// NumPy, and whole quotients round down.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"

template <class T>
__device__ inline T mod_infinity();
template <>
__device__ inline float mod_infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ inline double mod_infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000LL);
}

__device__ inline float mod_exp2(float x) { return ptx::ex2_approx(x); }
__device__ inline double mod_exp2(double x) { return ::exp2(x); }
__device__ inline float mod_exp(float x) { return ::expf(x); }
__device__ inline double mod_exp(double x) { return ::exp(x); }
__device__ inline float mod_expm1(float x) { return ::expm1f(x); }
__device__ inline double mod_expm1(double x) { return ::expm1(x); }
__device__ inline float mod_log2(float x) { return ::log2f(x); }
__device__ inline double mod_log2(double x) { return ::log2(x); }
__device__ inline float mod_log1p(float x) { return ::log1pf(x); }
__device__ inline double mod_log1p(double x) { return ::log1p(x); }
__device__ inline float mod_sqrt(float x) { return ::sqrtf(x); }
__device__ inline double mod_sqrt(double x) { return ::sqrt(x); }
__device__ inline float mod_sin(float x) { return ::sinf(x); }
__device__ inline double mod_sin(double x) { return ::sin(x); }
__device__ inline float mod_cos(float x) { return ::cosf(x); }
__device__ inline double mod_cos(double x) { return ::cos(x); }
__device__ inline float mod_floor(float x) { return ::floorf(x); }
__device__ inline double mod_floor(double x) { return ::floor(x); }
__device__ inline float mod_ceil(float x) { return ::ceilf(x); }
__device__ inline double mod_ceil(double x) { return ::ceil(x); }
__device__ inline float mod_trunc(float x) { return ::truncf(x); }
__device__ inline double mod_trunc(double x) { return ::trunc(x); }
__device__ inline float mod_rint(float x) { return ::rintf(x); }
__device__ inline double mod_rint(double x) { return ::rint(x); }

// 1 / x, of a float to 1 ulp.
__device__ inline float mod_reciprocal(float x) { return ptx::rcp_approx(x); }
__device__ inline double mod_reciprocal(double x) { return 1 / x; }

// 1 / (1 + 2^x), so that tanh(x) = 1 - 2 mod_logistic(2 log2(e) x), to 2^-23 near 0 too: good for
// float16, and two approximations where tanhf() takes some 15 instructions.
__device__ inline float mod_logistic(float x) { return ptx::rcp_approx(1 + ptx::ex2_approx(x)); }

__device__ inline float mod_tanh(float x) { return ::tanhf(x); }
__device__ inline double mod_tanh(double x) { return ::tanh(x); }

// To 2^-11, as good as bfloat16.
__device__ inline float mod_tanh_approx(float x) { return ptx::tanh_approx(x); }

__device__ inline int mod_abs(int x) { return ::abs(x); }
__device__ inline float mod_abs(float x) { return ::fabsf(x); }
__device__ inline double mod_abs(double x) { return ::fabs(x); }

template <class T>
__device__ inline T mod_min(T x, T y) {
  return x < y || x != x ? x : y;
}
__device__ inline float mod_min(float x, float y) { return ptx::min_nan(x, y); }

template <class T>
__device__ inline T mod_max(T x, T y) {
  return x > y || x != x ? x : y;
}
__device__ inline float mod_max(float x, float y) { return ptx::max_nan(x, y); }
__device__ inline int mod_min(int x, int y) { return ::min(x, y); }
__device__ inline int mod_max(int x, int y) { return ::max(x, y); }

// -1, 0 or 1, and NaN of NaN.
template <class T>
__device__ inline T mod_sign(T x) {
  return x != x ? x : T((x > 0) - (x < 0));
}

// Whole quotients and remainders, rounded down; of integers, 0 where the divisor is.
__device__ inline int mod_floordiv(int x, int y) {
  // -2^31 / -1 does not fit, and wraps.
  if (y == 0 || y == -1) return static_cast<int>(y * static_cast<unsigned>(x));
  const int quotient = x / y;
  return quotient - ((x % y != 0) & ((x < 0) != (y < 0)));
}
__device__ inline int mod_mod(int x, int y) {
  if (y == 0 || y == -1) return 0;
  const int rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
__device__ inline unsigned long long mod_floordiv(unsigned long long x, unsigned long long y) {
  return y == 0 ? 0 : x / y;
}
__device__ inline unsigned long long mod_mod(unsigned long long x, unsigned long long y) {
  return y == 0 ? 0 : x % y;
}

// Of reals as NumPy and Python have them: the remainder is exact but for one rounding, and has the
// divisor's sign.
__device__ inline float mod_fmod(float x, float y) { return ::fmodf(x, y); }
__device__ inline double mod_fmod(double x, double y) { return ::fmod(x, y); }

template <class T>
__device__ inline T mod_real_mod(T x, T y) {
  const T rest = mod_fmod(x, y);
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
template <class T>
__device__ inline T mod_real_floordiv(T x, T y) {
  if (y == 0) return x / y;
  const T quotient = (x - mod_real_mod(x, y)) / y;
  const T below = mod_floor(quotient);
  return quotient - below > T(0.5) ? below + 1 : below;
}
__device__ inline float mod_mod(float x, float y) { return mod_real_mod(x, y); }
__device__ inline double mod_mod(double x, double y) { return mod_real_mod(x, y); }
__device__ inline float mod_floordiv(float x, float y) { return mod_real_floordiv(x, y); }
__device__ inline double mod_floordiv(double x, double y) { return mod_real_floordiv(x, y); }

// Shifts by any count: by all bits or more, or by a negative count, nothing but signs is left.
__device__ inline int mod_shl(int x, int count) {
  return static_cast<unsigned>(count) < 32 ? static_cast<int>(static_cast<unsigned>(x) << count)
                                           : 0;
}
__device__ inline int mod_shr(int x, int count) {
  return x >> (static_cast<unsigned>(count) < 32 ? count : 31);
}
__device__ inline unsigned long long mod_shl(unsigned long long x, unsigned long long count) {
  return count < 64 ? x << count : 0;
}
__device__ inline unsigned long long mod_shr(unsigned long long x, unsigned long long count) {
  return count < 64 ? x >> count : 0;
}
