// Sum over queries of the attention weights of each key, on CUDA cores, for every dtype and
// architecture. The forward pass has computed `lse`.
//
// A CTA owns the keys of a KV tile, and iterates over the query tiles: S^T = K Q^T, and the sums of
// exp(S - lse) over the queries. With Config::grouped, it goes through all query heads of its KV
// head.
#include "backward/simt/products.cuh"
#include "backward/softmax_backward.cuh"
#include "received/params.cuh"
#include "score/mask.cuh"
#include "scheduler/tile_coord.cuh"

template <class Config>
struct SimtReceived {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  using Products = SimtProducts<Element, Bc, Br>;
  static constexpr int side = Products::side;
  static constexpr int keys_per_thread = Products::rows_per_thread;
  static constexpr int queries_per_thread = Products::columns_per_thread;
  using Softmax = SoftmaxBackward<Config, queries_per_thread, keys_per_thread, ReceivedParams>;
  using Shared = typename Products::Shared;
  static_assert(sizeof(Shared) == Config::shared_memory, "as the host planned");
  static_assert(Config::page_size % Bc == 0, "the keys of a tile lie in one page");

  const ReceivedParams& p;
  const KeyTile keys;
  const Sequence sequence;
  const CountedQueries counted;
  const Mask<Config> mask;
  Shared& shared;
  const int x = Products::x();
  const int y = Products::y();

  T scores[keys_per_thread][queries_per_thread];
  T sums[keys_per_thread] = {};

  __device__ void run() {
    if (keys.begin < sequence.seqlen_k) {
      const QueryTileRange tiles =
          query_tile_range<Br>(mask, keys.begin, min(keys.begin + Bc, sequence.seqlen_k),
                               sequence.seqlen_q);
      const int first = max(tiles.begin, counted.begin / Br);
      const int last = min(tiles.end, ceil_div(counted.end, Br));
      for (int head = keys.first_head; head < keys.last_head; ++head) {
        for (int tile = first; tile < last; ++tile) process_tile(head, tile * Br);
      }
    }
    write();
  }

 private:
  // Computes S^T of the tile's keys and the queries from `query` on.
  __device__ void multiply(int head, int query) {
    const HeadRows<Element> queries = query_rows<Element>(p.q, sequence, head);
    if constexpr (Config::page_size > 0) {
      const auto first = paged_keys<Config>(p, sequence, keys).at(keys.begin);
      const int count = first.exists ? sequence.seqlen_k - keys.begin : 0;
      Products::template multiply<Config::head_dim>(
          scores, shared, {first.begin, p.k.row_stride, count}, 0, queries, query);
    } else {
      Products::template multiply<Config::head_dim>(
          scores, shared, key_rows<Element>(p.k, sequence, keys.head_kv), keys.begin, queries,
          query);
    }
  }

  __device__ void process_tile(int head, int query) {
    multiply(head, query);
    const auto row_of = [&](int r) { return query + x + r * side; };
    T lse[queries_per_thread];
#pragma unroll
    for (int r = 0; r < queries_per_thread; ++r) {
      lse[r] = counted_lse_log2<Config>(p, sequence, counted, head, row_of(r));
    }
    T partial[keys_per_thread] = {};
    const Softmax softmax = {p,     mask,
                             sequence, keys.batch,
                             head,  T(signed_scale<Config, double>(p) *
                                      SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<true, false>(
        row_of, keys.begin + y,
        [&](int r) {
          return RowStats<T>{lse[r], 0};
        },
        [&](int r, int n) -> T& { return scores[n][r]; }, [](int n) { return n * side; },
        [&](int r, int n, bool is_visible, bool, T exponent, T) {
          const bool counts = is_visible && counted.contain(row_of(r));
          partial[n] += counts ? SoftmaxMath<T>::exp2(exponent) : T(0);
        },
        0, queries_per_thread);
#pragma unroll
    for (int n = 0; n < keys_per_thread; ++n) sums[n] += partial[n];
  }

  __device__ void write() {
    const auto target = received_sums<Config, T>(p, sequence, keys);
#pragma unroll
    for (int n = 0; n < keys_per_thread; ++n) {
      T sum = sums[n];
#pragma unroll
      for (int bit = 1; bit < side; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      const int key = keys.begin + y + n * side;
      if (x == 0 && key < target.count) target.begin[key] = sum;
    }
  }
};

template <class Config>
__device__ void simt_received(const ReceivedParams& p) {
  using Kernel = SimtReceived<Config>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const KeyTile keys = KeyTile::of<Config>(p, blockIdx.x);
  const Sequence sequence = sequence_of<Config>(p, keys.batch);
  Kernel kernel = {p,
                   keys,
                   sequence,
                   CountedQueries::of<Config>(p, sequence, keys.batch),
                   mask_of<Config>(p, sequence, keys.batch),
                   *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run();
}
