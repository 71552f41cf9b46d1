// Columns of a query tile that a CTA merges, in chunks of four. If all CTAs of its clusters have
// partial tiles of it, the query tile is spread: each CTA merges one slice of the columns, the same
// in every cluster. Otherwise, one CTA of the cluster merges all columns.
//
// If several clusters have partial tiles, the CTAs that merge the same slice exchange their results
// in global memory, independently of other slices.
#pragma once

#include "forward/decode/block.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MergedColumns {
  using Block = DecodeBlock<Config>;
  static constexpr int all_chunks = Block::output_chunks;
  static constexpr int piece_chunks = Block::piece_chunks;

  bool is_piece = false;
  int piece = 0;

  // Returns the columns that the CTA with partial tile `number` of the query tile merges.
  __device__ static MergedColumns of_block(const PartialTile& partial_tile, int number) {
    return partial_tile.is_sliced ? MergedColumns{true, number} : MergedColumns{};
  }
  // Returns the columns of the CTA that merges `chunk`.
  __device__ static MergedColumns of_chunk(const PartialTile& partial_tile, int chunk) {
    return of_block(partial_tile, chunk / piece_chunks);
  }

  __device__ int first_chunk() const { return is_piece ? piece * piece_chunks : 0; }
  // Number of chunks per row, where the last slice counts as full. chunks_there() is exact.
  __device__ int chunks() const { return is_piece ? piece_chunks : all_chunks; }
  __device__ int chunks_there() const {
    return is_piece ? max(0, min(piece_chunks, all_chunks - first_chunk())) : all_chunks;
  }

  // A thread merges one chunk of every rows_at_once()-th row. If a row has more chunks than the CTA
  // has threads, a thread merges several chunks of the row.
  static constexpr int threads = 32 * Config::warps;
  __device__ int rows_at_once() const {
    return max(1, is_piece ? threads / piece_chunks : threads / all_chunks);
  }
  __device__ int first_row() const {
    return is_piece ? threadIdx.x / piece_chunks : threadIdx.x / all_chunks;
  }

  // state() is the offset of base and sum in a record, which follow the columns. In global memory,
  // the records of a slice follow those of the slices before it.
  __device__ int state() const { return is_piece ? 4 * piece_chunks : Block::record_columns; }
  __device__ int record() const { return is_piece ? Block::piece_record : Block::record; }
  __device__ int first_record() const { return piece * Config::Br * Block::piece_record; }
};

#endif  // __CUDA_ARCH__ >= 800
