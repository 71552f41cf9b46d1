// Prints the results of `packed_tiles.cuh` for packed sequences. Standard input has one line of
// numbers for each batch: batch, total, and the batch + 1 starts. The output has three lines for
// each batch, with three numbers for every tile slot, row and sequence: the index of the sequence,
// and begin and end of its tile slots or rows.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "read_numbers.h"
#include "backward/packed_tiles.cuh"

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
  }
}
