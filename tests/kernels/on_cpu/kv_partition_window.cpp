// Prints the partial tiles that `kv_partition.cuh` assigns to CTAs if a window masks the first keys
// of each sequence, and each sequence has its own position of the first query. Standard input has
// one line of numbers for each launch: `Config::has_seqlens`, 1 if there is seqused_k, batch, keys,
// the window's left bound, the number of CTAs, and the positions. The output has a line for each
// partial tile (batch, begin and end) and an empty line after each launch.
#define CUPY_FLASH_MODIFIED
// These must come first, because the kernels' headers need them.
#include "cuda_on_cpu.h"
struct Positions {
  const int* of_sequence;
  int at(int batch) const { return of_sequence[batch]; }
};
struct ModArguments {
  Positions q_offset;
  int window_left;
};

// The code under test.
#include "scheduler/kv_partition.cuh"

#include <cstdio>

#include "read_numbers.h"

template <bool HasSeqlens>
struct Config {
  static constexpr int head_dim = 128, head_dim_v = 128, Br = 16, Bc = 16, warps = 8,
                       column_warps = 1;
  static constexpr int group = 4, page_size = 0, cluster = 4, cluster_units = 3;
  static constexpr bool causal = true, has_seqlens = HasSeqlens, balanced = true;
  static constexpr bool window_left = true, window_right = false, prefix = false;
  static constexpr bool offsets = true, seqused_q = false, padded = false;
  static constexpr bool split_keys = false, values_in_keys = false;
};

template <class Config>
void print_partial_tiles(const Params& p) {
  run_block(32, [&] {
    for (unsigned z = 0; z < gridDim.z; ++z) {
      blockIdx = {0, 0, z};
      WorkRange work_range;
      const bool is_counted = p.seqused_k != nullptr && threadIdx.x < unsigned(p.batch);
      KvPartitioner<Config> partitioner(p, work_range, is_counted ? p.seqused_k[threadIdx.x] : 0);
      partitioner.init_work_range();
      if (threadIdx.x != 0) continue;
      PartialTile partial_tile;
      for (; partitioner.get_tile(partial_tile); partitioner.advance(partial_tile)) {
        std::printf("%d %d %d\n", partial_tile.batch, partial_tile.begin, partial_tile.end);
      }
    }
  });
  std::printf("\n");
}

int main() {
  int has_seqlens;
  while (std::scanf("%d", &has_seqlens) == 1) {
    const std::vector<int> n = read(5), positions = read(n[1]), used(n[1], n[2]);
    Params p = {};
    p.batch = p.caches = n[1];
    p.seqlen_q = 1;
    p.seqlen_k = n[2];
    p.keys = has_seqlens ? n[2] : 0;
    p.seqused_k = n[0] ? used.data() : nullptr;
    p.heads_q = 4;
    p.heads_kv = p.num_splits = 1;
    p.mods = {{positions.data()}, n[3]};
    gridDim = {1, 1, unsigned(n[4])};
    has_seqlens ? print_partial_tiles<Config<true>>(p) : print_partial_tiles<Config<false>>(p);
  }
}
