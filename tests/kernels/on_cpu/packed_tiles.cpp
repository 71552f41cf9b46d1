// Prints the results of `packed_tiles.cuh` for packed sequences. Standard input has one line of
// numbers for each batch: batch, total, and the batch + 1 starts. The output has four lines for
// each batch, with three numbers for every tile slot, row, sequence and sequence: the index of the
// sequence, and begin and end of its tile slots or rows. The last line has the tile slots of the
// sequences in the order of their lengths.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "read_numbers.h"
#include "scheduler/packed_tiles.cuh"

constexpr int Rows = 24;

void print(const PackedRange& partial_tile) {
  std::printf("%d %d %d ", partial_tile.sequence, partial_tile.begin, partial_tile.end);
}

int main() {
  int batch;
  while (std::scanf("%d", &batch) == 1) {
    const int total = read(1)[0];
    const std::vector<int> starts = read(batch + 1);
    const int* const from = starts.data();
    for (int slot = 0; slot < count_tile_slots<Rows>(total, batch); ++slot) {
      print(find_tile_slots<Rows>(from, batch, total, slot));
    }
    std::printf("\n");
    for (int row = 0; row < total; ++row) print(find_sequence_rows(from, batch, total, row));
    std::printf("\n");
    for (int i = 0; i < batch; ++i) print(rows_of_sequence(from, batch, total, i));
    std::printf("\n");
    for (int i = 0; i < batch; ++i) {
      const PackedRange slots = tile_slots_of_sequence<Rows>(from, batch, total, i);
      const int count = slots.end - slots.begin;
      int begin = 0;
      for (int j = 0; j < batch; ++j) {
        begin += earlier_tile_slots<Rows>(from, batch, total, i, count, j);
      }
      print({i, begin, begin + count});
    }
    std::printf("\n");
  }
}
