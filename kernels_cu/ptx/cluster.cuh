// PTX wrappers for communication between the CTAs of a cluster (sm_90 and newer): one inline
// function per instruction. Shared-memory addresses are 32-bit offsets into the shared window.
#pragma once

#include "ptx/sm90a.cuh"

namespace ptx {

// barrier.cluster.arrive.release
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: does not publish this thread's earlier writes to the cluster.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait.acquire: waits until all threads of the cluster have arrived.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa.shared::cluster: returns the corresponding address in the shared memory of CTA `rank`.
__device__ inline unsigned map_to_cta(unsigned shared, int rank) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared), "r"(rank));
  return result;
}

// st.async: stores four floats to another CTA's shared memory and completes 16 bytes of the
// transaction count of `barrier`, an mbarrier of that CTA.
__device__ inline void st_async(unsigned shared, const float (&x)[4], unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(shared),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

// cp.async.bulk: copies `bytes` bytes of this CTA's shared memory to `target`, an address in
// another CTA of the cluster. The bytes complete on `barrier`, an mbarrier of that CTA. Addresses
// and `bytes` must be multiples of 16.
__device__ inline void cp_async_bulk_to_cta(unsigned target, unsigned shared, int bytes,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(target),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

// mbarrier.arrive on a barrier of another CTA. The default scope orders this CTA's shared-memory
// accesses only: .release.cluster would compile to MEMBAR.ALL.GPU, which waits for all memory.
__device__ inline void mbarrier_arrive_at_cta(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.try_wait.parity.acquire.cluster: waits until the phase of that parity completes. Data
// that other CTAs of the cluster stored during the phase is then visible.
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
