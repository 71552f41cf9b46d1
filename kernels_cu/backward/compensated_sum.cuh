// Sums of as many terms as a call has pairs, in which rounding is made good.
#pragma once

template <class T>
__device__ bool is_finite(T x) {
  return x - x == T(0);
}

// Knuth's two-sum: what an addition loses is known, and summed up beside it.
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

  // An infinite sum has lost NaN.
  __device__ T total() const { return is_finite(lost) ? sum + lost : sum; }
};
