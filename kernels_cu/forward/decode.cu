// Fused attention forward for few query rows and many keys, as in token generation: float16 and
// bfloat16 on sm_80 and newer. It reads memory once and does little else.
//
// The query heads that share a key/value head are rows of one tile, or of few, so each key is read
// once for all of a tile's. The keys are shared out over thread blocks (shares.cuh), and a block's
// over its warps, which all hold the same rows: each warp streams tiles of Bc keys through a ring
// of its own, waits for nobody, and has a partial result at the end (Flash-Decoding, Dao et al.
// 2023). The block merges those of its warps. In a cluster of blocks the first merges what the
// others send to its shared memory. What several clusters, or blocks without one, have of the same
// rows they leave in device memory; of each few neighbours the last to arrive merges theirs, then
// goes on with what other such groups have, up to the whole.
#pragma once

#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/key_rows.cuh"
#include "tile/layout.cuh"
#include "params.cuh"
#include "tile/products_16bit.cuh"
#include "ptx/base.cuh"
#include "ptx/cluster.cuh"
#include "ptx/stream.cuh"
#include "work/sequences.cuh"
#include "work/shares.cuh"
#include "score/softmax.cuh"
#include "score/warp_softmax.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct DecodeForward {
  using Element = typename Config::Element;
  static constexpr int Br = Config::Br;
  static constexpr int Bc = Config::Bc;
  static constexpr int warps = Config::warps;
  static constexpr int stages = Config::stages;
  static constexpr int row_tiles = Br / 16;
  static constexpr int group = Config::group;  // query heads of a key/value head
  // Keys of all heads, 320 MiB with their values.
  static constexpr int64 small = (int64(320) << 20) / ((Config::head_dim + Config::head_dim_v) * 2);
  using Products = Products16Bit<Config, row_tiles>;
  using KeyLayout = typename Products::KeyLayout;
  using ValueLayout = typename Products::ValueLayout;
  using Softmax = WarpSoftmax<Element, row_tiles, Bc, Products::columns_v>;
  using Rows = KeyRows<Config>;

  static_assert(Br == 16 || Br == 32, "a warp holds all rows");
  static_assert(Bc == 16 || Bc == 32, "a lane knows the page of at most one row");
  static_assert(Config::q_in_registers, "queries have no place in shared memory");
  static_assert(stages >= 2, "one tile in use, the others on their way");

  // Shared memory: a ring for each warp.
  static constexpr int key_bytes = Bc * KeyLayout::row_bytes;
  static constexpr int stage_bytes = key_bytes + Bc * ValueLayout::row_bytes;
  static constexpr int ring_bytes = stages * stage_bytes;
  static constexpr int rings_bytes = warps * ring_bytes;

  static_assert(Br * KeyLayout::row_bytes <= stage_bytes, "queries come through a stage");

  // A partial result is a record of floats for each row: the output's columns, then the base that
  // its probabilities are relative to, and their sum. A warp's takes the place of its ring.
  static constexpr int columns = Products::columns_v;
  static constexpr int record = columns + 4;
  static_assert(Br * record * 4 <= ring_bytes, "a partial result fits");
  static_assert(Meeting::fan <= Br, "and a row of each of a group");

  // Behind the rings, in a cluster, a place for the results of an item of which the cluster's first
  // part is this block's and others follow, and a barrier that counts the bytes that those send.
  static constexpr bool cluster = Config::cluster > 0;
  static constexpr int kept_floats = Config::kept_rows * record;
  static constexpr int kept_offset = rings_bytes;
  static constexpr int state_offset = kept_offset + Config::cluster * kept_floats * 4;

  // What all warps know of the part that they work on: in registers it would be in each thread's.
  struct State {
    unsigned long long results_barrier;
    unsigned long long policy;  // of L2, for what is read
    Share share;
    Part part;
    bool has_part;
  };
  static_assert(state_offset + int(sizeof(State)) == Config::shared_memory, "as the host planned");

  const Params& p;
  const Sequences& sequences;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const unsigned ring;
  const float scale_log2;
  State& state;
  const Part& part;
  bool has_met = !cluster;

  Products products;
  typename Products::Scores scores;  // and then the probabilities
  typename Products::Output out;
  Softmax softmax;

  __device__ DecodeForward(const Params& params, const Sequences& sequences, unsigned shared)
      : p(params),
        sequences(sequences),
        ring(shared + threadIdx.x / 32 * ring_bytes),
        scale_log2(scale_to_log2<float>(params.softmax_scale)),
        state(*reinterpret_cast<State*>(shared_floats() + state_offset / 4)),
        part(state.part) {}

  __device__ void run() {
    if constexpr (cluster) announce();
    if constexpr (Config::page_size > 0) prefetch_table();
    for (bool is_first = true; find_part(is_first); is_first = false) {
      // It takes as long to come as a tile of keys.
      if (part.results > 1 && threadIdx.x == 0) {
        ptx::prefetch_l2(counter(Meeting(part.result)));
      }
      attend();
      meet();
      finish();
    }
    meet();
    // The last part of a share may be the first that the cluster has of its item.
    if (cluster && part.count > 1 && part.number == 0) merge_sent();
  }

  // Has the page numbers come to L2 while the first warp finds the block's share: whose they are is
  // not known yet, so all blocks together fetch the table, or as much of it as they can in one go.
  __device__ void prefetch_table() const {
    if (warp == 0) return;
    constexpr int line = 128 / sizeof(int);
    constexpr int lines_of_block = 32 * (warps - 1);
    const int64 block = (int64(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int64 first = (block * lines_of_block + threadIdx.x - 32) * line;
    if (first < (p.batch - 1) * sequences.block_table_stride + sequences.max_pages) {
      ptx::prefetch_l2(sequences.block_table + first);
    }
  }

  // Nothing may be sent to a block of the cluster before its barrier is there: one warp that has
  // nothing else to do makes it and says so.
  __device__ void announce() const {
    if (warp != warps - 1) {
      ptx::cluster_arrive_relaxed();
      return;
    }
    if (lane == 0) {
      ptx::mbarrier_init(results_barrier(), 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive();
  }

  // Once, as soon as there is something to wait for anyway.
  __device__ void meet() {
    if (!has_met) ptx::cluster_wait();
    has_met = true;
  }

  // The block's next part; false after the last.
  __device__ bool find_part(bool is_first) {
    if (warp == 0) {
      Shares<Config> shares(p, sequences, state.share);
      if (is_first) shares.take();
      if (lane == 0) {
        if (is_first) start(shares);
        state.has_part = shares.find_next(state.part);
      }
    }
    __syncthreads();
    return state.has_part;
  }

  __device__ void start(const Shares<Config>& shares) const {
    state.part.count = 0;
    // Keys and values are read once. Where they are few, they need not wait until what others wrote
    // to L2 has left it: 2 of 26 us for 32 MiB. Where they are many the plain copy is the fastest:
    // 476 us for 2 GiB on an H200, with a policy of evict_normal 566.
    state.policy = shares.keys_of_all() < small ? ptx::l2_evict_first_policy() : 0;
  }

  // ---- Rows. Row r is query r / group of the group's head r % group.

  __device__ int first_row() const { return part.row_tile * Br; }
  __device__ int tile_rows() const { return min(Br, part.sequence.seqlen_q * group - first_row()); }
  // The row, counted in the tile, of the accumulators' upper (0) or lower (1) half in row tile i.
  __device__ int row_of(int i, int half) const { return 16 * i + 8 * half + lane / 4; }

  __device__ int visible_end(int row) const {
    const int seqlen_k = part.sequence.seqlen_k;
    if (!Config::causal) return seqlen_k;
    return clamp(query_of(row) + offset() + 1, 0, seqlen_k);
  }

  // Query i sees keys j <= i + offset when causal.
  __device__ int offset() const {
    return Config::sequences ? part.sequence.seqlen_k - part.sequence.seqlen_q : p.q_offset;
  }

  // Which query of the sequence a row is, and of which of the group's heads.
  __device__ int query_of(int row) const { return (first_row() + row) / group; }
  __device__ int head_of(int row) const { return (first_row() + row) % group; }

  // Through a stage of the warp's ring, which is not needed yet.
  __device__ void start_queries(unsigned target) const {
    using Copy = WarpCopy<KeyLayout, Element, Br, Config::head_dim, Config::alignment>;
    const Element* queries = p.q.head<const Element>(part.sequence.q_batch, part.head_kv * group) +
                             part.sequence.q_first * p.q.row_stride + Copy::first_column();
    const int inside = tile_rows();
    Copy::start(target, state.policy, [&](int row, bool& is_inside) {
      is_inside = row < inside;
      return queries + query_of(row) * p.q.row_stride + head_of(row) * p.q.head_stride;
    });
  }

  // ---- A part's keys.

  __device__ void attend() {
    const int last_seen = visible_end(tile_rows() - 1);
    const int end = min(part.end * warps, ceil_div(last_seen, Bc));
    const int first = part.begin * warps + warp;
    constexpr int last_stage = stages - 1;
    Rows rows_to_load(p, sequences, part, first, state.policy);
    clear();
    const int seen_by_all = visible_end(0);
    // Loads go last_stage tiles ahead. One loop does both, so that the code, which is fetched from
    // memory too, is there once.
    int load_stage = 0;
    for (int tile = first - last_stage * warps; tile < end; tile += warps) {
      const bool visits = tile >= first;
      const int stage = load_stage == last_stage ? 0 : load_stage + 1;
      if (visits) ptx::cp_async_wait_group<stages - 2>();
      // All lanes' copies have landed, and all have left the stage that the next load takes.
      __syncwarp();
      // The queries came with the first tile.
      if (tile == first) {
        products.queries.keep(ring + last_stage * stage_bytes);
        __syncwarp();
      }
      const unsigned target = ring + load_stage * stage_bytes;
      const int load_tile = tile + last_stage * warps;
      if (load_tile < end)
        rows_to_load.template start<warps>(target, target + key_bytes, load_tile);
      if (load_tile == first) start_queries(ring + last_stage * stage_bytes);
      ptx::cp_async_commit_group();
      if (visits) visit(ring + stage * stage_bytes, tile * Bc, (tile + 1) * Bc > seen_by_all);
      load_stage = stage;
    }
    ptx::cp_async_wait_group<0>();
  }

  __device__ void clear() {
    softmax.reset();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][j][c] = 0;
      }
    }
  }

  __device__ void visit(unsigned stage, int first_key, bool needs_mask) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Bc / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[i][j][c] = 0;
      }
    }
    products.multiply_queries_keys(scores, 0, stage);
    Softmax::template apply_factor<Config>(scores);
    if (needs_mask) {
      Softmax::mask(scores, [&](int i, int half) {
        return visible_end(row_of(i, half)) - first_key - threadIdx.x % 4 * 2;
      });
    }
    softmax.update_maxima(scores, out, scale_log2);
    typename Softmax::PerRow base;
    softmax.bases(base, scale_log2);
    products.multiply_probabilities_values(out, scores, stage + key_bytes, [&](int i, int j) {
      softmax.exponentiate(scores, i, j, base, scale_log2);
    });
  }

  // ---- Merging: of the warps' results, then, where an item has several parts, of the blocks'.
  // None of it runs often, and code is fetched from memory like anything else: no loop is unrolled
  // further than it takes to have several loads under way.

  // Where a merged result goes.
  enum class To { output, cluster, memory };

  __device__ static float* shared_floats() {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    return reinterpret_cast<float*>(shared_memory);
  }

  __device__ void finish() {
    leave_result();
    __syncthreads();
    const To to = part.is_whole() ? To::output : part.count == 1 ? To::memory : To::cluster;
    merge<warps>(shared_floats(), ring_bytes / 4, warps, 0, tile_rows(), to, part.result);
    if (part.count == 1) join();
    // Before the rings and the state are used again.
    __syncthreads();
  }

  // The cluster's result, or the block's, is in device memory. Of each group the last to arrive
  // goes on with what it has merged.
  __device__ void join() const {
#pragma unroll 1
    for (Meeting meeting(part.result); meeting.step < part.results; meeting.rise()) {
      const int count = meeting.count(part.results);
      if (count == 1) continue;
      if (!is_last_to_arrive(counter(meeting), count)) return;
      merge_group(meeting, count);
    }
  }

  // All rows, as many at a time as fit.
  __device__ void merge_group(const Meeting& meeting, int count) const {
    const To to = meeting.is_last(part.results) ? To::output : To::memory;
    const int all_rows = tile_rows();
    const int at_once = rings_bytes / (count * record * 4);
#pragma unroll 1
    for (int first_row = 0; first_row < all_rows; first_row += at_once) {
      const int rows = min(at_once, all_rows - first_row);
      gather(meeting, count, first_row, rows);
      merge<Meeting::fan>(shared_floats(), rows * record, count, first_row, rows, to,
                          meeting.first);
      // All warps have left what the next rows take the place of.
      __syncthreads();
    }
  }

  // In a cluster: what the other blocks with parts of the item have sent or will send.
  __device__ void merge_sent() const {
    if (threadIdx.x == 0) {
      const int bytes = tile_rows() * (columns / 4 + 1) * 16;
      ptx::mbarrier_arrive_expect_tx(results_barrier(), (part.count - 1) * bytes);
    }
    ptx::mbarrier_wait_for_cluster(results_barrier(), 0);
    merge<Config::cluster>(kept_results(), kept_floats, part.count, 0, tile_rows(),
                           part.results == 1 ? To::output : To::memory, part.result);
    join();
  }

  __device__ static float* kept_results() { return shared_floats() + kept_offset / 4; }
  __device__ static unsigned results_barrier() {
    return ptx::shared_address(shared_floats()) + state_offset;
  }

  // Writes the warp's result to shared memory.
  __device__ void leave_result() {
    softmax.add_lanes();
    float* result = shared_floats() + warp * (ring_bytes / 4);
    // All lanes have left the ring.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        if (row >= tile_rows()) continue;
        const SoftmaxRow<float>& state = softmax.rows[i][half];
        float* target = result + row * record;
        target[columns] =
            state.saw_nothing() ? -SoftmaxMath<float>::infinity() : state.base(scale_log2);
        target[columns + 1] = state.sum;
#pragma unroll
        for (int j = 0; j < columns / 8; ++j) {
          *reinterpret_cast<Vector<float, 2>*>(target + products.column(j, 0)) = {
              {out[i][j][2 * half], out[i][j][2 * half + 1]}};
        }
      }
    }
  }

  // Merges the rows [first, first + rows) of at most Most results in shared memory, that begin
  // result_floats apart, always in the same order. In device memory the merged one takes the place
  // of result `target`. A thread has four columns of a row, and all its loads are under way before
  // it needs one.
  template <int Most>
  __device__ void merge(const float* source, int result_floats, int results, int first, int rows,
                        To to, int target) const {
    constexpr int row_chunks = columns / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * row_chunks; i += 32 * warps) {
      const int row = i / row_chunks;
      const int column = i % row_chunks * 4;
      // The last stands in for those that are not there.
      const auto result = [&](int r) {
        return source + row * record + min(r, results - 1) * result_floats;
      };
      float base = -SoftmaxMath<float>::infinity();
#pragma unroll
      for (int r = 0; r < Most; ++r) base = fmaxf(base, result(r)[columns]);
      float sum = 0;
      Vector<float, 4> merged = {};
#pragma unroll
      for (int r = 0; r < Most; ++r) {
        const float* one = result(r);
        const auto values = *reinterpret_cast<const Vector<float, 4>*>(one + column);
        // What saw no key has no say: it has no base, and columns of anything.
        const auto state = *reinterpret_cast<const Vector<float, 2>*>(one + columns);
        const bool counts = r < results && state.at[0] > -SoftmaxMath<float>::infinity();
        const float weight = counts ? SoftmaxMath<float>::exp2(state.at[0] - base) : 0;
        sum = fmaf(weight, counts ? state.at[1] : 0, sum);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          merged.at[c] = fmaf(weight, counts ? values.at[c] : 0, merged.at[c]);
        }
      }
      if (to != To::output) {
        leave_partial((first + row) * record + column, merged, to, target);
        if (column == 0) leave_partial((first + row) * record + columns, {{base, sum}}, to, target);
        continue;
      }
      const float normalizer = sum == 0 ? 0 : 1 / sum;
#pragma unroll
      for (int c = 0; c < 4; ++c) merged.at[c] *= normalizer;
      write_output(first + row, column, merged);
      if (column == 0 && p.lse != nullptr) {
        const float log_sum =
            sum == 0 ? -SoftmaxMath<float>::infinity() : base + SoftmaxMath<float>::log2(sum);
        write_log_sum_exp(first + row, log_sum * SoftmaxMath<float>::ln_2);
      }
    }
  }

  // Four floats of a result that others are merged with.
  __device__ void leave_partial(int index, const Vector<float, 4>& values, To to,
                                int target) const {
    if (!cluster || to == To::memory) {
      *reinterpret_cast<Vector<float, 4>*>(partial_result(target) + index) = values;
      return;
    }
    if constexpr (cluster) {
      float* kept = kept_results() + part.number * kept_floats + index;
      if (part.number == 0) {
        *reinterpret_cast<Vector<float, 4>*>(kept) = values;
      } else {
        ptx::st_async(ptx::map_to_block(ptx::shared_address(kept), part.place), values.at,
                      ptx::map_to_block(results_barrier(), part.place));
      }
    }
  }

  __device__ void write_output(int row, int column, const Vector<float, 4>& values) const {
    Vector<Element, 4> narrowed;
#pragma unroll
    for (int c = 0; c < 4; ++c) narrowed.at[c] = narrow<Element>(values.at[c]);
    const int64 output_row = part.sequence.q_first + query_of(row);
    Element* target =
        p.out.head<Element>(part.sequence.q_batch, part.head_kv * group + head_of(row)) +
        output_row * p.out.row_stride + column;
    const int inside = Config::head_dim_v - column;
    if (Config::out_alignment >= 8 && (Config::head_dim_v % 16 == 0 || inside >= 4)) {
      *reinterpret_cast<Vector<Element, 4>*>(target) = narrowed;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < inside) target[c] = narrowed.at[c];
      }
    }
  }

  __device__ void write_log_sum_exp(int row, float lse) const {
    // (batch, heads_q, seqlen_q), or (heads_q, total_q).
    const bool is_packed = Config::sequences && sequences.cu_seqlens_q != nullptr;
    const int seqlen = is_packed ? sequences.total_q : p.seqlen_q;
    const int64 head =
        int64(part.sequence.q_batch) * p.heads_q + part.head_kv * group + head_of(row);
    static_cast<float*>(p.lse)[head * seqlen + part.sequence.q_first + query_of(row)] = lse;
  }

  // The place in the workspace of one of the item's results.
  __device__ float* partial_result(int result) const {
    return static_cast<float*>(p.workspace) + int64(part.slot_of(result)) * (Br * record);
  }

  __device__ int* counter(const Meeting& meeting) const {
    return sequences.counters + part.slot_of(meeting.counter());
  }

  // Whether all others of `count` have left their results. The counter is zero again then.
  __device__ bool is_last_to_arrive(int* counter, int count) const {
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = ptx::atom_add_acq_rel(counter, 1) == count - 1;
      if (is_last) *counter = 0;
    }
    return __syncthreads_or(is_last);
  }

  // Brings the rows [first_row, first_row + rows) of a group's results to shared memory, around L1,
  // which knows nothing of other SMs' writes.
  __device__ void gather(const Meeting& meeting, int count, int first_row, int rows) const {
    const unsigned target = ptx::shared_address(shared_floats());
    const int chunks = rows * (record / 4);
#pragma unroll 1
    for (int r = warp; r < count; r += warps) {
      const int result = meeting.first + r * meeting.step;
      const float* source = partial_result(result) + first_row * record;
#pragma unroll 4
      for (int i = lane; i < chunks; i += 32) {
        ptx::cp_async<16>(target + (r * chunks + i) * 16, source + 4 * i, 16);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }
};

template <class Config>
__device__ void decode_forward(const Params& params, const Sequences& sequences) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  DecodeForward<Config>(params, sequences, ptx::shared_address(shared_memory)).run();
}

#endif  // __CUDA_ARCH__ >= 800
