// Zeroes gradient rows that no other kernel writes: rows of queries that attend to no key because
// of their position or the block mask and, in varlen batches, rows of queries and keys that belong
// to no sequence.
#pragma once

#include "backward/params.cuh"
#include "tile/access.cuh"

template <class Config>
struct UnwrittenRows {
  using Gradient = typename Config::Gradient;

  // Called by all threads of the grid.
  __device__ static void clear(const GradientParams& p) {
    if constexpr (Config::zeroes_queries) {
      if (p.dq.data != nullptr) zero_queries(p);
    }
    if constexpr (Config::has_seqlens) {
      const int rows = Config::packed ? p.total_k : p.seqlen_k;
      const int batches = Config::packed ? 1 : p.batch;
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
  // A template, because `p.block_mask` exists only in translation units with modifications.
  template <class AnyParams>
  __device__ static void zero_queries(const AnyParams& p) {
    if constexpr (Config::block_mask) zero_unlisted_tiles(p);
    if constexpr (!Config::block_mask || Config::packed) {
      const int rows = Config::packed ? p.total_q : p.seqlen_q;
      zero_rows_if<Config::head_dim>(
          p.dq, p.heads_q, rows, Config::packed ? 1 : p.batch,
          [&](int batch, int row) { return is_unwritten(p, batch, row); });
    }
  }

  // Zeroes the query tiles that have no visible pair in the block mask. Each warp tests one tile of
  // one head. The main kernel may write a zeroed tile again, because a list contains the tiles of
  // all query heads of a KV head (listed_tiles.cuh).
  template <class AnyParams>
  __device__ static void zero_unlisted_tiles(const AnyParams& p) {
    constexpr int Br = Config::dq_Br;
    // In the block mask, each sequence has the tiles of `p.seqlen_q` rows, an upper bound.
    const int tiles = ceil_div(p.seqlen_q, Br), lane = threadIdx.x % 32;
    const int64 count = int64(p.batch) * p.heads_q * tiles;
    for (int64 index = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32; index < count;
         index += int64(gridDim.x) * blockDim.x / 32) {
      const int tile = index % tiles, head = index / tiles % p.heads_q;
      const int batch = index / tiles / p.heads_q;
      // This bound takes no search, unlike `sequence_of`.
      if (Config::packed && tile * Br >= find_sequence<0>(p, batch).seqlen_q) continue;
      const Sequence sequence = sequence_of<Config>(p, batch);
      if (tile * Br >= sequence.seqlen_q) continue;
      const MaskedBlocks<1> blocks(p.block_mask, batch, head, tile);
      unsigned any = 0;
      for (int word = lane; word < blocks.words; word += 32) any |= blocks.nonempty_word(word);
      if (__any_sync(~0u, any != 0)) continue;
      for (int row = tile * Br; row < min((tile + 1) * Br, sequence.seqlen_q); ++row) {
        zero_row<Config::head_dim>(p.dq, head, 1, sequence.q_batch, sequence.q_first + row);
      }
    }
  }

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
        zero_row<Dim>(gradient, 0, heads, unwritten / rows, unwritten % rows);
      }
    }
  }

  // Zeroes a row of `heads` heads, starting at `first_head`. Called by a warp.
  template <int Dim>
  __device__ static void zero_row(const Tensor& gradient, int first_head, int heads, int batch,
                                  int row) {
    constexpr int elements = 16 / int(sizeof(Gradient));
    constexpr int chunks = ceil_div(Dim, elements);
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
      const int column = i % chunks * elements;
      Gradient* target =
          gradient.head<Gradient>(batch, first_head + i / chunks) + row * gradient.row_stride;
      store_chunk<Gradient, Config::out_alignment>(target + column, {}, Dim - column);
    }
  }

  __device__ static bool is_unwritten(const GradientParams& p, int batch, int row) {
    if constexpr (Config::packed) {
      batch = find_sequence_rows(p.cu_seqlens_q, p.batch, p.total_q, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    row -= sequence.q_first;
    if (row < 0 || row >= sequence.seqlen_q) return true;
    // With a block mask, the other rows are written by `zero_unlisted_tiles` or the main kernel.
    if constexpr (Config::block_mask) return false;
    const Mask<Config> mask = mask_of<Config>(p, sequence, batch);
    return mask.visible_begin(row) >= mask.visible_end(row);
  }

  __device__ static bool is_unowned_key(const GradientParams& p, int batch, int row) {
    if constexpr (Config::packed) {
      batch = find_sequence_rows(p.cu_seqlens_k, p.batch, p.total_k, row).sequence;
    }
    const Sequence sequence = sequence_of<Config>(p, batch);
    return row < sequence.k_first || row - sequence.k_first >= sequence.seqlen_k;
  }
};
