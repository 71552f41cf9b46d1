// Functions that the generated source of a modification calls: functions of integers, and functions
// of float and double for values that only enter a score. Values that are compared, rounded or used
// as an index, and all values of a mask, use the functions of score/exact.cuh instead.
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

#include "score/exact.cuh"

__device__ inline float mod_exp2(float x) { return ptx::ex2_approx(x); }
__device__ inline double mod_exp2(double x) { return ::exp2(x); }

// Functions of the CUDA math library, for float and double.
#define MOD_FUNCTION(name)                                              \
  __device__ inline float mod_##name(float x) { return ::name##f(x); }  \
  __device__ inline double mod_##name(double x) { return ::name(x); }
MOD_FUNCTION(exp)
MOD_FUNCTION(expm1)
MOD_FUNCTION(log2)
MOD_FUNCTION(log10)
MOD_FUNCTION(log1p)
MOD_FUNCTION(sqrt)
MOD_FUNCTION(tanh)
#undef MOD_FUNCTION
template <class T>
__device__ T mod_sin(T x) {
  return exact_sin(x);
}
template <class T>
__device__ T mod_cos(T x) {
  return exact_cos(x);
}

// Returns 1 / x, within 1 ulp for float.
__device__ inline float mod_reciprocal(float x) { return ptx::rcp_approx(x); }
__device__ inline double mod_reciprocal(double x) { return 1 / x; }

// Returns 1 / (1 + 2^x). tanh(x) = 1 - 2 mod_logistic(2 log2(e) x) then has an absolute error of
// 2^-23 for all x, which suffices for float16. mod_logistic() takes two approximate instructions;
// tanhf() takes about 15 instructions.
__device__ inline float mod_logistic(float x) { return ptx::rcp_approx(1 + ptx::ex2_approx(x)); }

// Returns tanh(x) with a relative error of about 2^-11, which suffices for bfloat16.
__device__ inline float mod_tanh_approx(float x) { return ptx::tanh_approx(x); }

__device__ inline int mod_abs(int x) { return x < 0 ? int(0u - unsigned(x)) : x; }
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

// Returns x to the power n, a constant that is not a small integer. Finite negative x yield NaN
// unless n is an integer. For double, pow() is as fast, since no hardware logarithm exists.
__device__ inline float mod_power_approx(float x, float n) {
  const float size = ::fabsf(x);
  const float power = mod_exp2(n * mod_log2(size));
  const bool is_nan = x < 0 && size < mod_infinity<float>() && n != ::truncf(n);
  const bool is_negative = x < 0 && ::truncf(n / 2) * 2 != n && n == ::truncf(n);
  return is_nan ? 0 * mod_infinity<float>() : is_negative ? -power : power;
}
__device__ inline double mod_power_approx(double x, double n) { return exact_power(x, n); }

// Returns the power of two by which a very large or very small divisor y is multiplied, so that its
// inverse is a normal number.
template <class T>
__device__ inline T mod_quotient_scale(T y) {
  const T large = T(18446744073709551616.0), size = mod_abs(y);
  return size > large ? 1 / large : size < 1 / large ? large : T(1);
}

// Returns x / y * scale within 1 ulp, given 1 / y. The quotient is corrected by its remainder
// (Markstein 1990, IBM J. Res. Dev. 34), unless the corrected quotient is NaN or infinite.
template <class T>
__device__ inline T mod_quotient(T x, T y, T inverse, T scale) {
  const T quotient = x * inverse;
  const T better = fma(fma(-quotient, y, x), inverse, quotient);
  return (mod_abs(better) < mod_infinity<T>() ? better : quotient) * scale;
}

// Returns x * factor + sum, saturated to the largest finite number if x is finite. A bias of the
// lowest finite number thus does not mask a row's only key. The fast variant rounds toward zero.
__device__ inline float mod_fast_finite_sum(float x, float factor, float sum) {
  return ptx::fma_rz(x, factor, sum);
}
template <class T>
__device__ inline T mod_finite_sum(T x, T factor, T sum) {
  const T result = fma(x, factor, sum);
  const T largest = sizeof(T) == 4 ? T(3.4028234663852886e38) : T(1.7976931348623157e308);
  if (mod_abs(x) == mod_infinity<T>() || mod_abs(result) < mod_infinity<T>()) return result;
  return result > 0 ? largest : result < 0 ? -largest : result;
}

// Integer arithmetic that wraps, done in unsigned because overflow of int is undefined in C++.
__device__ inline int mod_add(int x, int y) { return int(unsigned(x) + unsigned(y)); }
__device__ inline int mod_sub(int x, int y) { return int(unsigned(x) - unsigned(y)); }
__device__ inline int mod_mul(int x, int y) { return int(unsigned(x) * unsigned(y)); }
__device__ inline int mod_sign(int x) { return (x > 0) - (x < 0); }
// Computed as ~x + 1, because ptxas of CUDA 13.0 loses a minus sign for sm_90 and later: it
// compiles min(min(a, -b), c) as min(min(a, b), c), and likewise max; ptxas of CUDA 13.5 does not.
// The complement is inline assembly, since the compiler would otherwise recognize the negation.
__device__ inline int mod_neg(int x) { return int(unsigned(ptx::not_b32(x)) + 1u); }

// Returns the int nearest to x.
__device__ inline int mod_saturated(long long x) {
  return int(max(-2147483648LL, min(x, 2147483647LL)));
}

// Floor division and its remainder, as in Python; the result is 0 if the divisor is 0.
__device__ inline int mod_floordiv(int x, int y) {
  if (y == 0) return 0;
  // -2^31 / -1 does not fit in an int, so the quotient wraps.
  if (y == -1) return mod_neg(x);
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

// Shifts by any count. A negative count, or one of at least the width, shifts all bits out: the
// result is 0, or -1 for a right shift of a negative int.
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
