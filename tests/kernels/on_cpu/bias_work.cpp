// Prints the results of `bias_work.cuh`. Each line of standard input has these numbers: causal,
// seqlen_q, seqlen_k, q_offset, number of sequences, number of heads, whether the bias is broadcast
// along sequences, heads, rows and keys, number of parts, number of CTAs, left and right bound of a
// window (-1 for no bound), and prefix. The output has one line for each input line, with ten
// numbers for each partial sum, followed by ten numbers for each of its score tiles: the CTA, the
// four indices of the gradient tile, the part, and four numbers that are -1 for the partial sum and
// otherwise the sequence, head, first row and first key of the score tile.
#include <cstdio>

#include "cuda_on_cpu.h"
#include "mask_configs.h"
#include "backward/inputs/bias_work.cuh"

constexpr int Rows = 32;
constexpr int Keys = 16;

template <class Config>
struct Print {
  static void of(const std::vector<int>& n) {
    const Mask<Config> mask(n[1], n[2], band<Config>(n));
    const int counts[] = {n[3], n[4], ceil_div(n[0], Rows), ceil_div(n[1], Keys)};
    int outputs[4], summed[4];
    for (int axis = 0; axis < 4; ++axis) {
      outputs[axis] = n[5 + axis] ? 1 : counts[axis];
      summed[axis] = n[5 + axis] ? counts[axis] : 1;
    }
    const BiasWorkSizes sizes =
        BiasWorkSizes::of({outputs[0], outputs[1], outputs[2], outputs[3]},
                          {summed[0], summed[1], summed[2], summed[3]}, n[9]);
    for (int cta = 0; cta < n[10]; ++cta) {
      BiasWork<Config, Rows, Keys> work(sizes, mask, n[0], cta);
      for (; work.has_item(); work.next_item(n[10])) {
        const ScoreTiles& tile = work.output;
        const auto print = [&](int batch, int head, int row, int key) {
          std::printf("%d %d %d %d %d %d %d %d %d %d ", cta, tile.batch, tile.heads, tile.rows,
                      tile.keys, work.part(), batch, head, row, key);
        };
        print(-1, -1, -1, -1);
        for (; work.has_tile(); work.next_tile()) {
          print(work.batch(), work.head(), work.first_row(), work.first_key());
        }
      }
    }
    std::printf("\n");
  }
};

int main() { print_each<Print>(14); }
