// Prints the results of `order.cuh`. Standard input has one line of numbers for each mask:
// causal, seqlen_q, seqlen_k, q_offset, left and right bound of a window (-1 for no bound) and
// prefix. The output is one line for each mask, with four numbers for each pair of a KV tile and a
// query tile: the KV tile, the query tile, the index in the dq order, and 1 if it is the last.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "read_numbers.h"
#include "backward/dq/order.cuh"

constexpr int Br = 16;
constexpr int Bc = 24;

template <bool Causal, bool Left, bool Right, bool Prefix>
struct Config {
  static constexpr bool causal = Causal, window_left = Left, window_right = Right, prefix = Prefix;
  static constexpr bool offsets = false;
};

template <class Config>
Band<Config> band(const std::vector<int>& n) {
  if constexpr (Config::window_left || Config::window_right || Config::prefix) {
    return {n[3], n[4], n[5]};
  } else {
    return {};
  }
}

template <class Config>
void print_of(const std::vector<int>& n) {
  const Mask<Config> mask(n[1], n[2], band<Config>(n));
  for (int begin = 0; begin < mask.seqlen_k; begin += Bc) {
    const DqOrder<Br, Bc, Config> order(mask, begin, n[0]);
    for (int tile = order.first_tile; tile < order.end_tile; ++tile) {
      std::printf("%d %d %d %d ", begin / Bc, tile, order.order_index(tile),
                  order.is_last_cta(tile));
    }
  }
  std::printf("\n");
}

// Converts the values that were read to the constants of a Config, one after the other.
template <bool... Known>
void print_with(bool causal, const std::vector<int>& n) {
  if constexpr (sizeof...(Known) == 4) {
    using Made = Config<Known...>;
    // A call with a prefix has no left bound.
    if constexpr (!(Made::window_left && Made::prefix)) print_of<Made>(n);
  } else {
    const bool all[] = {causal, n[3] >= 0, n[4] >= 0, n[5] > 0};
    if (all[sizeof...(Known)]) {
      print_with<Known..., true>(causal, n);
    } else {
      print_with<Known..., false>(causal, n);
    }
  }
}

int main() {
  int causal;
  while (std::scanf("%d", &causal) == 1) print_with<>(causal, read(6));
}
