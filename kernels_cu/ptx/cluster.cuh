// One inline function per PTX instruction that thread blocks of a cluster work together by: sm_90
// and newer. Shared-memory addresses are 32-bit offsets into the shared window.
#pragma once

#include "ptx/sm90a.cuh"

namespace ptx {

// barrier.cluster.arrive.release
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: of what was written before, the others learn nothing.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait.acquire: until all threads of the cluster have arrived.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa.shared::cluster: where in another block's shared memory the same address is.
__device__ inline unsigned map_to_block(unsigned shared, int rank) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared), "r"(rank));
  return result;
}

// st.async: four floats to another block's shared memory, counted as 16 bytes on a barrier there.
__device__ inline void st_async(unsigned shared, const float (&x)[4], unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(shared),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

// mbarrier.arrive, at a barrier of another block's. It orders what the block has done in shared
// memory; .release.cluster would order all memory, and wait for it (MEMBAR.ALL.GPU).
__device__ inline void mbarrier_arrive_at_block(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.try_wait.parity.acquire.cluster, until the phase of that parity is complete: what other
// blocks stored with it is there.
__device__ inline void mbarrier_wait_for_cluster(unsigned barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ptx
