// Sums of dk and dv over the CTAs of a KV tile that process different chunks of its query heads. The
// CTAs add in the order of the chunks, so that results are bitwise equal if a call is repeated:
//
//   chunk 0        stores its sums                   releases the semaphore
//   chunk 1, ...   waits for the semaphore, adds     releases the semaphore
//   last chunk     waits, loads the sums into registers, adds its own, and writes dk and dv
//
// Each consumer has a semaphore and sums of its own, in the layout of its accumulators. A CTA waits
// only for CTAs of smaller blockIdx (tile_coord.cuh), as for dq (dq/semaphore.cuh).
#pragma once

#include "backward/dq/accumulate.cuh"
#include "backward/dq/semaphore.cuh"
#include "backward/hopper/listed_tiles.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperHeadChunks {
  using Cta = HopperCta<Config>;
  static constexpr int floats = 64 * (Cta::dim + Cta::dim_v);  // sums of a consumer

  const Cta& cta;
  const int consumer;

  __device__ HopperHeadChunks(const Cta& cta, int consumer) : cta(cta), consumer(consumer) {}

  // Adds the consumer's sums to those of the earlier chunks. Returns whether this is the last chunk,
  // which then has the sums of all chunks in its registers.
  template <int Keys, int Values>
  __device__ bool merge(float (&dk_sums)[Keys], float (&dv_sums)[Values]) const {
    const int chunk = cta.coord.chunk;
    const bool is_last = chunk == cta.p.num_splits - 1;
    // If no query attends to the CTA's keys, that holds for all chunks, and all sums are 0.
    if (cta.p.num_splits == 1 || !cta.has_steps()) return is_last;
    const DqSums<Config> all(cta.p);
    const int slot = 2 * tile_slot(all) + consumer;
    int* semaphore = all.semaphores + all.count + slot;
    float* target = all.first_tile() + int64(all.count) * (Cta::wants_q ? Cta::Fragments::floats : 0) +
                    int64(slot) * floats + threadIdx.x % 128 * 4;
    if (chunk > 0) {
      if (threadIdx.x % 128 == 0) semaphore_wait(semaphore, chunk, -1);
      Cta::sync_consumer(consumer);
    }
    add<Keys>(dk_sums, target, chunk, is_last);
    add<Values>(dv_sums, target + 64 * Cta::dim, chunk, is_last);
    if (is_last) return true;
    Cta::sync_consumer(consumer);
    if (threadIdx.x % 128 == 0) semaphore_release(semaphore);
    return false;
  }

 private:
  // A lane's four numbers of 8 columns are contiguous, and so are those of the 128 threads.
  template <int Count>
  __device__ static void add(float (&sums)[Count], float* target, int chunk, bool is_last) {
#pragma unroll
    for (int i = 0; i < Count; i += 4) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(sums[i]);
      float* const place = target + i * 128;
      if (is_last) {
        float before[4];
        ptx::ld_global_cg_v4(before, place);
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] += before[c];
      } else if (chunk == 0) {
        ptx::st_global_v4(place, four);
      } else {
        ptx::red_add_v4(place, four);
      }
    }
  }

  __device__ int tile_slot(const DqSums<Config>& all) const {
    const int tile = cta.coord.begin / Config::Bc;
    const bool is_packed = Config::has_seqlens && cta.p.cu_seqlens_k != nullptr;
    if (!is_packed) return (cta.coord.batch * cta.p.heads_kv + cta.coord.head) * all.kv_slots + tile;
    return cta.coord.head * all.kv_slots +
           first_tile_slot<Config::Bc>(cta.sequence.k_first, cta.coord.batch) + tile;
  }
};

#endif  // __CUDA_ARCH__ == 900
