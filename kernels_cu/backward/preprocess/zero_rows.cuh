// Zeroes gradient rows that no other kernel writes: rows of queries that attend to no key because
// of their position and, in varlen batches, rows of queries and keys that belong to no sequence.
#pragma once

#include "backward/params.cuh"
#include "tile/access.cuh"

template <class Config>
struct UnwrittenRows {
  using Gradient = typename Config::Gradient;

  // Called by all threads of the grid.
  __device__ static void clear(const GradientParams& p) {
    if constexpr (Config::zeroes_queries) {
      if (p.dq.data != nullptr) {
        const bool is_packed = Config::has_seqlens && p.cu_seqlens_q != nullptr;
        const int rows = is_packed ? p.total_q : p.seqlen_q;
        zero_rows_if<Config::head_dim>(
            p.dq, p.heads_q, rows, is_packed ? 1 : p.batch,
            [&](int batch, int row) { return is_unwritten(p, batch, row); });
      }
    }
    if constexpr (Config::has_seqlens) {
      const int rows = p.cu_seqlens_k != nullptr ? p.total_k : p.seqlen_k;
      const int batches = p.cu_seqlens_k != nullptr ? 1 : p.batch;
      const auto is_unowned = [&](int batch, int row) { return is_unowned_key(p, batch, row); };
      if (p.dk.data != nullptr) {
        zero_rows_if<Config::head_dim>(p.dk, p.heads_kv, rows, batches, is_unowned);
      }
      if (p.dv.data != nullptr) {
        zero_rows_if<Config::head_dim_v>(p.dv, p.heads_kv, rows, batches, is_unowned);
      }
    }
  }

 private:
  // Each lane tests one row, for all heads. The warp then zeroes each row that a lane found.
  template <int Dim, class IsUnwritten>
  __device__ static void zero_rows_if(const Tensor& gradient, int heads, int rows, int batches,
                                      IsUnwritten is_unwritten_row) {
    const int lane = threadIdx.x % 32;
    const int64 step = int64(gridDim.x) * blockDim.x, count = int64(rows) * batches;
    for (int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x - lane; first < count;
         first += step) {
      const int64 lane_row = first + lane;
      unsigned pending = __ballot_sync(
          ~0u, lane_row < count && is_unwritten_row(lane_row / rows, lane_row % rows));
      for (; pending != 0; pending &= pending - 1) {
        const int64 unwritten = first + __ffs(pending) - 1;
        zero_row<Dim>(gradient, heads, unwritten / rows, unwritten % rows);
      }
    }
  }

  template <int Dim>
  __device__ static void zero_row(const Tensor& gradient, int heads, int batch, int row) {
    constexpr int elements = 16 / int(sizeof(Gradient));
    constexpr int chunks = ceil_div(Dim, elements);
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
      const int column = i % chunks * elements;
      Gradient* target = gradient.head<Gradient>(batch, i / chunks) + row * gradient.row_stride;
      store_chunk<Gradient, Config::out_alignment>(target + column, {}, Dim - column);
    }
  }

  __device__ static bool is_unwritten(const GradientParams& p, int batch, int row) {
    if (Config::has_seqlens && p.cu_seqlens_q != nullptr) {
      batch = find_sequence_rows(p.cu_seqlens_q, p.batch, p.total_q, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    row -= sequence.q_first;
    const Mask<Config> mask = mask_of<Config>(p, sequence, batch);
    return row < 0 || row >= sequence.seqlen_q || mask.visible_begin(row) >= mask.visible_end(row);
  }

  __device__ static bool is_unowned_key(const GradientParams& p, int batch, int row) {
    if (p.cu_seqlens_k != nullptr) {
      batch = find_sequence_rows(p.cu_seqlens_k, p.batch, p.total_k, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    return row < sequence.k_first || row - sequence.k_first >= sequence.seqlen_k;
  }
};
