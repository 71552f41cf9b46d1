// Kernel that runs before the Hopper kernel for float8: writes V transposed to the workspace, from
// where TMA loads it, as (batch, heads_kv, head_dim_v, keys). The keys are padded with zeros to
// whole tiles of 128, in the order that float8/float8.cuh describes.
#pragma once

#include "forward/hopper/float8/float8.cuh"
#include "params.cuh"
#include "ptx/bytes.cuh"
#include "tile/access.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperValueTranspose {
  using Byte = float8_e4m3_t;
  using Chunk = Vector<Byte, 16>;
  // Size of a tile, which a CTA with one thread per key copies to shared memory.
  static constexpr int keys = 128, columns = 64;
  static constexpr int dim = Config::head_dim_v;
  // Every 16 keys are followed by 16 bytes of padding. In store(), eight lanes read four columns of
  // one key in each of eight groups of 16 keys. The padding places these reads in different banks.
  static constexpr int bytes = keys * columns + keys / 16 * 16;
  __device__ static int offset(int key) { return key * columns + key / 16 * 16; }

  // Transposes V. Called by any number of CTAs.
  __device__ static void transpose(const Params& p, unsigned char* shared) {
    const int key_tiles = ceil_div(p.seqlen_k, keys);
    constexpr int column_tiles = ceil_div(dim, columns);
    const int64 tiles = int64(p.batch) * p.heads_kv * column_tiles * key_tiles;
    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int first_key = int(tile % key_tiles) * keys;
      const int64 rest = tile / key_tiles;
      const int first_column = int(rest % column_tiles) * columns;
      const int64 head_index = rest / column_tiles;
      const int batch = int(head_index / p.heads_kv), head = int(head_index % p.heads_kv);
      const Byte* source = p.v.head<const Byte>(batch, head);
      auto* target = static_cast<Byte*>(p.workspace) +
                     (head_index * dim + first_column) * (int64(key_tiles) * keys) + first_key;
      load(p, source, first_key, first_column, shared);
      __syncthreads();
      store(target, int64(key_tiles) * keys, dim - first_column, shared);
      __syncthreads();
    }
  }

 private:
  __device__ static void load(const Params& p, const Byte* source, int first_key, int first_column,
                              unsigned char* shared) {
    constexpr int chunks = columns / 16;
    const int column = first_column + threadIdx.x % chunks * 16;
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
      const int key = threadIdx.x / chunks + i * (keys / chunks);
      Chunk chunk = {};
      if (first_key + key < p.seqlen_k) {
        chunk = load_elements<16, Config::alignment>(
            source + (first_key + key) * p.v.row_stride + column, dim - column);
      }
      *reinterpret_cast<Chunk*>(shared + offset(key) + column - first_column) = chunk;
    }
  }

  // Writes 16 keys of four columns per thread.
  __device__ static void store(Byte* target, int64 target_stride, int columns_left,
                               const unsigned char* shared) {
    const int key_group = threadIdx.x % 8, column = threadIdx.x / 8 * 4;
    const unsigned char* source = shared + offset(16 * key_group) + column;
    unsigned columns_of_keys[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned four[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int key = 2 * i + k % 2 + k / 2 * 8;
        four[k] = *reinterpret_cast<const unsigned*>(source + key * columns);
      }
      const unsigned low[2] = {ptx::prmt<0x5140>(four[0], four[1]),
                               ptx::prmt<0x5140>(four[2], four[3])};
      const unsigned high[2] = {ptx::prmt<0x7362>(four[0], four[1]),
                                ptx::prmt<0x7362>(four[2], four[3])};
      columns_of_keys[0][i] = ptx::prmt<0x5410>(low[0], low[1]);
      columns_of_keys[1][i] = ptx::prmt<0x7632>(low[0], low[1]);
      columns_of_keys[2][i] = ptx::prmt<0x5410>(high[0], high[1]);
      columns_of_keys[3][i] = ptx::prmt<0x7632>(high[0], high[1]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (column + c < columns_left) {
        *reinterpret_cast<Chunk*>(target + (column + c) * target_stride + 16 * key_group) =
            reinterpret_cast<const Chunk&>(columns_of_keys[c]);
      }
    }
  }
};

template <class Config>
__device__ void hopper_transpose_values(const Params& p) {
  using Values = HopperValueTranspose<Config>;
  __shared__ __align__(16) unsigned char shared[Values::bytes];
  Values::transpose(p, shared);
}

#endif  // __CUDA_ARCH__ == 900
