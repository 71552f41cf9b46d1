// The gradients of a tile of scores, for kernels that sum up nothing else: on the CUDA cores, of
// every dtype. A thread has rows and keys that are `side` apart.
#pragma once

#include "backward/params.cuh"
#include "backward/simt_products.cuh"
#include "backward/weigh.cuh"
#include "score/mask.cuh"

template <class Config>
struct ScoreGradients {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  // What a thread holds of float64 takes twice the registers.
  static constexpr int size = sizeof(T) == 8 ? 32 : 64;  // rows of a tile, and keys
  using Products = SimtProducts<Element, size, size>;
  using Shared = typename Products::Shared;
  static constexpr int side = Products::side;
  static constexpr int own = size / side;
  static constexpr int threads = Products::threads;

  T products[own][own];   // of queries and keys
  T gradients[own][own];  // of the scores that the softmax takes; 0 where hidden

  __device__ static int row(int i) { return Products::y() + i * side; }
  __device__ static int key(int j) { return Products::x() + j * side; }

  // Of the tile that begins with a row and a key of a sequence.
  __device__ void find(const GradientParams& p, Shared& shared, const Sequence& at,
                       const Mask<Config>& mask, int batch, int head, int first_row,
                       int first_key) {
    const int head_kv = head / (p.heads_q / p.heads_kv);
    Products::template multiply<Config::head_dim>(
        products, shared, query_rows<Element>(p.q, at, head), first_row,
        key_rows<Element>(p.k, at, head_kv), first_key);
    Products::template multiply<Config::head_dim_v>(
        gradients, shared, query_rows<Element>(p.dout, at, head), first_row,
        key_rows<Element>(p.v, at, head_kv), first_key);
    T scores[own][own];
#pragma unroll
    for (int i = 0; i < own; ++i) {
#pragma unroll
      for (int j = 0; j < own; ++j) scores[i][j] = products[i][j];
    }
    const T scale_log2 = signed_scale<Config, double>(p) * SoftmaxMath<double>::log2_e;
    const Weigh<Config, own, own> weigh = {p, mask, at, batch, head, scale_log2};
    weigh.template run<true, false>(
        [&](int r) { return first_row + row(r); }, first_key + key(0),
        [&](int r) { return row_terms_of<Config>(p, at, head, first_row + row(r)); },
        [&](int r, int n) -> T& { return scores[r][n]; },
        [&](int r, int n) -> T& { return gradients[r][n]; }, [](int n) { return n * side; });
  }
};
