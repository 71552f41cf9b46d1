// PTX wrappers for instructions that only Hopper (sm_90a) has, in addition to those of base.cuh:
// one inline function each. Shared-memory addresses are 32-bit offsets into the shared window.
#pragma once

#include "ptx/base.cuh"

// Opaque descriptor of a tensor for TMA; cuTensorMapEncodeTiled fills it in on the host.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

namespace ptx {

// setmaxnreg.inc: raises the warpgroup's register count to `Registers` per thread.
template <int Registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// setmaxnreg.dec: releases registers of the warpgroup, down to `Registers` per thread.
template <int Registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// fence.proxy.async: orders this thread's earlier accesses to shared memory before later ones by
// TMA and wgmma. They see this thread's writes, and TMA overwrites nothing before this thread has
// read it. The thread that issues TMA or wgmma must synchronize with this thread afterwards.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// mbarrier.init: initializes a barrier whose phases complete after `count` arrivals.
__device__ inline void mbarrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// fence.mbarrier_init: makes earlier barrier initializations visible to TMA and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: adds `bytes` to the transaction count of the phase and arrives.
__device__ inline void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.expect_tx: adds `bytes` to the transaction count of a phase that is not yet complete.
__device__ inline void mbarrier_expect_tx(unsigned barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity: waits until the phase of that parity is complete.
__device__ inline void mbarrier_wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// mbarrier.test_wait.parity: returns whether the phase of that parity is complete.
__device__ inline bool mbarrier_test_wait(unsigned barrier, int parity) {
  int complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.b32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete;
}

// L2 cache policies: the values that createpolicy.fractional returns for fraction 1.0.
constexpr unsigned long long l2_evict_first = 0x12F0000000000000;
constexpr unsigned long long l2_evict_last = 0x14F0000000000000;
constexpr unsigned long long l2_evict_normal = 0x1000000000000000;

// prefetch.tensormap
__device__ inline void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.4d: loads the box at these coordinates into shared memory and completes its
// bytes on `barrier`. Elements outside the tensor become zeros. `policy` is an L2 cache policy.
__device__ inline void cp_async_bulk_tensor_4d(unsigned shared, const TensorMap* map, int c0,
                                               int c1, int c2, int c3, unsigned barrier,
                                               unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

// cp.async.bulk: copies `bytes` contiguous bytes from global to shared memory and completes them on
// `barrier`. Both addresses and the size are multiples of 16.
__device__ inline void cp_async_bulk(unsigned shared, const void* source, int bytes,
                                     unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// bar.sync: arrives at the named barrier and waits until `threads` threads have arrived.
__device__ inline void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// bar.arrive: arrives at the named barrier, whose phase takes `threads` arrivals, without waiting.
__device__ inline void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// wgmma.fence: orders this warpgroup's earlier register accesses before its next wgmma.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: waits until at most `Pending` of this warpgroup's groups are in flight.
template <int Pending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

}  // namespace ptx
