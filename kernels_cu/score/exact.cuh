// Functions of reals for values whose exact bits matter: values that are compared, rounded, or used
// as an index. All kernels and all tiles compute the same bits, which are those of NumPy except for
// the approximated functions. Subnormal numbers are kept, and no product is contracted to an FMA.
//
// Included by score/functions.cuh.
#pragma once

// Long functions are called rather than inlined, because kernels unroll their loops over scores.
// With a copy of sinf() for each score, ptxas took more than four minutes for one kernel.
#define LONG_FUNCTION __device__ __noinline__ inline

__device__ inline float exact_add(float x, float y) { return ptx::add_rn(x, y); }
__device__ inline double exact_add(double x, double y) { return x + y; }
__device__ inline float exact_sub(float x, float y) { return ptx::sub_rn(x, y); }
__device__ inline double exact_sub(double x, double y) { return x - y; }
__device__ inline float exact_mul(float x, float y) { return ptx::mul_rn(x, y); }
__device__ inline double exact_mul(double x, double y) { return __dmul_rn(x, y); }
__device__ inline float exact_div(float x, float y) { return ptx::div_rn(x, y); }
__device__ inline double exact_div(double x, double y) { return x / y; }
__device__ inline float exact_neg(float x) { return ptx::neg(x); }
__device__ inline double exact_neg(double x) { return -x; }
__device__ inline float exact_abs(float x) { return ptx::abs(x); }
__device__ inline double exact_abs(double x) { return ::fabs(x); }
__device__ inline float exact_sqrt(float x) { return ptx::sqrt_rn(x); }
__device__ inline double exact_sqrt(double x) { return ::sqrt(x); }
__device__ inline float exact_floor(float x) { return ptx::cvt_rmi(x); }
__device__ inline double exact_floor(double x) { return ::floor(x); }
__device__ inline float exact_ceil(float x) { return ptx::cvt_rpi(x); }
__device__ inline double exact_ceil(double x) { return ::ceil(x); }
__device__ inline float exact_trunc(float x) { return ptx::cvt_rzi(x); }
__device__ inline double exact_trunc(double x) { return ::trunc(x); }
__device__ inline float exact_rint(float x) { return ptx::cvt_rni(x); }
__device__ inline double exact_rint(double x) { return ::rint(x); }

__device__ inline bool exact_lt(float x, float y) { return ptx::setp_lt(x, y); }
__device__ inline bool exact_lt(double x, double y) { return x < y; }
__device__ inline bool exact_le(float x, float y) { return ptx::setp_le(x, y); }
__device__ inline bool exact_le(double x, double y) { return x <= y; }
__device__ inline bool exact_eq(float x, float y) { return ptx::setp_eq(x, y); }
__device__ inline bool exact_eq(double x, double y) { return x == y; }
template <class T>
__device__ inline bool exact_ne(T x, T y) {
  return !exact_eq(x, y);
}

__device__ inline float exact_narrowed(double x) { return ptx::cvt_rn_f32_f64(x); }
__device__ inline double exact_widened(float x) { return ptx::cvt_f64_f32(x); }

// Minimum and maximum, which are NaN if either argument is.
__device__ inline float exact_min(float x, float y) { return ptx::min_nan(x, y); }
__device__ inline double exact_min(double x, double y) { return x < y || x != x ? x : y; }
__device__ inline float exact_max(float x, float y) { return ptx::max_nan(x, y); }
__device__ inline double exact_max(double x, double y) { return x > y || x != x ? x : y; }

// Returns -1, 0 or 1, and NaN for NaN.
template <class T>
__device__ inline T exact_sign(T x) {
  return exact_lt(T(0), x) ? T(1) : exact_lt(x, T(0)) ? T(-1) : exact_eq(x, T(0)) ? T(0) : x;
}

// Conversions to integers saturate; NaN becomes 0.
__device__ inline int exact_int(float x) { return ptx::cvt_rzi_s32(x); }
__device__ inline int exact_int(double x) {
  if (!(x > -2147483648.0)) return x != x ? 0 : -2147483647 - 1;
  return x < 2147483647.0 ? int(x) : 2147483647;
}
template <class T>
__device__ inline unsigned long long exact_word(T x) {
  if (!(x > 0)) return 0;
  return x < T(18446744073709551616.0) ? static_cast<unsigned long long>(x) : ~0ull;
}

// Returns the remainder of a division whose quotient is rounded toward zero. The float version
// computes in double and is exact.
LONG_FUNCTION double exact_fmod(double x, double y) { return ::fmod(x, y); }
__device__ inline float exact_fmod(float x, float y) {
  return exact_narrowed(exact_fmod(ptx::cvt_f64_f32(x), ptx::cvt_f64_f32(y)));
}

__device__ inline float exact_with_sign(float x, float sign) { return ::copysignf(x, sign); }
__device__ inline double exact_with_sign(double x, double sign) { return ::copysign(x, sign); }

// Remainder with the sign of the divisor, and floor division. Both take the same steps as NumPy.
template <class T>
__device__ inline T exact_mod(T x, T y) {
  const T rest = exact_fmod(x, y);
  if (exact_eq(y, T(0))) return rest;
  if (exact_eq(rest, T(0))) return exact_with_sign(T(0), y);
  return exact_lt(rest, T(0)) != exact_lt(y, T(0)) ? exact_add(rest, y) : rest;
}
template <class T>
__device__ inline T exact_floordiv(T x, T y) {
  if (exact_eq(y, T(0))) return exact_div(x, y);
  const T rest = exact_fmod(x, y);
  T quotient = exact_div(exact_sub(x, rest), y);
  const bool is_below = exact_lt(rest, T(0)) != exact_lt(y, T(0)) && exact_ne(rest, T(0));
  if (is_below) quotient = exact_sub(quotient, T(1));
  if (exact_eq(quotient, T(0))) return exact_with_sign(T(0), exact_div(x, y));
  const T whole = exact_floor(quotient);
  return exact_lt(T(0.5), exact_sub(quotient, whole)) ? exact_add(whole, T(1)) : whole;
}

// Functions approximated within 2 ulp. They may treat subnormal arguments and results as 0.
#define EXACT_FUNCTION(name)                                              \
  __device__ inline float exact_##name(float x) { return ::name##f(x); }  \
  __device__ inline double exact_##name(double x) { return ::name(x); }
EXACT_FUNCTION(exp)
EXACT_FUNCTION(exp2)
EXACT_FUNCTION(expm1)
EXACT_FUNCTION(log)
EXACT_FUNCTION(log2)
EXACT_FUNCTION(log10)
EXACT_FUNCTION(log1p)
EXACT_FUNCTION(tanh)
#undef EXACT_FUNCTION
LONG_FUNCTION float exact_sin(float x) { return ::sinf(x); }
LONG_FUNCTION double exact_sin(double x) { return ::sin(x); }
LONG_FUNCTION float exact_cos(float x) { return ::cosf(x); }
LONG_FUNCTION double exact_cos(double x) { return ::cos(x); }

LONG_FUNCTION double exact_power(double x, double n) { return ::pow(x, n); }
__device__ inline float exact_power(float x, float n) {
  return exact_narrowed(exact_power(ptx::cvt_f64_f32(x), ptx::cvt_f64_f32(n)));
}
#undef LONG_FUNCTION
