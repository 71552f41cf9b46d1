// Prints which pairs of a warp's accumulator fragments dropout keeps. Standard input has one line of
// numbers for each warp: seed and offset, the threshold, whether rows are keys (0 or 1), batch index,
// head, first row and first column. The output has one line for each warp, with a digit for each
// pair: the digits of each lane in order, for 48 and then for 128 columns. Then follow the digits of
// 16 rows by 48 columns, each from a call for that pair alone.
#include <cstdio>
#include <string>

#include "cuda_on_cpu.h"
#include "read_numbers.h"

inline long long __ldg(const long long* address) { return *address; }

#include "score/dropout.cuh"

struct DropoutParams {
  struct {
    int dropout_threshold;
    struct {
      const long long* data;
    } dropout_seed;
  } mods;
};

struct Config {};

struct Place {
  int batch, head, first_row, first_column;
};

template <bool RowsAreKeys, int Columns>
void print_fragments(const DropoutNumbers& numbers, const Place& place) {
  std::string digits(32 * Columns / 2, '?');
  run_block(32, [&] {
    KeptPairs<RowsAreKeys, Columns> kept;
    kept.draw(numbers, place.batch, place.head, place.first_row, place.first_column);
    for (int i = 0; i < Columns / 2; ++i) {
      digits[threadIdx.x * Columns / 2 + i] = '0' + kept.keeps(i);
    }
  });
  std::printf("%s", digits.c_str());
}

template <bool RowsAreKeys>
void print(const DropoutNumbers& numbers, const Place& place) {
  print_fragments<RowsAreKeys, 48>(numbers, place);
  print_fragments<RowsAreKeys, 128>(numbers, place);
  for (int row = place.first_row; row < place.first_row + 16; ++row) {
    for (int column = place.first_column; column < place.first_column + 48; ++column) {
      const int query = RowsAreKeys ? column : row, key = RowsAreKeys ? row : column;
      std::printf("%d", numbers.keeps(place.batch, place.head, query, key));
    }
  }
  std::printf("\n");
}

int main() {
  long long seed[2];
  while (std::scanf("%lld %lld", &seed[0], &seed[1]) == 2) {
    const std::vector<int> n = read(6);
    const DropoutNumbers numbers = dropout_numbers<Config>(DropoutParams{{n[0], {seed}}});
    const Place place = {n[2], n[3], n[4], n[5]};
    n[1] ? print<true>(numbers, place) : print<false>(numbers, place);
  }
}
