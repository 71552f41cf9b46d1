// Interval arithmetic: the range of a value, given ranges of the query and key positions. The code
// that cupy_flash/mods/codegen/bounds.py generates for a mask calls these functions. A range may be too
// wide, but never too narrow. A value that is unknown, or may wrap, has the full range of its type.
//
// Rounding to nearest is monotonic, and masks compute values with the same functions as these
// bounds (score/exact.cuh). So the bounds of exactly rounded operations need no margin.
#pragma once

#include "score/functions.cuh"

// How many (query, key) pairs of a block are visible: none, some or all. `some` also means unknown.
enum class Visibility { none, some, all };

struct Truth {
  bool may_be_true;
  bool may_be_false;

  __device__ static Truth any() { return {true, true}; }
};

// Range of 32-bit integers. The bounds have 64 bits, so that sums and products do not wrap.
struct Ints {
  long long low;
  long long high;

  static constexpr long long lowest = -(1LL << 31);
  static constexpr long long highest = (1LL << 31) - 1;

  __device__ static Ints any() { return {lowest, highest}; }
};

struct Words {
  unsigned long long low;
  unsigned long long high;

  __device__ static Words any() { return {0, ~0ull}; }
};

template <class Real>
struct RealRange {
  Real low;
  Real high;
  bool may_be_nan;

  __device__ static RealRange any() {
    return {-mod_infinity<Real>(), mod_infinity<Real>(), true};
  }
};

__device__ inline Visibility visibility_of(Truth x) {
  return !x.may_be_true ? Visibility::none : x.may_be_false ? Visibility::some : Visibility::all;
}

// ---- Ranges of a single value

__device__ inline Truth range_at(bool x) { return {x, !x}; }
__device__ inline Ints range_at(int x) { return {x, x}; }
__device__ inline Words range_at(unsigned long long x) { return {x, x}; }
template <class Real>
__device__ RealRange<Real> real_at(Real x) {
  return exact_ne(x, x) ? RealRange<Real>::any() : RealRange<Real>{x, x, false};
}
__device__ inline RealRange<float> range_at(float x) { return real_at(x); }
__device__ inline RealRange<double> range_at(double x) { return real_at(x); }

// ---- Unions of ranges

__device__ inline Truth range_union(Truth x, Truth y) {
  return {x.may_be_true || y.may_be_true, x.may_be_false || y.may_be_false};
}
__device__ inline Ints range_union(Ints x, Ints y) {
  return {min(x.low, y.low), max(x.high, y.high)};
}
__device__ inline Words range_union(Words x, Words y) {
  return {min(x.low, y.low), max(x.high, y.high)};
}
template <class Real>
__device__ RealRange<Real> range_union(RealRange<Real> x, RealRange<Real> y) {
  return {exact_min(x.low, y.low), exact_max(x.high, y.high), x.may_be_nan || y.may_be_nan};
}

template <class Range>
__device__ Range range_where(Truth condition, Range x, Range y) {
  return !condition.may_be_false ? x : !condition.may_be_true ? y : range_union(x, y);
}

// ---- Bools

__device__ inline Truth range_and(Truth x, Truth y) {
  return {x.may_be_true && y.may_be_true, x.may_be_false || y.may_be_false};
}
__device__ inline Truth range_or(Truth x, Truth y) {
  return {x.may_be_true || y.may_be_true, x.may_be_false && y.may_be_false};
}
__device__ inline Truth range_not(Truth x) { return {x.may_be_false, x.may_be_true}; }
__device__ inline Truth range_xor(Truth x, Truth y) {
  return {(x.may_be_true && y.may_be_false) || (x.may_be_false && y.may_be_true),
          (x.may_be_true && y.may_be_true) || (x.may_be_false && y.may_be_false)};
}

// ---- Comparisons

__device__ inline bool may_be_nan(Ints) { return false; }
__device__ inline bool may_be_nan(Words) { return false; }
template <class Real>
__device__ bool may_be_nan(RealRange<Real> x) {
  return x.may_be_nan;
}

template <class T>
__device__ bool is_less(T x, T y) {
  return x < y;
}
__device__ inline bool is_less(float x, float y) { return exact_lt(x, y); }

// NaN is not less than, not greater than and not equal to anything.
template <class Range>
__device__ Truth range_lt(Range x, Range y) {
  return {is_less(x.low, y.high), !is_less(x.high, y.low) || may_be_nan(x) || may_be_nan(y)};
}
template <class Range>
__device__ Truth range_le(Range x, Range y) {
  return {!is_less(y.high, x.low), is_less(y.low, x.high) || may_be_nan(x) || may_be_nan(y)};
}
template <class Range>
__device__ Truth range_eq(Range x, Range y) {
  const bool is_one_value = !is_less(x.low, x.high) && !is_less(y.low, y.high) &&
                            !is_less(x.low, y.low) && !is_less(y.low, x.low);
  return {!is_less(y.high, x.low) && !is_less(x.high, y.low),
          !is_one_value || may_be_nan(x) || may_be_nan(y)};
}
template <class Range>
__device__ Truth range_ne(Range x, Range y) {
  return range_not(range_eq(x, y));
}
template <class Range>
__device__ Truth range_is_nan(Range x) {
  return {may_be_nan(x), true};
}

// ---- Integers

// Returns whether both bounds fit in an int. If so, no integer between them wraps.
__device__ inline bool are_ints(long long low, long long high) {
  return low >= Ints::lowest && high <= Ints::highest;
}

// Returns the range of an int result with these 64-bit bounds: the full range if one may wrap.
__device__ inline Ints range_of(long long low, long long high) {
  return are_ints(low, high) ? Ints{low, high} : Ints::any();
}

__device__ inline Ints range_add(Ints x, Ints y) { return range_of(x.low + y.low, x.high + y.high); }
__device__ inline Ints range_sub(Ints x, Ints y) { return range_of(x.low - y.high, x.high - y.low); }
__device__ inline Ints range_neg(Ints x) { return range_of(-x.high, -x.low); }

__device__ inline Ints range_mul(Ints x, Ints y) {
  const long long a = x.low * y.low, b = x.low * y.high, c = x.high * y.low, d = x.high * y.high;
  return range_of(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}

__device__ inline Ints range_abs(Ints x) {
  const long long low = x.low > 0 ? x.low : x.high < 0 ? -x.high : 0;
  return range_of(low, max(-x.low, x.high));
}
__device__ inline Ints range_sign(Ints x) {
  return {(x.low > 0) - (x.low < 0), (x.high > 0) - (x.high < 0)};
}
__device__ inline Ints range_min(Ints x, Ints y) { return {min(x.low, y.low), min(x.high, y.high)}; }
__device__ inline Ints range_max(Ints x, Ints y) { return {max(x.low, y.low), max(x.high, y.high)}; }

// If the divisor's range is a single value, the compiler removes half of this code. If the value is
// a literal, it removes more.
__device__ inline Ints range_floordiv(Ints x, Ints y) {
  if (y.low <= 0 && y.high >= 0) return y.low == y.high ? Ints{0, 0} : Ints::any();
  const auto quotient = [](long long n, long long divisor) -> long long {
    return divisor == -1 ? -n : mod_floordiv(static_cast<int>(n), static_cast<int>(divisor));
  };
  const long long a = quotient(x.low, y.low), b = quotient(x.high, y.low);
  const long long c = quotient(x.low, y.high), d = quotient(x.high, y.high);
  return range_of(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}

__device__ inline Ints range_mod(Ints x, Ints y) {
  if (y.low == y.high && y.low != 0 && y.low != -1) {
    const int divisor = static_cast<int>(y.low);
    const int first = mod_floordiv(static_cast<int>(x.low), divisor);
    if (first == mod_floordiv(static_cast<int>(x.high), divisor)) {
      const long long whole = static_cast<long long>(first) * divisor;
      return {x.low - whole, x.high - whole};
    }
  }
  return {min(y.low + 1, 0LL), max(y.high - 1, 0LL)};
}

// Returns 2^n - 1 for the smallest n with x < 2^n.
__device__ inline long long all_bits(long long x) {
  for (int shift = 1; shift < 32; shift *= 2) x |= x >> shift;
  return x;
}

__device__ inline bool is_single_value(Ints x) { return x.low == x.high; }

__device__ inline Ints range_bit_and(Ints x, Ints y) {
  if (is_single_value(x) && is_single_value(y)) return {x.low & y.low, x.low & y.low};
  // x & (2^n - 1) is x mod 2^n, and monotonic while the upper bits of x do not change.
  if (is_single_value(y) && y.low >= 0 && y.low == all_bits(y.low) &&
      (x.low & ~y.low) == (x.high & ~y.low)) {
    return {x.low & y.low, x.high & y.low};
  }
  if (x.low < 0 && y.low < 0) return Ints::any();
  return {0, x.low < 0 ? y.high : y.low < 0 ? x.high : min(x.high, y.high)};
}
__device__ inline Ints range_bit_or(Ints x, Ints y) {
  if (is_single_value(x) && is_single_value(y)) return {x.low | y.low, x.low | y.low};
  if (x.low < 0 || y.low < 0) return Ints::any();
  return {max(x.low, y.low), all_bits(x.high | y.high)};
}
__device__ inline Ints range_bit_xor(Ints x, Ints y) {
  if (is_single_value(x) && is_single_value(y)) return {x.low ^ y.low, x.low ^ y.low};
  if (x.low < 0 || y.low < 0) return Ints::any();
  return {0, all_bits(x.high | y.high)};
}
__device__ inline Ints range_bit_not(Ints x) { return {~x.high, ~x.low}; }

__device__ inline Ints range_shl(Ints x, Ints count) {
  if (!is_single_value(count) || count.low < 0 || count.low > 31) return Ints::any();
  const long long factor = 1LL << count.low;
  return range_of(x.low * factor, x.high * factor);
}
__device__ inline Ints range_shr(Ints x, Ints count) {
  if (is_single_value(count) && count.low >= 0 && count.low < 32) {
    return {x.low >> count.low, x.high >> count.low};
  }
  // A right shift by an unknown count moves x toward 0 or -1.
  return {min(x.low, 0LL), max(x.high, -1LL)};
}

__device__ inline Ints ints_of(Truth x) { return {!x.may_be_false, x.may_be_true}; }
__device__ inline Ints ints_of(Words x) {
  return x.high > static_cast<unsigned long long>(Ints::highest)
             ? Ints::any()
             : Ints{static_cast<long long>(x.low), static_cast<long long>(x.high)};
}
template <class Real>
__device__ Ints ints_of(RealRange<Real> x) {
  // exact_int() converts NaN to 0.
  const int low = exact_int(x.low), high = exact_int(x.high);
  return x.may_be_nan ? Ints{min(low, 0), max(high, 0)} : Ints{low, high};
}

// ---- 64-bit words

__device__ inline Words range_min(Words x, Words y) {
  return {min(x.low, y.low), min(x.high, y.high)};
}
__device__ inline Words range_max(Words x, Words y) {
  return {max(x.low, y.low), max(x.high, y.high)};
}
__device__ inline Words range_bit_and(Words x, Words y) {
  if (x.low == x.high && y.low == y.high) return {x.low & y.low, x.low & y.low};
  return {0, min(x.high, y.high)};
}
__device__ inline Words range_shr(Words x, Words count) {
  return {mod_shr(x.low, count.high), mod_shr(x.high, count.low)};
}
__device__ inline Words words_of(Truth x) { return {!x.may_be_false, x.may_be_true}; }
template <class Real>
__device__ Words words_of(RealRange<Real> x) {
  const unsigned long long low = exact_word(x.low), high = exact_word(x.high);
  return x.may_be_nan ? Words{0, high} : Words{low, high};
}
__device__ inline Words words_of(Ints x) {
  if (x.low < 0) return Words::any();
  return {static_cast<unsigned long long>(x.low), static_cast<unsigned long long>(x.high)};
}

// ---- Reals

// Returns the range of an increasing function that is approximated, given its values at both ends.
// The range is widened by the relative error, below 2^-20 for float and 7e-15 for double.
template <class Real>
__device__ RealRange<Real> range_of_approximated(Real low, Real high, bool may_be_nan) {
  const bool in_float = sizeof(Real) == 4;
  const Real relative_error = in_float ? Real(9.5e-7) : Real(7e-15), least = Real(1.2e-38);
  const Real size = exact_max(exact_abs(low), exact_abs(high));
  const Real error = exact_add(exact_mul(size, relative_error), least);
  if (exact_ne(error, error)) return RealRange<Real>::any();
  if (error == mod_infinity<Real>()) return {-size, size, may_be_nan};
  return {exact_sub(low, error), exact_add(high, error), may_be_nan};
}

template <class Real>
__device__ RealRange<Real> range_between(Real low, Real high, bool may_be_nan) {
  // The bounds are not ordered if one is NaN, for example inf - inf.
  return exact_le(low, high) ? RealRange<Real>{low, high, may_be_nan} : RealRange<Real>::any();
}

template <class Real>
__device__ bool has_infinity(RealRange<Real> x) {
  return x.low == -mod_infinity<Real>() || x.high == mod_infinity<Real>();
}
template <class Real>
__device__ bool has_zero(RealRange<Real> x) {
  return exact_le(x.low, Real(0)) && exact_le(Real(0), x.high);
}

template <class Real>
__device__ RealRange<Real> range_add(RealRange<Real> x, RealRange<Real> y) {
  const bool is_nan = has_infinity(x) && has_infinity(y);
  return range_between(exact_add(x.low, y.low), exact_add(x.high, y.high),
                       x.may_be_nan || y.may_be_nan || is_nan);
}
template <class Real>
__device__ RealRange<Real> range_neg(RealRange<Real> x) {
  return {exact_neg(x.high), exact_neg(x.low), x.may_be_nan};
}
template <class Real>
__device__ RealRange<Real> range_sub(RealRange<Real> x, RealRange<Real> y) {
  return range_add(x, range_neg(y));
}

// Returns the range of a function of two numbers that is monotonic in each.
template <class Real, class Compute>
__device__ RealRange<Real> range_of_corners(RealRange<Real> x, RealRange<Real> y,
                                            Compute compute) {
  const Real a = compute(x.low, y.low), b = compute(x.low, y.high);
  const Real c = compute(x.high, y.low), d = compute(x.high, y.high);
  return range_between(exact_min(exact_min(a, b), exact_min(c, d)),
                       exact_max(exact_max(a, b), exact_max(c, d)), x.may_be_nan || y.may_be_nan);
}
template <class Real>
__device__ RealRange<Real> range_mul(RealRange<Real> x, RealRange<Real> y) {
  if ((has_infinity(x) && has_zero(y)) || (has_zero(x) && has_infinity(y))) {
    return RealRange<Real>::any();
  }
  return range_of_corners(x, y, [](Real a, Real b) { return exact_mul(a, b); });
}
template <class Real>
__device__ RealRange<Real> range_div(RealRange<Real> x, RealRange<Real> y) {
  if (has_zero(y) || (has_infinity(x) && has_infinity(y))) return RealRange<Real>::any();
  return range_of_corners(x, y, [](Real a, Real b) { return exact_div(a, b); });
}
template <class Real>
__device__ RealRange<Real> range_abs(RealRange<Real> x) {
  const Real low = exact_lt(Real(0), x.low)    ? x.low
                   : exact_lt(x.high, Real(0)) ? exact_neg(x.high)
                                               : Real(0);
  return {low, exact_max(exact_neg(x.low), x.high), x.may_be_nan};
}
template <class Real>
__device__ RealRange<Real> range_min(RealRange<Real> x, RealRange<Real> y) {
  return {exact_min(x.low, y.low), exact_min(x.high, y.high), x.may_be_nan || y.may_be_nan};
}
template <class Real>
__device__ RealRange<Real> range_max(RealRange<Real> x, RealRange<Real> y) {
  return {exact_max(x.low, y.low), exact_max(x.high, y.high), x.may_be_nan || y.may_be_nan};
}

// Ranges of increasing functions that are approximated: range_exp2(x) and so on.
#define INCREASING(name)                                                                      \
  template <class Real>                                                                   \
  __device__ RealRange<Real> range_##name(RealRange<Real> x) {                            \
    return range_of_approximated(exact_##name(x.low), exact_##name(x.high), x.may_be_nan); \
  }
INCREASING(exp2)
INCREASING(exp)
INCREASING(expm1)
#undef INCREASING

// Ranges of nondecreasing functions that are exact: range_floor(x) and so on.
#define INCREASING_EXACT(name)                                                    \
  template <class Real>                                                \
  __device__ RealRange<Real> range_##name(RealRange<Real> x) {         \
    return {exact_##name(x.low), exact_##name(x.high), x.may_be_nan};  \
  }
INCREASING_EXACT(floor)
INCREASING_EXACT(ceil)
INCREASING_EXACT(trunc)
INCREASING_EXACT(rint)
#undef INCREASING_EXACT

// Ranges of increasing functions that are approximated, and NaN for arguments below `least`.
#define INCREASING_FROM(name, least)                                                          \
  template <class Real>                                                                   \
  __device__ RealRange<Real> range_##name(RealRange<Real> x) {                            \
    if (!exact_le(Real(least), x.low)) return RealRange<Real>::any();                     \
    return range_of_approximated(exact_##name(x.low), exact_##name(x.high), x.may_be_nan); \
  }
INCREASING_FROM(log, 0)
INCREASING_FROM(log2, 0)
INCREASING_FROM(log10, 0)
INCREASING_FROM(log1p, -1)
#undef INCREASING_FROM

template <class Real>
__device__ RealRange<Real> range_sqrt(RealRange<Real> x) {
  if (!exact_le(Real(0), x.low)) return RealRange<Real>::any();
  return {exact_sqrt(x.low), exact_sqrt(x.high), x.may_be_nan};
}

// The error of tanh is absolute, not relative to the result.
template <class Real>
__device__ RealRange<Real> range_tanh(RealRange<Real> x) {
  const Real error = sizeof(Real) == 4 ? Real(1e-6) : Real(1e-15);
  return {exact_tanh(x.low) - error, exact_tanh(x.high) + error, x.may_be_nan};
}

// Conversion of integers to reals rounds to nearest.
template <class Real>
__device__ RealRange<Real> reals_of(Ints x) {
  return {Real(x.low), Real(x.high), false};
}
template <class Real>
__device__ RealRange<Real> reals_of(Words x) {
  return {Real(x.low), Real(x.high), false};
}
template <class Real>
__device__ RealRange<Real> reals_of(Truth x) {
  return {Real(!x.may_be_false), Real(x.may_be_true), false};
}
