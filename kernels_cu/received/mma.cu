// Sum over queries of the attention weights of each key, on tensor cores, sm_80 and newer, for
// float16 and bfloat16. The forward pass has computed `lse`.
//
// A CTA owns a KV tile of Bc keys, and iterates over the query tiles of Br rows. With
// Config::grouped, it goes through all query heads of its KV head.
#include "backward/simt/products.cuh"
#include "ptx/base.cuh"
#include "received/key_tile.cuh"
#include "received/params.cuh"
#include "scheduler/tile_coord.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MmaReceived {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int warp_keys = Bc / Config::warps;
  static constexpr int row_tiles = warp_keys / 16;
  static_assert(row_tiles * 16 * Config::warps == Bc && Br % 16 == 0, "whole fragments");

  static constexpr int columns = round_up(Config::head_dim, 16);
  static constexpr int k_steps = columns / 16;
  static constexpr int query_steps = Br / 16;
  using Layout = SwizzledRows<Element, columns>;
  using Scores = float[row_tiles][Br / 8][4];

  // Shared memory: K, two stages of Q, and two of the log-sum-exp of its rows. Each tile begins at
  // a multiple of 128 bytes, as its layout requires.
  static constexpr int keys_bytes = Bc * Layout::row_bytes;
  static constexpr int queries_bytes = Br * Layout::row_bytes;
  static constexpr int lse_offset = keys_bytes + 2 * queries_bytes;
  static_assert(lse_offset + 2 * Br * int(sizeof(float)) == Config::shared_memory,
                "as the host planned");

  using Keys = ReceivedKeys<Config, 2 * row_tiles>;

  Keys keys;
  unsigned char* const memory;
  const unsigned shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  Scores scores;

  __device__ MmaReceived(const Keys& keys, unsigned char* memory)
      : keys(keys), memory(memory), shared(ptx::shared_address(memory)) {}

  __device__ void run() {
    if (keys.has_queries()) process_tiles();
    keys.write(first_lane_key(), key_step);
  }

 private:
  __device__ void process_tiles() {
    load_keys();
    load(0, keys.tile.first_head, keys.first_tile);
    int stage = 0;
    for (int head = keys.tile.first_head; head < keys.tile.last_head; ++head) {
      for (int tile = keys.first_tile; tile < keys.last_tile; ++tile, stage = 1 - stage) {
        ptx::cp_async_wait_group<0>();
        // All warps must have read the other stage, which the next load overwrites.
        __syncthreads();
        const bool is_last = tile == keys.last_tile - 1;
        load(1 - stage, is_last ? head + 1 : head, is_last ? keys.first_tile : tile + 1);
        multiply(stage);
        keys.add(
            head, tile, row_lse(stage), first_lane_key(),
            [&](int r, int n) { return scores[n / 2][r / 2][2 * (n % 2) + r % 2]; }, key_step);
      }
    }
    ptx::cp_async_wait_group<0>();
  }

  template <int Rows>
  using Copy = RowCopy<Layout, Element, Rows, Config::head_dim, threads, Config::alignment>;

  // Starts the copy of the rows from `first` on. Rows that do not exist become zeros.
  template <int Rows>
  __device__ void start(unsigned target, const HeadRows<Element>& source, int first) {
    const Element* const begin = source.begin + first * source.stride;
    Copy<Rows>::template start<true>(target, Copy<Rows>::source(begin, source.stride),
                                     source.stride, source.count - first);
  }

  __device__ void load_keys() {
    if constexpr (Config::page_size > 0) {
      const auto rows = paged_keys<Config>(keys.p, keys.sequence, keys.tile);
      Copy<Bc>::gather(shared, [&](int row) { return rows.at(keys.tile.begin + row); });
    } else {
      start<Bc>(shared, key_rows<Element>(keys.p.k, keys.sequence, keys.tile.head_kv),
                keys.tile.begin);
    }
  }

  __device__ unsigned queries_address(int stage) const {
    return shared + keys_bytes + stage * queries_bytes;
  }
  __device__ float* row_lse(int stage) const {
    return reinterpret_cast<float*>(memory + lse_offset) + stage * Br;
  }

  // Starts the loads of a query tile, if there is a next head.
  __device__ void load(int stage, int head, int tile) {
    if (head < keys.tile.last_head) {
      start<Br>(queries_address(stage), query_rows<Element>(keys.p.q, keys.sequence, head),
                tile * Br);
      for (int row = threadIdx.x; row < Br; row += threads) {
        row_lse(stage)[row] = keys.lse_log2(head, tile * Br + row);
      }
    }
    ptx::cp_async_commit_group();
  }

  // Returns the first of the lane's keys. The others follow at distances `key_step`.
  __device__ int first_lane_key() const { return keys.tile.begin + warp * warp_keys + lane / 4; }
  __device__ static int key_step(int n) { return n / 2 * 16 + n % 2 * 8; }

  // Computes S^T of the warp's keys and the queries of a tile.
  __device__ void multiply(int stage) {
    clear(scores);
    const unsigned left =
        shared + warp * warp_keys * Layout::row_bytes + Layout::offset(lane % 16, lane / 16);
    const unsigned queries =
        queries_address(stage) + Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    unsigned q[2][4];
    const auto load_queries = [&](int number) {
      ptx::ldmatrix_x4(q[number % 2], Layout::advance(queries, number % query_steps * 16,
                                                      number / query_steps * 2));
    };
    load_queries(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      unsigned k[row_tiles][4];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        ptx::ldmatrix_x4(k[i], Layout::advance(left, 16 * i, 2 * step));
      }
#pragma unroll
      for (int j = 0; j < query_steps; ++j) {
        const int current = step * query_steps + j;
        if (current + 1 < k_steps * query_steps) load_queries(current + 1);
        const unsigned(&right)[4] = q[current % 2];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<Element>(scores[i][2 * j], k[i], right[0], right[1]);
          mma<Element>(scores[i][2 * j + 1], k[i], right[2], right[3]);
        }
      }
    }
  }
};

template <class Config>
__device__ void mma_received(const ReceivedParams& p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  using Received = MmaReceived<Config>;
  Received({p, KeyTile::of<Config>(p, blockIdx.x)}, shared_memory).run();
}

#endif  // __CUDA_ARCH__ >= 800
