// Which columns of an item a block merges, in chunks of four. An item that all blocks of its
// clusters have parts of is spread: each of them merges a piece of the columns, the same in every
// cluster. Of other items one block of the cluster merges all columns.
//
// Where several clusters have parts, those blocks that merge the same piece meet in device memory,
// each piece by itself.
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

  // Of those that `number` merges, among the blocks with parts of the item.
  __device__ static MergedColumns of_block(const Part& part, int number) {
    return part.is_spread ? MergedColumns{true, number} : MergedColumns{};
  }
  // Of those with the chunk.
  __device__ static MergedColumns of_chunk(const Part& part, int chunk) {
    return of_block(part, chunk / piece_chunks);
  }

  __device__ int first_chunk() const { return is_piece ? piece * piece_chunks : 0; }
  // Of a row, if the last piece were as large as the others; and those that it has.
  __device__ int chunks() const { return is_piece ? piece_chunks : all_chunks; }
  __device__ int chunks_there() const {
    return is_piece ? max(0, min(piece_chunks, all_chunks - first_chunk())) : all_chunks;
  }

  // Each thread has a chunk of a row and the same of every rows_at_once()-th behind it, or where a
  // row has more chunks than there are threads, several.
  static constexpr int threads = 32 * Config::warps;
  __device__ int rows_at_once() const {
    return max(1, is_piece ? threads / piece_chunks : threads / all_chunks);
  }
  __device__ int first_row() const {
    return is_piece ? threadIdx.x / piece_chunks : threadIdx.x / all_chunks;
  }

  // A record has these columns and then the state, and its place in device memory is behind those
  // of the pieces before.
  __device__ int state() const { return is_piece ? 4 * piece_chunks : Block::record_columns; }
  __device__ int record() const { return is_piece ? Block::piece_record : Block::record; }
  __device__ int first_record() const { return piece * Config::Br * Block::piece_record; }
};

#endif  // __CUDA_ARCH__ >= 800
