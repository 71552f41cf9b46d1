// Clearing of rows that belong to no sequence: their output becomes 0 and their log-sum-exp -inf,
// so that code that reads whole arrays never reads uninitialized memory.
#pragma once

#include "params.cuh"
#include "scheduler/gaps.cuh"
#include "scheduler/tile_coord.cuh"
#include "score/softmax.cuh"
#include "score/statistics.cuh"
#include "tile/access.cuh"
#include "tile/element.cuh"

template <class Config>
struct UnownedRows {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;

  const Params& p;

  // Clears this warp's part of the rows that belong to no sequence; see `Gaps::for_each_row()`.
  __device__ void clear_all(unsigned warp, unsigned warps) const {
    Gaps{p}.for_each_row(warp, warps, [&](int row) { clear(row, 0, p.heads_q); });
  }

  // Clears this warp's part of the unowned rows in the gaps next to a sequence, for `heads` heads
  // from `first_head` on; see `Gaps::for_each_adjacent_row()`.
  __device__ void clear_around(int sequence, unsigned warp, unsigned warps, int first_head,
                               int heads) const {
    Gaps{p}.for_each_adjacent_row(sequence, warp, warps,
                                  [&](int row) { clear(row, first_head, heads); });
  }

 private:
  __device__ void clear(int row, int first_head, int heads) const {
    constexpr int elements = 16 / int(sizeof(Element));
    constexpr int chunks = ceil_div(Config::head_dim_v, elements);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
      const int head = first_head + i / chunks;
      const int column = i % chunks * elements;
      Element* target = p.out.template head<Element>(0, head) + row * p.out.row_stride + column;
      store_chunk<Element, Config::out_alignment>(target, {}, Config::head_dim_v - column);
      if (column == 0 && p.lse != nullptr) {
        static_cast<T*>(p.lse)[int64(head) * p.total_q + row] = -SoftmaxMath<T>::infinity();
      }
      if (column == 0) {
        write_statistics<Config>(p, int64(head) * p.total_q + row, RowSummary<T>());
      }
    }
  }
};
