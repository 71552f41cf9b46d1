// Prints what the CTAs of a gradient kernel process. Standard input has one line of numbers for
// each call: causal, 1 for `hopper` or 0 for `mma`, batch, heads_q, heads_kv, seqlen_q, seqlen_k,
// q_offset, section_heads, head_chunks, tile_chunks, last_section, number of CTAs, left and
// right bound of a window (-1 for no bound) and prefix. The output is one line for each call, with
// nine numbers for each CTA: batch index, KV head, KV tile, index of the chunk, the range [begin,
// end) of its query heads, that of its query tiles, and 1 if query tiles are processed in
// descending order.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "cuda_on_cpu.h"
#include "mask_configs.h"
#include "not_called.h"

#include "backward/dq/order.cuh"
#include "backward/query_chunks.cuh"
#include "backward/tile_coord.cuh"

constexpr int Br = 64;
constexpr int Bc_of_all = 128;

template <class MaskConfig>
struct OrderConfig : MaskConfig {
  static constexpr int Bc = Bc_of_all;
  static constexpr bool has_seqlens = false;
  static constexpr bool packed = false;
  static constexpr bool orders_sequences = false;
  static constexpr bool splits_queries = true;
  static constexpr bool may_descend = MaskConfig::causal && !MaskConfig::window_left;
};

template <class MaskConfig>
struct Print {
  using Config = OrderConfig<MaskConfig>;

  static void of(const std::vector<int>& n) {
    const bool is_hopper = n[0];
    GradientParams p = {};
    p.batch = n[1];
    p.heads_q = n[2];
    p.heads_kv = n[3];
    p.seqlen_q = n[4];
    p.seqlen_k = n[5];
    p.section_heads = n[7];
    p.head_chunks = n[8];
    p.tile_chunks = n[9];
    p.last_section = n[10];
    const Mask<Config> mask(n[5], n[6], band<Config>(n));
    for (int block = 0; block < n[11]; ++block) {
      blockIdx.x = block;
      const GradientTileCoord coord =
          is_hopper ? gradient_tile_coord<Config, Config::Bc, true, true>(p, block)
                    : gradient_tile_coord<Config, Config::Bc, true, false>(p, block);
      const DqOrder<Br, Config::Bc, Config> order(mask, coord.begin, p.seqlen_q);
      const bool descends = !is_hopper || (Config::may_descend && in_last_section(p));
      const ChunkTiles tiles =
          tiles_of_chunk<Config>(coord, order.first_tile, order.end_tile, descends);
      const int first_head = first_head_of_chunk<Config>(p, coord);
      std::printf("%d %d %d %d %d %d %d %d %d ", coord.batch, coord.head, coord.begin / Config::Bc,
                  coord.tile_chunk * p.head_chunks + coord.head_chunk, first_head,
                  first_head + heads_of_chunk<Config>(p), tiles.begin, tiles.end,
                  descends);
    }
    std::printf("\n");
  }
};

int main() { print_each<Print>(15); }
