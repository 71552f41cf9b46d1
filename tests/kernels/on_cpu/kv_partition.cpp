// Prints the partial tiles that `kv_partition.cuh` assigns to each CTA. Standard input has one line
// of numbers for each launch: the index of the config in kv_partition_configs.h, the grid's x, y
// and z, batch, seqlen_q, seqlen_k, heads_kv, num_splits, caches, total_q, keys, new_keys, 1 for
// each of cu_seqlens_q, seqused_k and cache_batch_idx that exists, and then the elements of these
// arrays.
//
// The output has a line for each partial tile: the CTA's x, y and z; batch, head_kv, row_tile,
// seqlen_q, seqlen_k, begin, end, index, count, first_cta_rank, result, results, slot and
// is_sliced; and for each merge group of the result first, step, count, the counter's slot and
// is_root. The last CTA's `total_keys` and an empty line follow.

#include "cuda_on_cpu.h"
// The code under test; its headers need cuda_on_cpu.h.
#include "scheduler/kv_partition.cuh"

#include <cstdio>

#include "read_numbers.h"
#include "kv_partition_configs.h"

// Prints the partial tiles of each CTA. As in the kernel, a warp computes the work range of a CTA,
// and only its first lane, which holds it, computes the partial tiles.
template <class Config>
struct PrintPartialTiles {
  static void print(const Params& p) {
    run_block(32, [&] {
      for (unsigned z = 0; z < gridDim.z; ++z) {
        for (unsigned y = 0; y < gridDim.y; ++y) {
          for (unsigned x = 0; x < gridDim.x; ++x) {
            blockIdx = {x, y, z};
            print_cta(p);
          }
        }
      }
    });
    std::printf("\n");
  }

  static void print_cta(const Params& p) {
    WorkRange work_range;
    const bool is_counted = p.seqused_k != nullptr && threadIdx.x < unsigned(p.batch);
    KvPartitioner<Config> partitioner(p, work_range, is_counted ? p.seqused_k[threadIdx.x] : 0);
    partitioner.init_work_range();
    if (threadIdx.x != 0) return;
    PartialTile partial_tile;
    for (; partitioner.get_tile(partial_tile); partitioner.advance(partial_tile)) {
      partitioner.set_merge_info(partial_tile);
      std::printf("%u %u %u %d %d %d %d %d %d %d %d %d %d %d %d %d %d", blockIdx.x, blockIdx.y,
                  blockIdx.z, partial_tile.batch, partial_tile.head_kv, partial_tile.row_tile,
                  partial_tile.sequence.seqlen_q, partial_tile.sequence.seqlen_k,
                  partial_tile.begin, partial_tile.end, partial_tile.index, partial_tile.count,
                  partial_tile.first_cta_rank, partial_tile.result, partial_tile.results,
                  partial_tile.slot_of(partial_tile.result), partial_tile.is_sliced);
      for (MergeGroup m(partial_tile.result); m.step < partial_tile.results; m.next_level()) {
        std::printf(" %d %d %d %d %d", m.first, m.step, m.count(partial_tile.results),
                    partial_tile.slot_of(m.counter()), int(m.is_root(partial_tile.results)));
      }
      std::printf("\n");
    }
    const bool is_last =
        blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z;
    if (is_last) std::printf("%lld\n", partitioner.total_keys());
  }
};

int main() {
  int config;
  while (std::scanf("%d", &config) == 1) {
    const std::vector<int> n = read(15);
    gridDim = {unsigned(n[0]), unsigned(n[1]), unsigned(n[2])};
    Params p = {};
    p.batch = n[3];
    p.seqlen_q = n[4];
    p.seqlen_k = n[5];
    p.heads_kv = n[6];
    p.num_splits = n[7];
    p.caches = n[8];
    p.total_q = n[9];
    p.keys = n[10];
    p.new_keys = n[11];
    const std::vector<int> ends = read(n[12] ? p.batch + 1 : 0), used = read(n[13] ? p.batch : 0),
                           caches = read(n[14] ? p.batch : 0);
    p.cu_seqlens_q = n[12] ? ends.data() : nullptr;
    p.seqused_k = n[13] ? used.data() : nullptr;
    p.cache_batch_idx = n[14] ? caches.data() : nullptr;
    if (!with_config<PrintPartialTiles>(config, p)) return 1;
  }
}
