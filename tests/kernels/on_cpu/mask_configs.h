// Masks that are compiled for all combinations of causal, windows and prefix, and chosen by numbers
// that are read from standard input. The last three numbers of a line are left and right bound of
// the window (-1 for no bound) and prefix.
#pragma once

#include "read_numbers.h"
#include "score/mask.cuh"

template <bool Causal, bool Left, bool Right, bool Prefix>
struct Config {
  static constexpr bool causal = Causal, window_left = Left, window_right = Right, prefix = Prefix;
  static constexpr bool offsets = false;
};

template <class Config>
Band<Config> band(const std::vector<int>& n) {
  if constexpr (Config::window_left || Config::window_right || Config::prefix) {
    return {n[n.size() - 3], n[n.size() - 2], n[n.size() - 1]};
  } else {
    return {};
  }
}

// Calls Print<Config>::of(n), after it has converted the values that were read to the constants of
// a Config, one after the other.
template <template <class> class Print, bool... Known>
void print_with(bool causal, const std::vector<int>& n) {
  if constexpr (sizeof...(Known) == 4) {
    using Made = Config<Known...>;
    // A call with a prefix has no left bound.
    if constexpr (!(Made::window_left && Made::prefix)) Print<Made>::of(n);
  } else {
    const int* const bounds = n.data() + n.size() - 3;
    const bool all[] = {causal, bounds[0] >= 0, bounds[1] >= 0, bounds[2] > 0};
    if (all[sizeof...(Known)]) {
      print_with<Print, Known..., true>(causal, n);
    } else {
      print_with<Print, Known..., false>(causal, n);
    }
  }
}

// Prints the results for each line of standard input: causal and `count` more numbers.
template <template <class> class Print>
void print_each(int count) {
  int causal;
  while (std::scanf("%d", &causal) == 1) print_with<Print>(causal, read(count));
}
