// Zeroes gradient rows that no other kernel writes: those of queries that attend to no key because
// of their position and, in varlen batches, of queries and keys that belong to no sequence.
#pragma once

#include "backward/params.cuh"
#include "tile/access.cuh"

template <class Config>
struct UnseenRows {
  using Gradient = typename Config::Gradient;

  // Called by all threads of the grid.
  __device__ static void clear(const GradientParams& p) {
    if constexpr (Config::clears_queries) {
      if (p.dq.data != nullptr) {
        const bool is_packed = Config::has_seqlens && p.cu_seqlens_q != nullptr;
        const int rows = is_packed ? p.total_q : p.seqlen_q;
        clear_where<Config::head_dim>(p.dq, p.heads_q, rows, is_packed ? 1 : p.batch,
                                      [&](int batch, int row) { return is_unseeing(p, batch, row); });
      }
    }
    if constexpr (Config::has_seqlens) {
      const int rows = p.cu_seqlens_k != nullptr ? p.total_k : p.seqlen_k;
      const int batches = p.cu_seqlens_k != nullptr ? 1 : p.batch;
      const auto is_of_none = [&](int batch, int row) { return is_key_of_none(p, batch, row); };
      if (p.dk.data != nullptr) {
        clear_where<Config::head_dim>(p.dk, p.heads_kv, rows, batches, is_of_none);
      }
      if (p.dv.data != nullptr) {
        clear_where<Config::head_dim_v>(p.dv, p.heads_kv, rows, batches, is_of_none);
      }
    }
  }

 private:
  // Each lane tests one row of all heads. The whole warp then zeroes each row that a lane found.
  template <int Dim, class IsUnseen>
  __device__ static void clear_where(const Tensor& gradient, int heads, int rows, int batches,
                                     IsUnseen is_unseen) {
    const int lane = threadIdx.x % 32;
    const int64 step = int64(gridDim.x) * blockDim.x, count = int64(rows) * batches;
    for (int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x - lane; first < count;
         first += step) {
      const int64 own = first + lane;
      unsigned left = __ballot_sync(~0u, own < count && is_unseen(own / rows, own % rows));
      for (; left != 0; left &= left - 1) {
        const int64 found = first + __ffs(left) - 1;
        clear_row<Dim>(gradient, heads, found / rows, found % rows);
      }
    }
  }

  template <int Dim>
  __device__ static void clear_row(const Tensor& gradient, int heads, int batch, int row) {
    constexpr int elements = 16 / int(sizeof(Gradient));
    constexpr int chunks = ceil_div(Dim, elements);
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
      const int column = i % chunks * elements;
      Gradient* target = gradient.head<Gradient>(batch, i / chunks) + row * gradient.row_stride;
      store_chunk<Gradient, Config::out_alignment>(target + column, {}, Dim - column);
    }
  }

  __device__ static bool is_unseeing(const GradientParams& p, int batch, int row) {
    if (Config::has_seqlens && p.cu_seqlens_q != nullptr) {
      batch = find_sequence_rows(p.cu_seqlens_q, p.batch, p.total_q, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    row -= sequence.q_first;
    const Mask<Config> mask = mask_of<Config>(p, sequence, batch);
    return row < 0 || row >= sequence.seqlen_q || mask.visible_begin(row) >= mask.visible_end(row);
  }

  __device__ static bool is_key_of_none(const GradientParams& p, int batch, int row) {
    if (p.cu_seqlens_k != nullptr) {
      batch = find_sequence_rows(p.cu_seqlens_k, p.batch, p.total_k, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    return row < sequence.k_first || row - sequence.k_first >= sequence.seqlen_k;
  }
};
