// Order in which CTAs compute the tiles of the gradient of a bias. It depends only on sizes and on
// the mask, so tests run this file on the host.
#pragma once

#include "scheduler/tile_coord.cuh"
#include "score/mask.cuh"

// Number of score tiles along each axis, or the indices of one tile.
struct ScoreTiles {
  int batch;
  int heads;
  int rows;
  int keys;

  __device__ int64 count() const { return int64(batch) * heads * rows * keys; }

  // Returns the indices of a tile, given its linear number.
  template <class Number>
  __device__ ScoreTiles operator[](Number number) const {
    const int key = number % keys;
    number /= keys;
    const int row = number % rows;
    number /= rows;
    return {int(number / heads), int(number % heads), row, key};
  }
};

// Numbers of gradient tiles and of score tiles of a call.
struct BiasWorkSizes {
  ScoreTiles outputs;   // tiles of the gradient
  ScoreTiles summed;    // score tiles that are summed into each gradient tile
  int parts;            // number of partial sums of each gradient tile
  int count;            // number of partial sums of all gradient tiles
  int summed_per_part;  // number of score tiles of a partial sum

  __device__ static BiasWorkSizes of(const ScoreTiles& outputs, const ScoreTiles& summed,
                                     int parts) {
    return {outputs, summed, parts, int(outputs.count()) * parts,
            ceil_div(int(summed.count()), parts)};
  }
};

// Sequence of work items of a CTA or of a cluster. An item is a tile of the gradient or, with
// several parts, a partial sum of a tile. Each item is a sum over score tiles of `Rows` x `Keys`
// pairs. Score tiles without a visible pair are skipped. The mask must be the same in all
// sequences.
template <class Config, int Rows, int Keys>
struct BiasWork {
  const BiasWorkSizes& sizes;
  const Mask<Config>& mask;
  const int seqlen_q;
  int item;           // index of the item
  ScoreTiles output;  // indices of the gradient tile
  ScoreTiles tile;    // indices of the score tile, relative to `output`
  int left;           // number of score tiles from `tile` on

  __device__ BiasWork(const BiasWorkSizes& sizes, const Mask<Config>& mask, int seqlen_q, int item)
      : sizes(sizes), mask(mask), seqlen_q(seqlen_q), item(item) {
    start();
  }

  __device__ bool has_item() const { return item < sizes.count; }
  __device__ void next_item(int step) {
    item += step;
    start();
  }
  __device__ bool has_tile() const { return left > 0; }
  __device__ void next_tile() {
    advance();
    skip_hidden();
  }

  // Index of the partial sum among those of the gradient tile.
  __device__ int part() const { return item % sizes.parts; }

  // Return the sequence, the query head, the first row and the first key of the score tile.
  __device__ int batch() const { return output.batch + tile.batch; }
  __device__ int head() const { return output.heads + tile.heads; }
  __device__ int first_row() const { return (output.rows + tile.rows) * Rows; }
  __device__ int first_key() const { return (output.keys + tile.keys) * Keys; }

 private:
  __device__ void start() {
    if (!has_item()) return;
    output = sizes.outputs[item / sizes.parts];
    // Tiles of different keys have different numbers of visible score tiles. Without this rotation,
    // a CTA would always have the same keys if `step` is a multiple of the number of tiles.
    output.keys = (output.keys + output.rows) % sizes.outputs.keys;
    const int first = part() * sizes.summed_per_part;
    left = min(sizes.summed_per_part, int(sizes.summed.count()) - first);
    tile = sizes.summed[first];
    skip_hidden();
  }

  __device__ void advance() {
    const ScoreTiles& summed = sizes.summed;
    --left;
    if (++tile.keys < summed.keys) return;
    tile.keys = 0;
    if (++tile.rows < summed.rows) return;
    tile.rows = 0;
    if (++tile.heads < summed.heads) return;
    tile.heads = 0;
    ++tile.batch;
  }

  __device__ void skip_hidden() {
    while (left > 0 && is_hidden()) advance();
  }
  // Returns whether the score tile has no visible pair. The first and the last row suffice, because
  // both bounds of the visible keys grow from row to row.
  __device__ bool is_hidden() const {
    const int last_row = min(first_row() + Rows, seqlen_q) - 1;
    return first_key() >= mask.visible_end(last_row) ||
           first_key() + Keys <= mask.visible_begin(first_row());
  }
};
