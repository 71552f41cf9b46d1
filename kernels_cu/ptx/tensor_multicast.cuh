// Wrappers of TMA instructions that load a box of a tensor into several CTAs of a cluster or into
// L2.
#pragma once

#include "ptx/sm90a.cuh"

namespace ptx {

// cp.async.bulk.tensor.4d.multicast: like `cp_async_bulk_tensor_4d`, but loads the box into the
// shared memory of each CTA whose bit is set in `ranks`. In each of these CTAs, the bytes complete
// on the barrier at the same address.
__device__ inline void cp_async_bulk_tensor_4d_multicast(unsigned shared, const TensorMap* map,
                                                         int c0, int c1, int c2, int c3,
                                                         unsigned barrier, int ranks,
                                                         unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier),
      "h"(static_cast<unsigned short>(ranks)), "l"(policy)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.4d: loads the box at these coordinates into L2.
__device__ inline void cp_async_bulk_prefetch_tensor_4d(const TensorMap* map, int c0, int c1,
                                                        int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

}  // namespace ptx
