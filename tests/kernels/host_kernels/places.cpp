// Prints what `places.cuh` says of places. Of each batch, standard input has one line of numbers:
// batch, total, and the batch + 1 starts. The answer is a line with three numbers for each place:
// the sequence, and the first of its places and the one behind the last.
#include <cstdio>

#include "cuda_on_host.h"
#include "read_numbers.h"
#include "backward/places.cuh"

constexpr int Rows = 24;

int main() {
  int batch;
  while (std::scanf("%d", &batch) == 1) {
    const int total = read(1)[0];
    const std::vector<int> starts = read(batch + 1);
    for (int place = 0; place < total / Rows + batch; ++place) {
      const PackedPlaces found = find_places<Rows>(starts.data(), batch, total, place);
      std::printf("%d %d %d ", found.sequence, found.begin, found.end);
    }
    std::printf("\n");
  }
}
