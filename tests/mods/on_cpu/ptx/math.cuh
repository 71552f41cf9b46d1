// Host versions of the instructions that functions are made of.
#pragma once

#include "ptx/base.cuh"

namespace ptx {

inline float tanh_approx(float x) { return std::tanh(x); }
inline float min_nan(float x, float y) { return x < y || x != x ? x : y; }
inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }
inline int not_b32(int x) { return ~x; }

inline float add_rn(float x, float y) { return x + y; }
inline float sub_rn(float x, float y) { return x - y; }
inline float sqrt_rn(float x) { return std::sqrt(x); }
inline float neg(float x) { return -x; }
inline float abs(float x) { return std::fabs(x); }
inline float cvt_rmi(float x) { return std::floor(x); }
inline float cvt_rpi(float x) { return std::ceil(x); }
inline float cvt_rzi(float x) { return std::trunc(x); }
inline float cvt_rni(float x) { return std::rint(x); }
inline float cvt_rn_f32_f64(double x) { return float(x); }
inline double cvt_f64_f32(float x) { return x; }
inline bool setp_lt(float x, float y) { return x < y; }
inline bool setp_le(float x, float y) { return x <= y; }
inline bool setp_eq(float x, float y) { return x == y; }
inline int cvt_rzi_s32(float x) {
  return x != x ? 0 : x >= 2147483648.f ? 2147483647 : x < -2147483648.f ? -2147483647 - 1 : int(x);
}
inline float fma_rz(float x, float y, float z) {
  const double exact = double(x) * y + z;
  const double largest = 3.4028234663852886e38;
  if (std::isfinite(exact) && std::fabs(exact) > largest) return exact > 0 ? largest : -largest;
  return float(exact);
}

}  // namespace ptx
