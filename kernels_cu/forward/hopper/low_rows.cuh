// Rows whose every score is about as low as numbers go, as those of padding are under a bias of the
// lowest number. The softmax of the Hopper kernel counts such scores as none, so that a row that sees
// no others comes out empty. A warp computes such rows once more here, key by key: their largest score
// first, then the values of the keys that have it. Other rows take one vote.
#pragma once

#include "forward/hopper/cta.cuh"
#include "grid/pages.cuh"
#include "score/modify.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperLowRows {
  using Cta = HopperCta<Config>;
  using Element = typename Config::Element;
  using Visit = typename Cta::Visit;
  using Math = SoftmaxMath<float>;
  static constexpr int columns_of_lane = ceil_div(Cta::columns_v, 32);

  const Cta& cta;
  const Visit& visit;
  int row;

  // By a warp, which has written zeros to the row.
  __device__ void settle() const {
    const Mask<Config> mask = visit.template mask<Config>(cta.p);
    const int begin = max(mask.visible_begin(row), visit.keys.begin * Config::Bc);
    const int end = min(mask.visible_end(row), visit.keys.end * Config::Bc);
    float largest = -Math::infinity();
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      largest = fmaxf(largest, largest_of_warp(exponent(first, end)));
    }
    if (largest == -Math::infinity()) return;
    float sum = 0, out[columns_of_lane] = {};
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const float p = ptx::ex2_approx(exponent(first, end) - largest);
      unsigned left = __ballot_sync(~0u, p != 0);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const float of_key = __shfl_sync(~0u, p, lane);
        sum += of_key;
        add_value(first + lane, of_key, out);
      }
    }
    write(out, largest, sum);
  }

 private:
  // The exponent of two of this lane's key, -infinity where it is hidden or past the end.
  __device__ float exponent(int first, int end) const {
    const int key = min(first + int(threadIdx.x % 32), end - 1);
    const auto& sequence = visit.sequence(cta.p);
    float score = product(key);
    const int q_offset =
        Config::sequences ? sequence.template q_offset<Config>(cta.p) : cta.p.q_offset;
    const ScoreRow at = {visit.work.batch, visit.work.head,  row,
                         q_offset,         sequence.q_first, sequence.k_first};
    modify_rows<Config, 1, 1>(
        cta.p, [&](int) { return at; }, key, [&](int, int) -> float& { return score; },
        [](int) { return 0; });
    return first + int(threadIdx.x % 32) < end ? score : -Math::infinity();
  }

  __device__ float product(int key) const {
    const auto& sequence = visit.sequence(cta.p);
    const Element* q = cta.p.q.template head<const Element>(sequence.q_batch, visit.work.head) +
                       (sequence.q_first + row) * cta.p.q.row_stride;
    const Row<Element> k = row_of_key(cta.p.k, key);
    float sum = 0;
    if (!k.is_there) return 0;
#pragma unroll 1
    for (int column = 0; column < Config::head_dim; ++column) {
      sum = fmaf(widen(q[column]), widen(k.begin[column]), sum);
    }
    return sum;
  }

  __device__ Row<Element> row_of_key(const Tensor& tensor, int key) const {
    const auto& sequence = visit.sequence(cta.p);
    if constexpr (Config::page_size > 0) {
      const Params& p = cta.p;
      const PagedRows<Element, Config::page_size> pages = {
          tensor.template head<const Element>(0, visit.work.head_kv),
          p.block_table + visit.work.batch * p.block_table_stride,
          tensor.batch_stride,
          tensor.row_stride,
          p.pages,
          sequence.seqlen_k};
      return pages.at(key);
    } else {
      return {tensor.template head<const Element>(sequence.k_batch, visit.work.head_kv) +
                  (sequence.k_first + key) * tensor.row_stride,
              true};
    }
  }

  __device__ static int columns() { return min(Cta::columns_v, Cta::inside_v()); }

  __device__ void add_value(int key, float p, float (&out)[columns_of_lane]) const {
    const Row<Element> value = row_of_key(cta.p.v, key);
    if (!value.is_there) return;
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const int column = int(threadIdx.x % 32) + 32 * i;
      if (column >= columns()) continue;
      out[i] = fmaf(p, widen(value.begin[Cta::first_column_v() + column]), out[i]);
    }
  }

  __device__ void write(const float (&out)[columns_of_lane], float largest, float sum) const {
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const int column = int(threadIdx.x % 32) + 32 * i;
      if (column >= columns()) continue;
      const int at = Cta::first_column_v() + column;
      if constexpr (Config::split_keys) {
        cta.partial_row(visit.work, row)[at] = out[i] / sum;
      } else {
        cta.output_row(visit, row)[at] = narrow<typename Cta::Output>(out[i] / sum);
      }
    }
    if (threadIdx.x % 32 != 0 || Cta::rank() != 0) return;
    if (!Config::split_keys && cta.p.lse == nullptr) return;
    cta.write_log_sum_exp(visit, row, (largest + Math::log2(sum)) * Math::ln_2);
  }

  __device__ static float largest_of_warp(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
  }
};

#endif  // __CUDA_ARCH__ == 900
