// Sum over queries of the attention weights of each key, on tensor cores, sm_80 and newer, for
// float16 and bfloat16. The forward pass has computed `lse`.
//
// A CTA owns a KV tile of Bc keys, and iterates over the query tiles of Br rows. Scores are
// transposed, S^T = K Q^T, so that the weights of a key lie in one row of the accumulators, and
// each lane sums its part of the row. With Config::grouped, the CTA goes through all query heads of
// its KV head.
#include "backward/simt/products.cuh"
#include "backward/softmax_backward.cuh"
#include "ptx/base.cuh"
#include "received/params.cuh"
#include "score/mask.cuh"
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

  // Shared memory: K, then two stages of Q and of the log-sum-exp of its rows.
  static constexpr int keys_bytes = Bc * Layout::row_bytes;
  static constexpr int queries_bytes = Br * Layout::row_bytes;
  static constexpr int stage_bytes = queries_bytes + Br * int(sizeof(float));
  static_assert(keys_bytes + 2 * stage_bytes == Config::shared_memory, "as the host planned");

  static constexpr int lane_queries = Br / 4;    // number of queries that a lane holds pairs of
  static constexpr int lane_keys = 2 * row_tiles;  // number of keys that a lane holds pairs of
  using Softmax = SoftmaxBackward<Config, lane_queries, lane_keys, ReceivedParams>;

  const ReceivedParams& p;
  const int batch;
  const int head_kv;
  const int first_head;
  const int last_head;
  const int begin;  // first key
  const Sequence sequence;
  const Mask<Config> mask;
  const QueryTileRange tiles;
  const int first_tile;  // tiles with queries that count
  const int last_tile;
  unsigned char* const memory;
  const unsigned shared;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  Scores scores;
  float sums[lane_keys] = {};

  __device__ MmaReceived(const ReceivedParams& p, int batch, int head, int begin,
                         const Sequence& sequence, unsigned char* memory)
      : p(p),
        batch(batch),
        head_kv(Config::grouped ? head : head / (p.heads_q / p.heads_kv)),
        first_head(Config::grouped ? head * (p.heads_q / p.heads_kv) : head),
        last_head(Config::grouped ? first_head + p.heads_q / p.heads_kv : head + 1),
        begin(begin),
        sequence(sequence),
        mask(mask_of<Config>(p, sequence, batch)),
        tiles(begin < sequence.seqlen_k
                  ? query_tile_range<Br>(mask, begin, min(begin + Bc, sequence.seqlen_k),
                                         sequence.seqlen_q)
                  : QueryTileRange{}),
        first_tile(max(tiles.begin, p.first_query / Br)),
        last_tile(min(tiles.end, ceil_div(p.last_query, Br))),
        memory(memory),
        shared(ptx::shared_address(memory)) {}

  __device__ void run() {
    if (first_tile < last_tile) process_tiles();
    write(first_head);
  }

 private:
  __device__ void process_tiles() {
    start<Bc>(shared, key_rows<Element>(p.k, sequence, head_kv), begin);
    load(0, first_head, first_tile);
    int stage = 0;
    for (int head = first_head; head < last_head; ++head) {
      for (int tile = first_tile; tile < last_tile; ++tile, stage = 1 - stage) {
        ptx::cp_async_wait_group<0>();
        // All warps must have read the other stage, which the next load overwrites.
        __syncthreads();
        const bool is_last = tile == last_tile - 1;
        load(1 - stage, is_last ? head + 1 : head, is_last ? first_tile : tile + 1);
        multiply(stage);
        if (is_masked(tile)) {
          add_weights<true>(stage, head, tile);
        } else {
          add_weights<false>(stage, head, tile);
        }
      }
    }
    ptx::cp_async_wait_group<0>();
  }

  // Starts the copy of the rows from `first` on. Rows that do not exist become zeros.
  template <int Rows>
  __device__ void start(unsigned target, const HeadRows<Element>& source, int first) {
    using Copy = RowCopy<Layout, Element, Rows, Config::head_dim, threads, Config::alignment>;
    Copy::template start<true>(target,
                               Copy::source(source.begin + first * source.stride, source.stride),
                               source.stride, source.count - first);
  }

  __device__ unsigned queries_address(int stage) const {
    return shared + keys_bytes + stage * stage_bytes;
  }
  __device__ float* row_lse(int stage) const {
    return reinterpret_cast<float*>(memory + keys_bytes + stage * stage_bytes + queries_bytes);
  }

  // Starts the loads of a query tile, if there is a next head.
  __device__ void load(int stage, int head, int tile) {
    if (head < last_head) {
      start<Br>(queries_address(stage), query_rows<Element>(p.q, sequence, head), tile * Br);
      for (int row = threadIdx.x; row < Br; row += threads) {
        row_lse(stage)[row] = counted_lse_log2<Config>(p, sequence, head, tile * Br + row);
      }
    }
    ptx::cp_async_commit_group();
  }

  // Returns whether a tile may have masked pairs or queries that do not count.
  __device__ bool is_masked(int tile) const {
    return tile < tiles.full_begin || tile >= tiles.full_end ||
           begin + Bc > sequence.seqlen_k || tile * Br < p.first_query ||
           (tile + 1) * Br > min(p.last_query, sequence.seqlen_q);
  }

  // Computes S^T of the warp's keys and the queries of a tile.
  __device__ void multiply(int stage) {
    clear(scores);
    const unsigned keys =
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
        ptx::ldmatrix_x4(k[i], Layout::advance(keys, 16 * i, 2 * step));
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

  // Adds the weights of a tile to the sums of the lane's keys.
  template <bool Masked>
  __device__ void add_weights(int stage, int head, int tile) {
    const int first_query = lane % 4 * 2;
    const auto row_of = [&](int r) { return tile * Br + first_query + r / 2 * 8 + r % 2; };
    const float* lse = row_lse(stage) + first_query;
    float partial[lane_keys] = {};
    const Softmax softmax = {p,     mask,
                             sequence, batch,
                             head,  float(signed_scale<Config, double>(p) *
                                          SoftmaxMath<double>::log2_e)};
    softmax.template for_each_pair<Masked, false>(
        row_of, begin + warp * warp_keys + lane / 4,
        [&](int r) {
          return RowStats<float>{lse[r / 2 * 8 + r % 2], 0};
        },
        [&](int r, int n) -> float& { return scores[n / 2][r / 2][2 * (n % 2) + r % 2]; },
        [](int n) { return n / 2 * 16 + n % 2 * 8; },
        [&](int r, int n, bool is_visible, bool, float exponent, float) {
          if (Masked) is_visible = is_visible && counts(row_of(r));
          partial[n] += is_visible ? SoftmaxMath<float>::exp2(exponent) : 0;
        },
        0, lane_queries);
#pragma unroll
    for (int n = 0; n < lane_keys; ++n) sums[n] += partial[n];
  }

  __device__ bool counts(int row) const { return row >= p.first_query && row < p.last_query; }

  __device__ void write(int head) {
    const int heads = Config::grouped ? p.heads_kv : p.heads_q;
    const int target_head = Config::grouped ? head_kv : head;
    float* target = static_cast<float*>(p.received) +
                    (int64(batch) * heads + target_head) * p.seqlen_k;
#pragma unroll
    for (int n = 0; n < lane_keys; ++n) {
      const float sum = sum_of_lanes(sums[n]);
      const int key = begin + warp * warp_keys + lane / 4 + n / 2 * 16 + n % 2 * 8;
      if (lane % 4 == 0 && key < p.seqlen_k) target[key] = sum;
    }
  }
};

template <class Config>
__device__ void mma_received(const ReceivedParams& p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int heads = Config::grouped ? p.heads_kv : p.heads_q;
  const int tiles = ceil_div(p.seqlen_k, Config::Bc);
  const int tile = blockIdx.x / (p.batch * heads), batch_head = blockIdx.x % (p.batch * heads);
  const int batch = batch_head / heads;
  MmaReceived<Config>(p, batch, batch_head % heads, tile * Config::Bc,
                      sequence_of<Config>(p, batch), shared_memory)
      .run();
}

#endif  // __CUDA_ARCH__ >= 800
