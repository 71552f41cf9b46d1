// Compensated summation, for sums over all (query, key) pairs of a call.
#pragma once

template <class T>
__device__ bool is_finite(T x) {
  return x - x == T(0);
}

// Knuth's two-sum: the rounding error of each addition is known, and accumulated in `compensation`.
template <class T>
struct CompensatedSum {
  T sum = 0;
  T compensation = 0;

  __device__ void add(T x) {
    const T next = sum + x;
    const T added = next - sum;
    compensation += (sum - (next - added)) + (x - added);
    sum = next;
  }

  // If the sum is infinite, `compensation` is NaN and is ignored.
  __device__ T total() const { return is_finite(compensation) ? sum + compensation : sum; }
};
