// Prints the results of `mask.cuh`. Standard input has one line of numbers for each mask: causal,
// group (1 or 3), seqlen_q, seqlen_k, q_offset, num_splits, left and right bound of a window (-1
// for no bound) and prefix. The output has four lines for each mask: visible_begin and visible_end
// of each row; the `KvTileRange` of each query tile and split; the first KV tile in which the
// window masks no key, for each query tile; and the `QueryTileRange` of each KV tile.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "mask_configs.h"

constexpr int Br = 16;
constexpr int Bc = 24;

template <class Config, int Group>
void print(const Mask<Config, Group>& mask, int rows, int num_splits) {
  for (int row = 0; row < rows; ++row) {
    std::printf("%d %d ", mask.visible_begin(row), mask.visible_end(row));
  }
  std::printf("\n");
  for (int begin = 0; begin < rows; begin += Br) {
    for (int split = 0; split < num_splits; ++split) {
      const int end = min(begin + Br, rows);
      const KvTileRange tiles = num_splits > 1
                                    ? kv_tile_range<Bc, true>(mask, begin, end, split, num_splits)
                                    : kv_tile_range<Bc, false>(mask, begin, end, split, num_splits);
      std::printf("%d %d %d ", tiles.begin, tiles.full_end, tiles.end);
    }
  }
  std::printf("\n");
  for (int begin = 0; begin < rows; begin += Br) {
    std::printf("%d ", mask.template first_full_tile<Bc>(min(begin + Br, rows) - 1));
  }
  std::printf("\n");
  for (int begin = 0; begin < mask.seqlen_k; begin += Bc) {
    const int end = min(begin + Bc, mask.seqlen_k);
    const QueryTileRange tiles = query_tile_range<Br>(mask, begin, end, rows);
    std::printf("%d %d %d %d ", tiles.begin, tiles.full_begin, tiles.full_end, tiles.end);
  }
  std::printf("\n");
}

template <class Config>
struct Print {
  static void of(const std::vector<int>& n) {
    if (n[0] == 1) {
      print(Mask<Config>(n[2], n[3], band<Config>(n)), n[1], n[4]);
    } else {
      print(Mask<Config, 3>(n[2], n[3], band<Config>(n)), 3 * n[1], n[4]);
    }
  }
};

int main() { print_each<Print>(8); }
