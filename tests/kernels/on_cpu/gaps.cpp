// Prints the rows that `scheduler/gaps.cuh` assigns to each warp. Standard input has one line of
// numbers for each batch: batch, total_q, max_seqlen_q, warps, and the batch + 1 elements of
// cu_seqlens_q. The output has two lines for each batch: the rows by `for_each_row`, then those by
// `for_each_adjacent_row` for all sequences.
#include "cuda_on_cpu.h"

#include "scheduler/gaps.cuh"

#include <cstdio>

#include "read_numbers.h"

int main() {
  int batch;
  const auto print = [](int row) {
    if (threadIdx.x == 0) std::printf("%d ", row);
  };
  while (std::scanf("%d", &batch) == 1) {
    const std::vector<int> sizes = read(3);
    const std::vector<int> starts = read(batch + 1);
    Params p = {};
    p.batch = batch;
    p.total_q = sizes[0];
    p.seqlen_q = sizes[1];
    p.cu_seqlens_q = starts.data();
    const unsigned warps = sizes[2];
    run_block(32, [&] {
      for (unsigned warp = 0; warp < warps; ++warp) Gaps{p}.for_each_row(warp, warps, print);
    });
    std::printf("\n");
    run_block(32, [&] {
      for (int i = 0; i < batch; ++i) {
        for (unsigned warp = 0; warp < warps; ++warp) {
          Gaps{p}.for_each_adjacent_row(i, warp, warps, print);
        }
      }
    });
    std::printf("\n");
  }
}
