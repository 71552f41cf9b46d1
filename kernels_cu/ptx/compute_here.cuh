// `compute_here`: emits no instruction and forces the compiler to compute a pointer at this point.
// Without it the compiler sinks the computation below a barrier, where it adds to the latency.
#pragma once

namespace ptx {

template <class T>
__device__ inline T* compute_here(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace ptx
