// Exchange of scores between two CTAs of a cluster that process one query tile, if a head is too
// wide for one CTA. Each CTA has half of the columns of Q, K and V, so that its Q K^T is a partial
// sum of S. It sends the partial scores to its peer CTA and adds those that it receives. As a + b
// equals b + a, both CTAs get bitwise equal scores, bases and P, and multiply P by their halves of
// V. Nothing else is exchanged.
//
// A thread sends its partial scores to the same thread of the peer CTA. So a consumer warp
// exchanges data with one peer warp only. It has two receive buffers and barriers `peer_full`:
//
//   warp of CTA 0                          peer warp in CTA 1
//   ------------------------------------   ------------------------------------
//   peer_full[b]: expects the bytes        peer_full[b]: expects the bytes
//   st_async  ---- partial scores j ---->  buffer[b], counted on peer_full[b]
//   buffer[b] <--- partial scores j -----  st_async
//   waits for peer_full[b], reads, adds    waits for peer_full[b], reads, adds
//   b ^= 1                                 b ^= 1
//
// A warp that receives scores j knows that its peer has read scores j - 1, since the peer sends j
// only after that. So the buffer of j - 1 is free for j + 1 without an empty barrier. A CTA exits
// only after it has received everything that its peer sends, so one CTA may exit before the other.
//
// MLA has one buffer, and a barrier `peer_read`, at which the peer arrives after it has read:
//
//   peer_read: waits for scores j - 1      peer_read: waits for scores j - 1
//   st_async  ---- partial scores j ---->  buffer
//   buffer    <--- partial scores j -----  st_async
//   waits for peer_full, reads, adds       waits for peer_full, reads, adds
//   arrives   --------------------------->  peer_read
//   peer_read <---------------------------  arrives
//
// A warp waits for the last of these arrivals before it exits.
#pragma once

#include "forward/hopper/cta.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "tile/pipeline_state.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool HasPeer = (HopperCta<Config>::cta_ranks > 1)>
struct PeerExchange {
  __device__ PeerExchange(const HopperCta<Config>&, int) {}
  template <class WhileWaiting>
  __device__ void add_peer_scores(const float (&)[Config::Bc / 2],
                                  WhileWaiting while_waiting) const {
    while_waiting();
  }
  __device__ void finish() const {}
};

template <class Config>
struct PeerExchange<Config, true> {
  using Cta = HopperCta<Config>;
  static constexpr int vectors = Config::Bc / 8;  // vectors of four scores per lane

  const Cta& cta;
  const int warp;  // index among the consumer warps
  PipelineState<Cta::peer_buffers> ring;
  // Whether there is one buffer, so that a warp arrives at peer_read of its peer after reading it.
  static constexpr bool single_buffered = Cta::peer_buffers == 1;

  __device__ PeerExchange(const Cta& cta, int consumer)
      : cta(cta), warp(4 * consumer + threadIdx.x / 32 % 4) {}

  // Adds the partial scores of the peer CTA to those of this one. Calls while_waiting() between
  // sending and receiving.
  template <class WhileWaiting>
  __device__ void add_peer_scores(float (&scores)[Config::Bc / 2], WhileWaiting while_waiting) {
    const int lane = threadIdx.x % 32;
    // Addresses are recomputed each time: there are no registers to keep them.
    const int warp = single_buffered ? ptx::mov(this->warp) : this->warp;
    const unsigned received = cta.peer_address(ring.index, warp) + lane * 16;
    const unsigned full = cta.peer_full(ring.index, warp);
    const int peer_rank = Cta::cta_rank() ^ 1;
    const unsigned target = ptx::map_to_cta(received, peer_rank);
    const unsigned target_full = ptx::map_to_cta(full, peer_rank);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Cta::peer_warp_bytes);
    if constexpr (single_buffered) ptx::mbarrier_wait(cta.peer_read(warp), ring.phase ^ 1);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float four[4] = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2],
                             scores[4 * i + 3]};
      ptx::st_async(target + i * 512, four, target_full);
    }
    while_waiting();
    ptx::mbarrier_wait_for_cluster(full, ring.phase);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      unsigned four[4];
      ptx::ld_shared_v4(four, received + i * 512);
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[4 * i + c] += __uint_as_float(four[c]);
    }
    if constexpr (single_buffered) {
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive_at_cta(ptx::map_to_cta(cta.peer_read(warp), peer_rank));
      }
    }
    ring.advance();
  }

  // Waits for the last arrival of the peer CTA, so that none comes after this CTA has exited.
  __device__ void finish() const {
    if constexpr (single_buffered) ptx::mbarrier_wait(cta.peer_read(warp), ring.phase ^ 1);
  }
};

#endif  // __CUDA_ARCH__ == 900
