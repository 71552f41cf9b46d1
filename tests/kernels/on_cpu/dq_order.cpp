// Prints the results of `order.cuh`. Standard input has one line of numbers for each mask: causal,
// seqlen_q, seqlen_k, q_offset, left and right bound of a window (-1 for no bound) and prefix. The
// output is one line for each mask, with six numbers for each pair of a KV tile and a query tile:
// the KV tile, the query tile, the index in the dq order, 1 if it is the last index, and the last
// two numbers again for the descending order.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "mask_configs.h"
#include "backward/dq/order.cuh"

constexpr int Br = 16;
constexpr int Bc = 24;

template <class Config>
struct Print {
  static void of(const std::vector<int>& n) {
    const Mask<Config> mask(n[1], n[2], band<Config>(n));
    for (int begin = 0; begin < mask.seqlen_k; begin += Bc) {
      const DqOrder<Br, Bc, Config> order(mask, begin, n[0]);
      for (int tile = order.first_tile; tile < order.end_tile; ++tile) {
        std::printf("%d %d ", begin / Bc, tile);
        for (const bool descends : {false, true}) {
          std::printf("%d %d ", order.order_index(tile, descends),
                      order.is_last_cta(tile, descends));
        }
      }
    }
    std::printf("\n");
  }
};

int main() { print_each<Print>(6); }
