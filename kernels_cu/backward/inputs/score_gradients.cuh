// Gradients of a tile of scores, for the kernels of bias and capture gradients. Products run on
// tensor cores for 16-bit inputs on sm_80 and newer, and on CUDA cores otherwise.
#pragma once

#include "backward/params.cuh"
#include "backward/simt/products.cuh"
#include "backward/softmax_backward.cuh"
#include "score/mask.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/products_16bit.cuh"

__host__ __device__ constexpr int larger(int x, int y) { return x > y ? x : y; }

// Products of query rows and key rows. product[i][j] of a thread is that of query row `row(i)` and
// key `first_key() + step(j)`, both counted from the start of the tile.
template <class Config, bool OnTensorCores>
struct ScoreProducts {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  // Float64 values take two registers each, so the tile is smaller.
  static constexpr int size = sizeof(T) == 8 ? 32 : 64;  // number of rows, and of keys, of a tile
  using Products = SimtProducts<Element, size, size>;
  using Shared = typename Products::Shared;
  static constexpr int rows_per_thread = Products::rows_per_thread,
                       keys_per_thread = Products::columns_per_thread;
  static constexpr int memory = sizeof(Shared);

  __device__ static int row(int i) { return Products::y() + i * Products::side; }
  __device__ static int first_key() { return Products::x(); }
  __device__ static constexpr int step(int j) { return j * Products::side; }

  template <int Dim>
  __device__ static void multiply(T (&product)[rows_per_thread][keys_per_thread],
                                  unsigned char* memory, const HeadRows<Element>& queries, int row,
                                  const HeadRows<Element>& keys, int key) {
    Products::template multiply<Dim>(product, *reinterpret_cast<Shared*>(memory), queries, row,
                                     keys, key);
  }
};

#if __CUDA_ARCH__ >= 800

// Each of eight warps computes the products of 16 rows and 32 keys of a tile of 64 x 64.
template <class Config>
struct ScoreProducts<Config, true> {
  using Element = typename Config::Element;
  using T = float;
  static constexpr int size = 64;
  static constexpr int rows_per_thread = 2, keys_per_thread = 8;
  static constexpr int dim = larger(Config::head_dim, Config::head_dim_v);
  static constexpr int memory = 2 * size * round_up(dim, 16) * int(sizeof(Element));

  __device__ static int row(int i) { return warp() / 2 * 16 + i * 8 + lane() / 4; }
  __device__ static int first_key() { return warp() % 2 * 32 + lane() % 4 * 2; }
  __device__ static constexpr int step(int j) { return j / 2 * 8 + j % 2; }

  template <int Dim>
  __device__ static void multiply(T (&product)[rows_per_thread][keys_per_thread],
                                  unsigned char* memory, const HeadRows<Element>& queries, int row,
                                  const HeadRows<Element>& keys, int key) {
    using Products = Products16Bit<Tile<Dim>, 1>;
    using Layout = typename Products::KeyLayout;
    const unsigned rows_address = ptx::shared_address(memory);
    const unsigned keys_address = rows_address + size * Layout::row_bytes;
    // Wait until all threads have read the operands that the loads overwrite.
    __syncthreads();
    load<Dim, Layout>(rows_address, queries, row);
    load<Dim, Layout>(keys_address, keys, key);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    typename Products::Scores scores;
    clear(scores);
    Products().multiply_queries_keys(scores, rows_address + warp() / 2 * 16 * Layout::row_bytes,
                                     keys_address + warp() % 2 * 32 * Layout::row_bytes);
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < keys_per_thread; ++j) product[i][j] = scores[0][j / 2][2 * i + j % 2];
    }
  }

 private:
  // Template argument of `Products16Bit`.
  template <int Dim>
  struct Tile {
    using Element = typename Config::Element;
    static constexpr int Bc = 32;
    static constexpr int head_dim = Dim;
    static constexpr int head_dim_v = Dim;
    static constexpr bool q_in_registers = false;
  };

  template <int Dim, class Layout>
  __device__ static void load(unsigned target, const HeadRows<Element>& source, int first) {
    using Copy = RowCopy<Layout, Element, size, Dim, 256, Config::alignment>;
    const Element* begin = source.begin + int64(first) * source.stride;
    Copy::template start<true>(target, Copy::source(begin, source.stride), source.stride,
                               source.count - first);
  }

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
};

template <class Config>
constexpr bool has_tensor_cores = sizeof(typename Config::Element) == 2;

#else

template <class Config>
constexpr bool has_tensor_cores = false;

#endif  // __CUDA_ARCH__ >= 800

template <class Config>
struct ScoreGradients : ScoreProducts<Config, has_tensor_cores<Config>> {
  using Products = ScoreProducts<Config, has_tensor_cores<Config>>;
  using T = typename Products::T;
  using Products::keys_per_thread;
  using Products::rows_per_thread;
  using Products::size;
  static constexpr int threads = 256;
  // Row stride of a tile in shared memory: one more than `size`, to avoid bank conflicts.
  static constexpr int stride = size + 1;
  static constexpr int memory = larger(Products::memory, size * stride * int(sizeof(T)));
  static_assert(memory == (has_tensor_cores<Config> ? Config::score_memory
                                                    : Config::simt_score_memory),
                "as the host planned");

  T products[rows_per_thread][keys_per_thread];  // unscaled scores: products of q and k
  // Gradients of the modified scores; 0 for masked pairs.
  T gradients[rows_per_thread][keys_per_thread];

  // Computes `products` and `gradients` of the tile that starts at `row` and `key` of a sequence.
  __device__ void compute(const GradientParams& p, unsigned char* memory, const Sequence& sequence,
                          const Mask<Config>& mask, int batch, int head, int row, int key) {
    using Element = typename Config::Element;
    const int head_kv = head / (p.heads_q / p.heads_kv);
    Products::template multiply<Config::head_dim>(products, memory,
                                                  query_rows<Element>(p.q, sequence, head), row,
                                                  key_rows<Element>(p.k, sequence, head_kv), key);
    Products::template multiply<Config::head_dim_v>(
        gradients, memory, query_rows<Element>(p.dout, sequence, head), row,
        key_rows<Element>(p.v, sequence, head_kv), key);
    T scores[rows_per_thread][keys_per_thread];
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < keys_per_thread; ++j) scores[i][j] = products[i][j];
    }
    const T scale_log2 = signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e;
    const SoftmaxBackward<Config, rows_per_thread, keys_per_thread> softmax_backward = {
        p, mask, sequence, batch, head, scale_log2, kept_weight<Config, T>(p)};
    unsigned kept = ~0u;  // a bit for each pair
    if constexpr (Config::dropout) {
      static_assert(rows_per_thread * keys_per_thread <= 32, "a bit for each pair");
      const DropoutNumbers numbers = dropout_numbers<Config>(p);
#pragma unroll
      for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < keys_per_thread; ++j) {
          const int pair_key = key + Products::first_key() + Products::step(j);
          if (numbers.keeps(batch, head, row + Products::row(i), pair_key)) continue;
          gradients[i][j] = 0;
          kept &= ~(1u << (i * keys_per_thread + j));
        }
      }
    }
    softmax_backward.template run<true, false>(
        [&](int r) { return row + Products::row(r); }, key + Products::first_key(),
        [&](int r) { return row_stats_of<Config>(p, sequence, head, row + Products::row(r)); },
        [&](int r, int n) -> T& { return scores[r][n]; },
        [&](int r, int n) -> T& { return gradients[r][n]; },
        [](int n) { return Products::step(n); },
        [&](int r, int n) { return bool(kept >> (r * keys_per_thread + n) & 1); });
  }
};
