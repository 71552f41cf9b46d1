// Stands in for the instructions of functions.
#pragma once

#include "ptx/base.cuh"

namespace ptx {

inline float tanh_approx(float x) { return std::tanh(x); }
inline float min_nan(float x, float y) { return x < y || x != x ? x : y; }
inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }

}  // namespace ptx
