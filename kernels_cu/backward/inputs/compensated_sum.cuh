// Compensated summation, for sums over all (query, key) pairs of a call.
#pragma once

template <class T>
__device__ bool is_finite(T x) {
  return x - x == T(0);
}

// Knuth's two-sum: the rounding error of each addition is known, and accumulated in `lost`.
template <class T>
struct CompensatedSum {
  T sum = 0;
  T lost = 0;

  __device__ void add(T x) {
    const T next = sum + x;
    const T added = next - sum;
    lost += (sum - (next - added)) + (x - added);
    sum = next;
  }

  // If the sum is infinite, `lost` is NaN and is ignored.
  __device__ T total() const { return is_finite(lost) ? sum + lost : sum; }
};
