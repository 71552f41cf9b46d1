// Prints the tiles of dk and dv that CTAs compute for packed sequences in the order of their
// lengths. Standard input has one line of numbers for each batch: batch, total, heads_kv,
// section_heads, head_chunks, the largest length, and the batch + 1 starts. The output has one line
// for each batch, with four numbers for each CTA: sequence, KV head, KV tile and chunk.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "cuda_on_cpu.h"
#include "mask_configs.h"
#include "not_called.h"

#include "backward/tile_coord.cuh"

constexpr int Rows = 24;

struct OrderConfig {
  static constexpr bool packed = true;
  static constexpr bool orders_sequences = true;
  static constexpr bool splits_queries = true;
  static constexpr bool may_descend = false;
};

int main() {
  int batch;
  while (std::scanf("%d", &batch) == 1) {
    const std::vector<int> n = read(5), starts = read(batch + 1);
    GradientParams p = {};
    p.batch = batch;
    p.total_k = n[0];
    p.heads_q = p.heads_kv = n[1];
    p.section_heads = n[2];
    p.head_chunks = n[3];
    p.tile_chunks = 1;
    p.seqlen_k = n[4];
    p.cu_seqlens_k = starts.data();
    const int slots = count_tile_slots<Rows>(p.total_k, batch);
    std::vector<PackedTileSlot> list(slots);
    for (int i = 0; i < batch; ++i) {
      const PackedRange own = tile_slots_of_sequence<Rows>(starts.data(), batch, p.total_k, i);
      const int count = own.end - own.begin;
      int begin = 0;
      for (int j = 0; j < batch; ++j) {
        begin += earlier_tile_slots<Rows>(starts.data(), batch, p.total_k, i, count, j);
      }
      for (int t = 0; t < count; ++t) list[begin + t] = {{}, i, begin, begin + count};
    }
    p.packed_tiles = list.data();
    for (int block = 0; block < slots * blocks_of_kv_tile<OrderConfig>(p); ++block) {
      const GradientTileCoord coord =
          gradient_tile_coord<OrderConfig, Rows, true, true>(p, block);
      std::printf("%d %d %d %d ", coord.batch, coord.head, coord.begin / Rows, coord.head_chunk);
    }
    std::printf("\n");
  }
}
