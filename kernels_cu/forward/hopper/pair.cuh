// Two thread blocks of a cluster with one query tile, where a head has more columns than one block
// can multiply: each has half of the columns of Q, K and V. A block's products of Q and K are then
// partial sums of the scores. It sends them to the other block and adds what comes from there, and
// as a + b is b + a both have the same bits: both find the same bases and probabilities, and
// multiply these with their halves of V. Nothing else passes between them.
//
// A thread's partial scores go to the thread of the same number, so each warp of a consumer deals
// with one warp, its twin, and has two buffers for what comes from it:
//
//   warp of block 0                        its twin in block 1
//   ------------------------------------   ------------------------------------
//   full[b]: expects the bytes             full[b]: expects the bytes
//   st_async  ---- partial scores j ---->  buffer[b], counted on full[b]
//   buffer[b] <--- partial scores j -----  st_async
//   waits for full[b], reads, adds         waits for full[b], reads, adds
//   b ^= 1                                 b ^= 1
//
// Who got the twin's scores j knows that it has read what it was sent at j - 1: it sends after
// that. So the buffer of j - 1 is free for j + 1, and nobody says so. Who leaves has got all that
// is sent to it, so a block may end before the other.
//
// Of latent attention there is one buffer, and who has read it says so:
//
//   waits for read: the twin's of j - 1    waits for read: the twin's of j - 1
//   st_async  ---- partial scores j ---->  buffer
//   buffer    <--- partial scores j -----  st_async
//   waits for full, reads, adds            waits for full, reads, adds
//   arrives   --------------------------->  read
//   read      <---------------------------  arrives
//
// Who leaves waits for the last of these arrivals.
#pragma once

#include "forward/hopper/cta.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "tile/ring.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool Paired = (HopperCta<Config>::ranks > 1)>
struct HopperPair {
  __device__ HopperPair(const HopperCta<Config>&, int) {}
  template <class Meanwhile>
  __device__ void complete(const float (&)[Config::Bc / 2], Meanwhile meanwhile) const {
    meanwhile();
  }
  __device__ void finish() const {}
};

template <class Config>
struct HopperPair<Config, true> {
  using Cta = HopperCta<Config>;
  static constexpr int vectors = Config::Bc / 8;  // of four scores, of a lane

  const Cta& cta;
  const int warp;  // of the consumers'
  RingPosition<Cta::pair_buffers> ring;
  static constexpr bool tells = Cta::pair_buffers == 1;  // what it has read

  __device__ HopperPair(const Cta& cta, int consumer)
      : cta(cta), warp(4 * consumer + threadIdx.x / 32 % 4) {}

  // Adds the other block's partial scores to this one's; `meanwhile` is what is done between
  // sending and receiving.
  template <class Meanwhile>
  __device__ void complete(float (&scores)[Config::Bc / 2], Meanwhile meanwhile) {
    const int lane = threadIdx.x % 32;
    // Addresses are made here each time: there are no registers to keep them.
    const int warp = tells ? ptx::mov(this->warp) : this->warp;
    const unsigned received = cta.pair_address(ring.slot, warp) + lane * 16;
    const unsigned full = cta.pair_full(ring.slot, warp);
    const int twin = Cta::rank() ^ 1;
    const unsigned target = ptx::map_to_block(received, twin);
    const unsigned target_full = ptx::map_to_block(full, twin);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Cta::pair_warp_bytes);
    if constexpr (tells) ptx::mbarrier_wait(cta.pair_read(warp), ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float four[4] = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2],
                             scores[4 * i + 3]};
      ptx::st_async(target + i * 512, four, target_full);
    }
    meanwhile();
    ptx::mbarrier_wait_for_cluster(full, ring.parity);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      unsigned four[4];
      ptx::ld_shared_v4(four, received + i * 512);
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[4 * i + c] += __uint_as_float(four[c]);
    }
    if constexpr (tells) {
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive_at_block(ptx::map_to_block(cta.pair_read(warp), twin));
      }
    }
    ring.advance();
  }

  // After the last: the other block arrives nowhere any more.
  __device__ void finish() const {
    if constexpr (tells) ptx::mbarrier_wait(cta.pair_read(warp), ring.parity ^ 1);
  }
};

#endif  // __CUDA_ARCH__ == 900
