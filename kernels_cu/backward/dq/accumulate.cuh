// Sums of dq in the workspace, one tile per query tile. The CTAs of the main kernel add to a tile
// in a fixed order. Another kernel then converts the sums to dq.
#pragma once

#include "backward/params.cuh"
#include "backward/dq/semaphore.cuh"
#include "backward/tile_coord.cuh"
#include "scheduler/tile_coord.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"
#include "tile/layout.cuh"

// Layout of a tile of `Rows` x `Columns` sums: the accumulator fragments of `row_warps` x
// `column_warps` warps, so that a warp adds to 512 contiguous bytes at a time. Warps with the same
// rows take 16 columns each, round-robin.
template <int Rows, int Columns, int row_warps, int column_warps>
struct DqFragments {
  static constexpr int warps = row_warps * column_warps;
  static constexpr int row_tiles = Rows / 16 / row_warps;
  static constexpr int column_tiles = Columns / 8 / column_warps;
  static_assert(row_tiles * row_warps * 16 == Rows, "whole fragments");
  static_assert(column_tiles % 2 == 0 && column_tiles * column_warps * 8 == Columns,
                "pairs of fragments");
  static constexpr int64 floats = int64(Rows) * Columns;

  // Returns the offset of a lane's four floats of fragment [i][j].
  __device__ static int fragment_offset(int warp, int i, int j, int lane) {
    return (((warp * row_tiles + i) * column_tiles + j) * 32 + lane) * 4;
  }
  // Return the first row, and the first column, of a warp's fragment [i][j].
  __device__ static int row(int warp, int i) {
    return (warp / column_warps * row_tiles + i) * 16;
  }
  __device__ static int column(int warp, int j) {
    return (j / 2 * column_warps + warp % column_warps) * 16 + j % 2 * 8;
  }
};

#if __CUDA_ARCH__ >= 800

// Adds a warp's fragments to a dq tile while the CTA holds the semaphore. On sm_90 and newer, `red`
// instructions add to memory. On older GPUs, the accumulators start from the sums of the earlier
// CTAs and are stored. The dq order's first CTA always stores, so that no kernel clears the sums.
// An accumulator holds `tiles_at_once` consecutive fragments of each row tile.
template <class Fragments, int tiles_at_once>
struct DqAccumulator {
  using Sums = float[Fragments::row_tiles][tiles_at_once][4];
#if __CUDA_ARCH__ >= 900
  static constexpr bool memory_adds = true;
#else
  static constexpr bool memory_adds = false;
#endif

  float* target;
  bool is_first;

  // `first` is the index of the first fragment of a row tile.
  __device__ DqAccumulator(float* sums, int order_index, int first)
      : target(sums + Fragments::fragment_offset(threadIdx.x / 32, 0, first, threadIdx.x % 32)),
        is_first(order_index == 0) {}

  __device__ void begin(Sums& sums) const {
    clear(sums);
    if constexpr (!memory_adds) {
      if (!is_first) {
        for_each(
            [&](int i, int j, float* fragment) { ptx::ld_global_cg_v4(sums[i][j], fragment); });
      }
    }
  }

  __device__ void end(const Sums& sums) const {
#if __CUDA_ARCH__ >= 900
    if (!is_first) {
      for_each([&](int i, int j, float* fragment) { ptx::red_add_v4(fragment, sums[i][j]); });
      return;
    }
#endif
    for_each([&](int i, int j, float* fragment) { ptx::st_global_v4(fragment, sums[i][j]); });
  }

  // Call instead of `begin()` and `end()` if `sums` started from 0 and is in units of `unit`.
  __device__ void add(Sums& sums, float unit) const {
    for_each([&](int i, int j, float* fragment) {
      float before[4] = {};
      if (!memory_adds && !is_first) ptx::ld_global_cg_v4(before, fragment);
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][j][c] = fma(sums[i][j][c], unit, before[c]);
    });
    end(sums);
  }

 private:
  template <class Function>
  __device__ void for_each(Function function) const {
#pragma unroll
    for (int i = 0; i < Fragments::row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < tiles_at_once; ++j) {
        function(i, j, target + Fragments::fragment_offset(0, i, j, 0));
      }
    }
  }
};

#endif  // __CUDA_ARCH__ >= 800

// Workspace after the row statistics: a semaphore for each dq tile, cleared by the preprocess
// kernel (preprocess/preprocess.cuh), and the dq sums. Packed sequences leave some tile slots
// unused (packed_tiles.cuh). `QuerySums` in backward_common.py computes the same sizes.
template <class Config>
struct DqSums {
  static constexpr int Br = Config::dq_Br;
  static constexpr int64 unit = 512;
  int tiles;  // tile slots of a head: of all sequences if packed, otherwise of one
  int count;  // tile slots of all heads and batches
  int* semaphores;

  // Callers construct this struct at each use, so that its members take no registers in between.
  __device__ explicit DqSums(const GradientParams& p)
      : tiles(Config::packed ? count_tile_slots<Br>(p.total_q, p.batch)
                           : ceil_div(ptx::opaque(p.seqlen_q), Br)) {
    const int64 rows =
        int64(p.heads_q) * (Config::packed ? int64(p.total_q)
                                           : int64(p.batch) * ptx::opaque(p.seqlen_q));
    count = (Config::packed ? 1 : p.batch) * p.heads_q * tiles;
    semaphores = reinterpret_cast<int*>(static_cast<char*>(p.workspace) +
                                        aligned(rows * int64(sizeof(*row_stats<Config>(p)))));
  }

  // Returns the tile slot of a query tile: its index in all arrays with an entry per tile.
  __device__ int tile_slot(const GradientParams& p, const Sequence& sequence, int batch, int head,
                           int tile) const {
    if constexpr (!Config::packed) return (batch * p.heads_q + head) * tiles + tile;
    return head * tiles + first_tile_slot<Br>(sequence.q_first, batch) + tile;
  }
  __device__ int* semaphore(const GradientParams& p, const Sequence& sequence, int batch, int head,
                            int tile) const {
    return semaphores + tile_slot(p, sequence, batch, head, tile);
  }

  // Returns the sums of a query tile. Each tile has `floats` floats.
  template <int64 floats>
  __device__ float* sums(const GradientParams& p, const Sequence& sequence, int batch, int head,
                         int tile) const {
    return first_tile() + int64(tile_slot(p, sequence, batch, head, tile)) * floats;
  }
  __device__ float* first_tile() const {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(semaphores) +
                                    aligned(count * int64(sizeof(int))));
  }

 private:
  __device__ static int64 aligned(int64 bytes) { return (bytes + unit - 1) / unit * unit; }
};

// Converts the sums of one query tile to dq.
template <class Config, class Fragments>
struct DqTile {
  using Gradient = typename Config::Gradient;
  static constexpr int Br = Config::dq_Br;
  static constexpr int column_tiles = Fragments::column_tiles;
  static constexpr bool is_staged = sizeof(Gradient) == 2;
  // 16-bit gradients are staged in shared memory, so that whole 16-byte chunks are stored.
  static constexpr int chunks = is_staged ? column_tiles : 1;
  struct Shared {
    Vector<Gradient, 8> warp_rows[Fragments::warps][16][chunks + 1];
  };

  __device__ static void write(const GradientParams& p, Shared& shared) {
    const GradientTileCoord coord = gradient_tile_coord<Config, Br, false, false>(p, blockIdx.x);
    const Sequence sequence = sequence_of<Config>(p, coord.batch);
    if (coord.begin >= sequence.seqlen_q) return;
    const DqSums<Config> all(p);
    const int tile = coord.begin / Br;
    // If the semaphore is 0, no CTA has added to the tile, because its rows attend to no key. The
    // sums are then uninitialized.
    const bool is_written = *all.semaphore(p, sequence, coord.batch, coord.head, tile) != 0;
    const float* sums =
        all.template sums<Fragments::floats>(p, sequence, coord.batch, coord.head, tile);
    const auto* stats =
        row_stats<Config>(p) + lse_index<Config>(p, sequence, coord.head, coord.begin);
    const int left = sequence.seqlen_q - coord.begin;
    const float scale = signed_scale<Config, float>(p);
    const Mask<Config> mask = mask_of<Config>(p, sequence, coord.batch);
    Gradient* output = p.dq.head<Gradient>(sequence.q_batch, coord.head) +
                       (sequence.q_first + int64(coord.begin)) * p.dq.row_stride;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < Fragments::row_tiles; ++i) {
      float values[column_tiles][4] = {};
      if (is_written) {
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
          ptx::ld_global_cg_v4(values[j], sums + Fragments::fragment_offset(warp, i, j, lane));
        }
      }
      const int first = Fragments::row(warp, i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + 8 * half + lane / 4;
        // The sums of a row without visible keys may be NaN: 0 times the NaN key of another row.
        const bool is_visible =
            row < left && stats[row].lse_log2 != SoftmaxMath<float>::infinity() &&
            mask.visible_begin(coord.begin + row) < mask.visible_end(coord.begin + row);
        scale_row<column_tiles>(values[0] + 2 * half, scale);
        if (!is_visible) fill_row_from<column_tiles>(values[0] + 2 * half, 0, 0);
        if constexpr (is_staged) {
#pragma unroll
          for (int j = 0; j < column_tiles; ++j) {
            Gradient* target = shared.warp_rows[warp][8 * half + lane / 4][j].data;
            *reinterpret_cast<unsigned*>(target + lane % 4 * 2) =
                pack<Gradient>(values[j][2 * half], values[j][2 * half + 1]);
          }
        } else if (row < left) {
          write_row<column_tiles, Config::head_dim>(
              output + row * p.dq.row_stride, values[0] + 2 * half,
              [&](int j, int c) { return Fragments::column(warp, j) + lane % 4 * 2 + c; });
        }
      }
      if constexpr (is_staged) {
        __syncwarp();
#pragma unroll
        for (int chunk = 0; chunk < 16 * chunks; chunk += 32) {
          const int row = (chunk + lane) / chunks, j = (chunk + lane) % chunks;
          if (first + row >= left) continue;
          const int column = Fragments::column(warp, j);
          store_chunk<Gradient, Config::out_alignment>(
              output + (first + row) * p.dq.row_stride + column, shared.warp_rows[warp][row][j],
              Config::head_dim - column);
        }
        __syncwarp();
      }
    }
  }
};
