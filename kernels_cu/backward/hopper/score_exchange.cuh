// Exchange of partial scores between the two CTAs of a cluster, for heads that are too wide for one
// CTA. Both CTAs own the same KV tile, and each has half of the columns of q, k, v and dout. S and
// dP of a CTA are therefore partial sums, over half of the columns. Each CTA sends its partial sums
// to its peer CTA and adds those that it receives. As a + b equals b + a, both CTAs compute bitwise
// equal P and dS. Each CTA multiplies P and dS by its own columns, so nothing else is exchanged.
//
// Each consumer warp exchanges sums with the warp of the same index in the peer CTA. Warps of the
// dv consumer exchange S, and warps of the dk consumer dP. Each warp has one receive buffer and two
// mbarriers in the shared memory of its CTA: `peer_scores_full` (full) completes when sums have
// arrived in the buffer, and `peer_scores_read` (read) when the peer warp has read the sums that
// were sent to it. For query tile i:
//
//   warp in CTA 0                            its peer warp in CTA 1
//   --------------------------------------   --------------------------------------
//   arrives at its full, expects the bytes   arrives at its full, expects the bytes
//   waits at its read (sums i - 1 are read)  waits at its read (sums i - 1 are read)
//   st_async  -------- sums i ------------>  buffer; the bytes complete on full
//   buffer; the bytes complete on full  <--  sums i -----------------------  st_async
//   waits at its full                        waits at its full
//   reads the buffer, adds                   reads the buffer, adds
//   arrives at the peer's read  ---------->  read
//   read  <--------------------------------  arrives at the peer's read
//
// A warp waits for the last arrival at its `read` before it exits. It has then received all sums,
// and no arrival is in flight, so one CTA may exit before the other.
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

  // Sends partial sums to the peer warp. Waits until the peer warp has read the previous ones.
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

  // Waits for the partial sums of the peer warp and adds them to `sums`, which this warp has sent.
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

  // Waits for the last arrival of the peer warp. An arrival must not reach a CTA that has exited.
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
