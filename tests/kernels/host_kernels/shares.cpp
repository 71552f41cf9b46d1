// Prints the parts of the keys that each thread block takes by `shares.cuh`. Of each launch,
// standard input has one line of numbers: the config (those of shares_configs.h are numbered from
// 0), the grid's x, y and z, batch, seqlen_q, seqlen_k, heads_kv, num_splits, caches, total_q, keys,
// new_keys, whether there are cu_seqlens_q, seqused_k and cache_batch_idx, and then their elements.
// A line for each part has: the block's x, y and z, the part's batch, head_kv, row_tile, seqlen_q,
// seqlen_k, begin, end, number, count, place, result, results, slot and whether it is spread; and
// for each meeting of the result, first, step, count, the counter's slot, and whether it is the
// last. Then `keys_of_all` as the last block has it, and an empty line.
// First, because the kernels' headers need it.
#include "cuda_on_host.h"

// Then what is tested.
#include "grid/shares.cuh"

#include <cstdio>

#include "read_numbers.h"
#include "shares_configs.h"

// A warp takes each block's share, and its first lane, which then knows it, the parts.
template <class Config>
struct PrintParts {
  static void print(const Params& p) {
    run_block(32, [&] {
      for (unsigned z = 0; z < gridDim.z; ++z) {
        for (unsigned y = 0; y < gridDim.y; ++y) {
          for (unsigned x = 0; x < gridDim.x; ++x) {
            blockIdx = {x, y, z};
            print_block(p);
          }
        }
      }
    });
    std::printf("\n");
  }

  static void print_block(const Params& p) {
    Share share;
    const bool is_counted = p.seqused_k != nullptr && threadIdx.x < unsigned(p.batch);
    Shares<Config> shares(p, share, is_counted ? p.seqused_k[threadIdx.x] : 0);
    shares.take();
    if (threadIdx.x != 0) return;
    Part part;
    for (; shares.find(part); shares.pass(part)) {
      shares.find_others(part);
      std::printf("%u %u %u %d %d %d %d %d %d %d %d %d %d %d %d %d %d", blockIdx.x, blockIdx.y,
                  blockIdx.z, part.batch, part.head_kv, part.row_tile, part.sequence.seqlen_q,
                  part.sequence.seqlen_k, part.begin, part.end, part.number, part.count,
                  part.place, part.result, part.results, part.slot_of(part.result),
                  part.is_spread);
      for (Meeting m(part.result); m.step < part.results; m.rise()) {
        std::printf(" %d %d %d %d %d", m.first, m.step, m.count(part.results),
                    part.slot_of(m.counter()), int(m.is_last(part.results)));
      }
      std::printf("\n");
    }
    const bool is_last =
        blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y && blockIdx.z + 1 == gridDim.z;
    if (is_last) std::printf("%lld\n", shares.keys_of_all());
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
    if (!with_config<PrintParts>(config, p)) return 1;
  }
}
