// Prints what `turn_order.cuh` says of masks. Of each, standard input has one line of numbers:
// causal, seqlen_q, seqlen_k, q_offset, left and right of a window (-1 where it has no bound) and
// prefix. The answer is a line with four numbers for each visit of queries by a tile of keys:
// the tile of keys, that of queries, the turn, and whether it is the last.
#include <cstdio>

#include "cuda_on_host.h"
#include "read_numbers.h"
#include "backward/hopper/turn_order.cuh"

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
    const TurnOrder<Br, Bc, Config> order(mask, begin, n[0]);
    for (int tile = order.first_tile; tile < order.end_tile; ++tile) {
      std::printf("%d %d %d %d ", begin / Bc, tile, order.turn_of(tile), order.is_last_turn(tile));
    }
  }
  std::printf("\n");
}

// The constants of the config, one after the other, as what has been read says.
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
