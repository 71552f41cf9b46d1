// Exchange of partial scores between two CTAs of a cluster that own a KV tile, if a head is too
// wide for one CTA. Each CTA has half of the columns of q, k, v and dout, so that its S and dP are
// sums over half of the columns. It sends them to its peer CTA and adds those that it receives. As
// a + b equals b + a, both CTAs get bitwise equal P and dS. They multiply P and dS by their own
// columns, so nothing else is exchanged.
//
// A consumer warp exchanges sums with the same warp of the peer CTA: S if it is a warp of the dv
// consumer, otherwise dP. It has one receive buffer and two barriers, `peer_scores_full` (full) and
// `peer_scores_read` (read):
//
//   warp of CTA 0                          peer warp in CTA 1
//   ------------------------------------   ------------------------------------
//   full: expects the bytes                full: expects the bytes
//   read: waits for sums i - 1             read: waits for sums i - 1
//   st_async  ------ sums i ------------>  buffer, counted on full
//   buffer    <----- sums i -------------  st_async
//   waits for full, reads, adds            waits for full, reads, adds
//   arrives   -------------------------->  read
//   read      <--------------------------  arrives
//
// A warp waits for the last arrival at its `read` before it exits. By then it has received all
// sums, so one CTA may exit before the other.
#pragma once

#include "backward/hopper/listed_tiles.cuh"
#include "ptx/cluster.cuh"

#if __CUDA_ARCH__ == 900

template <class Config, bool HasPeer = HopperCta<Config>::exchanges_scores>
struct HopperScoreExchange {
  using Sums = float[Config::columns / 2];

  __device__ HopperScoreExchange(const HopperCta<Config>&, int) {}
  __device__ void send(const Sums&) const {}
  __device__ void receive(Sums&) const {}
  __device__ void finish() const {}
};

template <class Config>
struct HopperScoreExchange<Config, true> {
  using Cta = HopperCta<Config>;
  using Sums = float[Config::columns / 2];
  static constexpr int vectors = Config::columns / 8;  // vectors of four sums per lane

  const Cta& cta;
  const int consumer;
  int phase = 0;

  __device__ HopperScoreExchange(const Cta& cta, int consumer) : cta(cta), consumer(consumer) {}

  // Sends the sums to the peer warp, once it has read the previous ones.
  __device__ void send(const Sums& sums) const {
    const unsigned full = cta.peer_scores_full(warp());
    const unsigned target = Cta::at_peer(lane_address()), target_full = Cta::at_peer(full);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(full, Cta::peer_scores_bytes);
    ptx::mbarrier_wait(cta.peer_scores_read(warp()), phase ^ 1);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float four[4] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
      ptx::st_async(target + i * vector_bytes, four, target_full);
    }
  }

  // Adds the sums of the peer warp to those that were sent to it.
  __device__ void receive(Sums& sums) {
    const unsigned received = lane_address();
    ptx::mbarrier_wait_for_cluster(cta.peer_scores_full(warp()), phase);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      unsigned four[4];
      ptx::ld_shared_v4(four, received + i * vector_bytes);
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[4 * i + c] += __uint_as_float(four[c]);
    }
    __syncwarp();
    const unsigned read = cta.peer_scores_read(warp());
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_at_cta(Cta::at_peer(read));
    phase ^= 1;
  }

  // Waits for the last arrival of the peer CTA, so that none comes after this CTA has exited.
  __device__ void finish() const { ptx::mbarrier_wait(cta.peer_scores_read(warp()), phase ^ 1); }

 private:
  static constexpr int vector_bytes = 32 * 4 * int(sizeof(float));  // one vector of each lane
  static_assert(vectors * vector_bytes == Cta::peer_scores_bytes, "the buffer has a warp's sums");

  __device__ int warp() const { return 4 * consumer + threadIdx.x / 32 % 4; }
  __device__ unsigned lane_address() const {
    return cta.peer_scores_address(warp()) + threadIdx.x % 32 * 16;
  }
};

#endif  // __CUDA_ARCH__ == 900
