// Rows whose every score is about as low as numbers go, as those of padding are under a bias of the
// lowest number. The softmax of the Hopper kernel counts such scores as none, so that a row that sees
// no others comes out as 0. This launch after it computes such rows once more, a warp for each row:
// first the largest score, then the values of the keys that have it. Within the attention kernel the
// same code costs other rows up to 10% (bias of bfloat16, head_dim 128, 8192 keys, H100), as it takes
// registers from the main loop.
#pragma once

#include "grid/pages.cuh"
#include "grid/sequences.cuh"
#include "grid/split.cuh"
#include "params.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"

template <class Config>
struct LowRow {
  using Element = typename Config::Element;
  using Math = SoftmaxMath<float>;
  static constexpr int columns_of_lane = ceil_div(Config::head_dim_v, 32);

  const Params& p;
  const Sequence& sequence;
  int batch;
  int head;
  int row;

  // Called by a warp.
  __device__ void settle() const {
    const int q_offset = Config::sequences ? sequence.template q_offset<Config>(p) : p.q_offset;
    const Mask<Config> mask(sequence.seqlen_k, q_offset, {p, batch});
    const int begin = mask.visible_begin(row), end = mask.visible_end(row);
    float largest = -Math::infinity();
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      largest = fmaxf(largest, largest_of_warp(exponent(first, end, q_offset)));
    }
    float sum = 0, out[columns_of_lane] = {};
    if (largest == -Math::infinity()) return write(out, largest, 1);
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const float p_of_lane = Math::exp2(exponent(first, end, q_offset) - largest);
      unsigned left = __ballot_sync(~0u, p_of_lane != 0);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const float probability = __shfl_sync(~0u, p_of_lane, lane);
        sum += probability;
        add_value(first + lane, probability, out);
      }
    }
    write(out, largest, sum);
  }

  // Called by the lane of a row. The attention kernel sets rows that are empty to -0.
  __device__ bool is_empty() const {
    if (row >= sequence.seqlen_q) return false;
    if (p.lse != nullptr) return *log_sum_exp() == -Math::infinity();
    const Partials<Config> partials(p);
    if constexpr (Config::split_keys) {
      bool sees_nothing = true;
      for (int split = 0; split < p.num_splits; ++split) {
        sees_nothing &= *partials.lse_row(split, index()) == -Math::infinity();
      }
      return sees_nothing;
    } else {
      bool is_marked = true;
      for (int column = 0; column < min(8, Config::head_dim_v); ++column) {
        is_marked &= __float_as_uint(widen(output()[column])) == 0x80000000u;
      }
      return is_marked;
    }
  }

 private:
  __device__ Element* output() const {
    return p.out.head<Element>(sequence.q_batch, head) +
           (sequence.q_first + row) * p.out.row_stride;
  }
  __device__ float* log_sum_exp() const {
    return p.lse == nullptr ? nullptr : static_cast<float*>(p.lse) + index();
  }
  __device__ int64 index() const {
    if constexpr (Config::sequences) {
      return Partials<Config>::row_index(p, sequence, batch, head, row);
    } else {
      return Partials<Config>::row_index(p, batch, head, row);
    }
  }

  // The exponent of two of the lane's key; -infinity if it is hidden, or past the end.
  __device__ float exponent(int first, int end, int q_offset) const {
    const int asked = first + int(threadIdx.x % 32), key = min(asked, end - 1);
    float score = product(key);
    const ScoreRow at = {batch, head, row, q_offset, sequence.q_first, sequence.k_first};
    modify_rows<Config, 1, 1>(
        p, [&](int) { return at; }, key, [&](int, int) -> float& { return score; },
        [](int) { return 0; });
    return asked < end ? score : -Math::infinity();
  }

  __device__ float product(int key) const {
    const Element* q = p.q.head<const Element>(sequence.q_batch, head) +
                       (sequence.q_first + row) * p.q.row_stride;
    const Row<Element> k = row_of_key(p.k, key);
    float sum = 0;
#pragma unroll 1
    for (int column = 0; k.is_there && column < Config::head_dim; ++column) {
      sum = fmaf(widen(q[column]), widen(k.begin[column]), sum);
    }
    return sum;
  }

  __device__ Row<Element> row_of_key(const Tensor& tensor, int key) const {
    const int head_kv = head / (p.heads_q / p.heads_kv);
    if constexpr (Config::page_size > 0) {
      const PagedRows<Element, Config::page_size> pages = {
          tensor.head<const Element>(0, head_kv),
          p.block_table + batch * p.block_table_stride,
          tensor.batch_stride,
          tensor.row_stride,
          p.pages,
          sequence.seqlen_k};
      return pages.at(key);
    } else {
      return {tensor.head<const Element>(sequence.k_batch, head_kv) +
                  (sequence.k_first + key) * tensor.row_stride,
              true};
    }
  }

  __device__ void add_value(int key, float probability, float (&out)[columns_of_lane]) const {
    const Row<Element> value = row_of_key(p.v, key);
    if (!value.is_there) return;
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const int column = int(threadIdx.x % 32) + 32 * i;
      if (column < Config::head_dim_v) out[i] = fmaf(probability, widen(value.begin[column]), out[i]);
    }
  }

  __device__ void write(const float (&out)[columns_of_lane], float largest, float sum) const {
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const int column = int(threadIdx.x % 32) + 32 * i;
      if (column < Config::head_dim_v) output()[column] = narrow<Element>(out[i] / sum);
    }
    float* lse = log_sum_exp();
    if (lse != nullptr && threadIdx.x % 32 == 0) *lse = (largest + Math::log2(sum)) * Math::ln_2;
  }

  __device__ static float largest_of_warp(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
  }
};

// Each warp looks at 32 rows of a head at a time.
template <class Config>
__device__ void settle_low_rows(const Params& p) {
  const int lane = threadIdx.x % 32;
  const int runs = ceil_div(p.seqlen_q, 32);
  const int64 count = int64(p.batch) * p.heads_q * runs;
  const int64 step = int64(gridDim.x) * (blockDim.x / 32);
  for (int64 run = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32; run < count; run += step) {
    const int batch = run / runs / p.heads_q, head = run / runs % p.heads_q;
    Sequence sequence = {batch, 0, p.seqlen_q, batch, 0, p.seqlen_k};
    if constexpr (Config::sequences) {
      int capacity;
      sequence = find_sequence<Config::page_size>(p, batch, capacity);
    }
    const int row = run % runs * 32 + lane;
    unsigned left =
        __ballot_sync(~0u, LowRow<Config>{p, sequence, batch, head, row}.is_empty());
    for (; left != 0; left &= left - 1) {
      LowRow<Config>{p, sequence, batch, head, row - lane + __ffs(left) - 1}.settle();
    }
  }
}
