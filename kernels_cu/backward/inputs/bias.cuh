// Gradient of a bias: dS summed along the axes along which the bias is broadcast.
//
// A CTA owns a tile of the gradient and iterates, in a fixed order, over the score tiles that this
// tile of the bias is added to. If the gradient has few tiles, like that of a padding mask, several
// CTAs compute one tile: each writes a partial sum to the workspace, and another kernel adds these.
#pragma once

#include "backward/inputs/bias_tiles.cuh"
#include "backward/inputs/compensated_sum.cuh"
#include "backward/inputs/score_gradients.cuh"
#include "backward/params.cuh"
#include "scheduler/tile_coord.cuh"
#include "score/capture.cuh"

template <class Config>
struct BiasGradients : BiasAxes<Config> {
  using Scores = ScoreGradients<Config>;
  using T = typename Scores::T;
  static constexpr int size = Scores::size, stride = Scores::stride;

  using Axes = BiasAxes<Config>;
  using Axes::keeps_keys, Axes::keeps_rows, Axes::p;

  const BiasGradient& gradient;
  unsigned char* const memory;  // shared memory: operands, and at the end the output tile
  CompensatedSum<T> sums[Scores::rows_per_thread][Scores::keys_per_thread];

  __device__ BiasGradients(const GradientParams& p, unsigned char* memory)
      : Axes(p), gradient(p.dbias), memory(memory) {}

  template <class Gradient>
  __device__ void run() {
    const ScoreTiles output_tiles = Axes::output_tiles(size, size);
    const ScoreTiles summed_tiles = Axes::summed_tiles(size, size);
    const int part = blockIdx.x % gradient.parts;
    const ScoreTiles output_tile = output_tiles[blockIdx.x / gradient.parts];
    const int64 tiles_per_part = (summed_tiles.count() + gradient.parts - 1) / gradient.parts;
    const int64 end = min((part + 1) * tiles_per_part, summed_tiles.count());
    for (int64 number = part * tiles_per_part; number < end; ++number) {
      const ScoreTiles summed_tile = summed_tiles[number];
      add_tile(output_tile.batch + summed_tile.batch, output_tile.heads + summed_tile.heads,
               (output_tile.rows + summed_tile.rows) * size,
               (output_tile.keys + summed_tile.keys) * size);
    }
    if (gradient.parts > 1) {
      const int64 elements = int64(gradient.batch) * gradient.heads * gradient.rows * gradient.keys;
      write(static_cast<T*>(p.bias_parts) + part * elements, output_tile);
    } else {
      write(static_cast<Gradient*>(gradient.data), output_tile);
    }
  }

 private:
  __device__ T* tile() const { return reinterpret_cast<T*>(memory); }

  __device__ void add_tile(int batch, int head, int row, int key) {
    const Sequence sequence = sequence_of<Config>(p, batch);
    if (row >= sequence.seqlen_q) return;
    const Mask<Config> mask = mask_of<Config>(p, sequence, batch);
    const KvTileRange kv_tiles =
        kv_tile_range<size, false>(mask, row, min(row + size, sequence.seqlen_q), 0, 1);
    if (key < kv_tiles.begin * size || key >= kv_tiles.end * size) return;
    Scores scores;
    scores.compute(p, memory, sequence, mask, batch, head, row, key);
#pragma unroll
    for (int i = 0; i < Scores::rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < Scores::keys_per_thread; ++j) sums[i][j].add(scores.gradients[i][j]);
    }
  }

  template <class Result>
  __device__ void write(Result* result, const ScoreTiles& output_tile) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Scores::rows_per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < Scores::keys_per_thread; ++j) {
        tile()[Scores::row(i) * stride + Scores::first_key() + Scores::step(j)] =
            sums[i][j].total();
      }
    }
    __syncthreads();
    if (!keeps_rows) sum_lines(size, 1, stride);
    if (!keeps_keys) sum_lines(keeps_rows ? size : 1, stride, 1);
    const Sequence sequence = sequence_of<Config>(p, output_tile.batch);
    const int rows = keeps_rows ? min(size, sequence.seqlen_q - output_tile.rows * size) : 1;
    const int keys = keeps_keys ? min(size, gradient.keys - output_tile.keys * size) : 1;
    const int64 first_row =
        int64(output_tile.rows) * size + (Config::packed && keeps_rows ? sequence.q_first : 0);
    const int64 head =
        (Config::packed ? 0 : int64(output_tile.batch) * gradient.heads) + output_tile.heads;
    for (int i = threadIdx.x; i < size * size; i += Scores::threads) {
      const int row = i / size, key = i % size;
      if (row >= rows || key >= keys) continue;
      result[(head * gradient.rows + first_row + row) * gradient.keys + output_tile.keys * size +
             key] = narrow<Result>(tile()[row * stride + key]);
    }
  }

  // Sums each of `count` lines (rows or columns) of the tile into the line's first element.
  __device__ void sum_lines(int count, int line_stride, int element_stride) {
    if (int(threadIdx.x) < count) {
      T* line = tile() + threadIdx.x * line_stride;
      CompensatedSum<T> sum;
      for (int i = 0; i < size; ++i) sum.add(line[i * element_stride]);
      *line = sum.total();
    }
    __syncthreads();
  }
};

template <class Config, class Input, class Offset, int Rank, bool ContiguousLast>
__device__ void compute_bias_gradient(const GradientParams& p,
                                      const Capture<Input, Offset, Rank, ContiguousLast>&) {
  using Kernel = BiasGradients<Config>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Kernel(p, shared_memory).template run<typename GradientType<Config, Input>::type>();
}

template <class Config>
__device__ void bias_gradients(const GradientParams& p) {
  compute_bias_gradient<Config>(p, p.mods.bias);
}

template <class Config, class Input, class Offset, int Rank, bool ContiguousLast>
__device__ void add_bias_parts(const GradientParams& p,
                               const Capture<Input, Offset, Rank, ContiguousLast>&) {
  using T = Accumulator<typename Config::Element>;
  using Gradient = typename GradientType<Config, Input>::type;
  const BiasGradient& gradient = p.dbias;
  const int64 elements = int64(gradient.batch) * gradient.heads * gradient.rows * gradient.keys;
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  CompensatedSum<T> sum;
  for (int part = 0; part < gradient.parts; ++part) {
    sum.add(static_cast<const T*>(p.bias_parts)[part * elements + i]);
  }
  static_cast<Gradient*>(gradient.data)[i] = narrow<Gradient>(sum.total());
}

template <class Config>
__device__ void bias_sums(const GradientParams& p) {
  add_bias_parts<Config>(p, p.mods.bias);
}
