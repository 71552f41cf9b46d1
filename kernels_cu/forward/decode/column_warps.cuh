// Sum of scores over column warps, which process the same keys, each with a slice of the columns in
// a ring of its own. Each warp multiplies its slices of Q and K, and the products of all warps add
// up to S. All warps add in the same order, so they have bitwise equal scores, maxima,
// probabilities and row sums. Each warp then multiplies P by its own columns of V.
//
//   warp 0                        buffers           warp 1, ...
//   --------------------------    ---------------   --------------------------
//   scores of tile t          --> buffer t % 2  <-- scores of tile t
//   barrier  <------------- all have written ---------->  barrier
//   sums                      <-- buffer t % 2  --> sums
//   scores of tile t + 1      --> other buffer  <-- scores of tile t + 1
//   barrier  <------ all have written, and read tile t ------>  barrier
//
// A buffer is written again two tiles later, after the barrier in between.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/base.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeColumnWarps {
  static constexpr int size = Config::column_warps;
  static constexpr int key_warps = Config::warps / size;
  static_assert(key_warps * size == Config::warps && key_warps <= 15,
                "warps divide into groups of column warps, with a named barrier each");
  static constexpr int fragments = Config::Br / 16 * (Config::Bc / 8);
  static constexpr int fragment_bytes = 32 * 16;
  static constexpr int buffer_bytes = size * fragments * fragment_bytes;
  static constexpr int key_warp_bytes = size > 1 ? 2 * buffer_bytes : 0;
  static constexpr int bytes = key_warps * key_warp_bytes;

  const unsigned exchange_buffer;
  int buffer = 0;  // offset of the current buffer, in bytes

  __device__ explicit DecodeColumnWarps(unsigned shared)
      : exchange_buffer(shared + key_warp() * key_warp_bytes) {}

  __device__ static int key_warp() { return threadIdx.x / 32 / size; }
  __device__ static int column_warp() { return threadIdx.x / 32 % size; }

  // Waits for all warps that process the same keys.
  __device__ static void sync() {
    if constexpr (size == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync_aligned(1 + key_warp(), 32 * size);
    }
  }

  // Replaces partial scores by their sum over the column warps. Lane i reads only what lane i of
  // each warp has written.
  template <int row_tiles, int key_tiles>
  __device__ void reduce_scores(float (&scores)[row_tiles][key_tiles][4]) {
    if constexpr (size > 1) {
      const unsigned lane = exchange_buffer + buffer + threadIdx.x % 32 * 16;
      const auto address = [&](int column_warp, int i, int j) {
        return lane + ((column_warp * row_tiles + i) * key_tiles + j) * fragment_bytes;
      };
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < key_tiles; ++j) {
          ptx::st_shared_v4(address(column_warp(), i, j),
                            reinterpret_cast<const unsigned (&)[4]>(scores[i][j]));
        }
      }
      sync();
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < key_tiles; ++j) {
          unsigned partials[size][4];
#pragma unroll
          for (int m = 0; m < size; ++m) ptx::ld_shared_v4(partials[m], address(m, i, j));
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float sum = __uint_as_float(partials[0][c]);
#pragma unroll
            for (int m = 1; m < size; ++m) sum += __uint_as_float(partials[m][c]);
            scores[i][j][c] = sum;
          }
        }
      }
      buffer ^= buffer_bytes;
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800
