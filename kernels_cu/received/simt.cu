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

  const ReceivedParams& p;
  const int batch;
  const int head_kv;
  const int begin;  // first key
  const Sequence sequence;
  const Mask<Config> mask;
  Shared& shared;
  const int x = Products::x();
  const int y = Products::y();

  T scores[keys_per_thread][queries_per_thread];
  T sums[keys_per_thread] = {};

  __device__ void run(int first_head, int last_head) {
    if (begin < sequence.seqlen_k) {
      const QueryTileRange tiles = query_tile_range<Br>(
          mask, begin, min(begin + Bc, sequence.seqlen_k), sequence.seqlen_q);
      const int first = max(tiles.begin, p.first_query / Br);
      const int last = min(tiles.end, ceil_div(p.last_query, Br));
      for (int head = first_head; head < last_head; ++head) {
        for (int tile = first; tile < last; ++tile) process_tile(head, tile * Br);
      }
    }
    write(first_head);
  }

 private:
  __device__ void process_tile(int head, int query) {
    Products::template multiply<Config::head_dim>(
        scores, shared, key_rows<Element>(p.k, sequence, head_kv), begin,
        query_rows<Element>(p.q, sequence, head), query);
    const auto row_of = [&](int r) { return query + x + r * side; };
    T lse[queries_per_thread];
#pragma unroll
    for (int r = 0; r < queries_per_thread; ++r) {
      lse[r] = counted_lse_log2<Config>(p, sequence, head, row_of(r));
    }
    T partial[keys_per_thread] = {};
    const Softmax softmax = {p,     mask,
                             sequence, batch,
                             head,  T(signed_scale<Config, double>(p) *
                                      SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<true, false>(
        row_of, begin + y,
        [&](int r) {
          return RowStats<T>{lse[r], 0};
        },
        [&](int r, int n) -> T& { return scores[n][r]; }, [](int n) { return n * side; },
        [&](int r, int n, bool is_visible, bool, T exponent, T) {
          const bool counts = row_of(r) >= p.first_query && row_of(r) < p.last_query;
          partial[n] += is_visible && counts ? SoftmaxMath<T>::exp2(exponent) : T(0);
        },
        0, queries_per_thread);
#pragma unroll
    for (int n = 0; n < keys_per_thread; ++n) sums[n] += partial[n];
  }

  __device__ void write(int first_head) {
    const int heads = Config::grouped ? p.heads_kv : p.heads_q;
    const int head = Config::grouped ? head_kv : first_head;
    T* target = static_cast<T*>(p.received) + (int64(batch) * heads + head) * p.seqlen_k;
#pragma unroll
    for (int n = 0; n < keys_per_thread; ++n) {
      T sum = sums[n];
#pragma unroll
      for (int bit = 1; bit < side; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      const int key = begin + y + n * side;
      if (x == 0 && key < p.seqlen_k) target[key] = sum;
    }
  }
};

template <class Config>
__device__ void simt_received(const ReceivedParams& p) {
  using Kernel = SimtReceived<Config>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int group = p.heads_q / p.heads_kv;
  const int heads = Config::grouped ? p.heads_kv : p.heads_q;
  const int tile = blockIdx.x / (p.batch * heads), batch_head = blockIdx.x % (p.batch * heads);
  const int batch = batch_head / heads, head = batch_head % heads;
  const Sequence sequence = sequence_of<Config>(p, batch);
  Kernel kernel = {p,
                   batch,
                   Config::grouped ? head : head / group,
                   tile * Config::Bc,
                   sequence,
                   mask_of<Config>(p, sequence, batch),
                   *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run(Config::grouped ? head * group : head, Config::grouped ? (head + 1) * group : head + 1);
}
