// Prints what `mask.cuh` says of masks. Of each, standard input has one line of numbers: causal,
// group (1 or 3), seqlen_q, seqlen_k, q_offset and num_splits. The answer is a line with what each
// row sees, one with begin, full_end and end of each query tile's keys in each split, and one with
// begin, full_begin and end of each key tile's query tiles.
#include <cstdio>

#include "cuda_on_host.h"
#include "read_numbers.h"
#include "score/mask.cuh"

constexpr int Br = 16;
constexpr int Bc = 24;

template <bool Causal, int Group>
void print(const Mask<Causal, Group>& mask, int rows, int num_splits) {
  for (int row = 0; row < rows; ++row) std::printf("%d ", mask.visible_end(row));
  std::printf("\n");
  for (int begin = 0; begin < rows; begin += Br) {
    for (int split = 0; split < num_splits; ++split) {
      const int end = min(begin + Br, rows);
      const KeyTiles tiles = num_splits > 1
                                 ? find_key_tiles<Bc, true>(mask, begin, end, split, num_splits)
                                 : find_key_tiles<Bc, false>(mask, begin, end, split, num_splits);
      std::printf("%d %d %d ", tiles.begin, tiles.full_end, tiles.end);
    }
  }
  std::printf("\n");
  for (int begin = 0; begin < mask.seqlen_k; begin += Bc) {
    const int end = min(begin + Bc, mask.seqlen_k);
    const QueryTiles tiles = find_query_tiles<Br>(mask, begin, end, rows);
    std::printf("%d %d %d ", tiles.begin, tiles.full_begin, tiles.end);
  }
  std::printf("\n");
}

int main() {
  int causal;
  while (std::scanf("%d", &causal) == 1) {
    const std::vector<int> n = read(5);
    const int rows = n[1] * n[0], seqlen_k = n[2], q_offset = n[3];
    if (n[0] == 1) {
      if (causal)
        print(Mask<true>(seqlen_k, q_offset), rows, n[4]);
      else
        print(Mask<false>(seqlen_k, q_offset), rows, n[4]);
    } else {
      if (causal)
        print(Mask<true, 3>(seqlen_k, q_offset), rows, n[4]);
      else
        print(Mask<false, 3>(seqlen_k, q_offset), rows, n[4]);
    }
  }
}
