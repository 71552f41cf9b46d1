// Dropout: after the softmax, the weights of random pairs of query and key become 0, and the others
// are multiplied by a constant.
//
// The random numbers are those of Philox4x32-10 (Salmon et al. 2011). Its key is made of the call's
// seed and offset, its counter of the pair's batch index, query head, and indices of query and key
// in their sequence. So every kernel computes the same numbers, in any order. One call of Philox
// returns four words, whose 16 bytes are the random numbers of 16 pairs. A pair keeps its weight if
// its byte is at least the threshold. The score matrix is divided into squares of 16 x 16 pairs,
// each with 16 calls. With words and bytes numbered from 0, the call (a, b) of a square serves:
//
//   word.byte         key 2 b   2 b + 1   2 b + 8   2 b + 9
//   query 2 a           0.0       1.0       0.1       1.1
//   query 2 a + 1       2.0       3.0       2.1       3.1
//   query 2 a + 8       0.2       1.2       0.3       1.3
//   query 2 a + 9       2.2       3.2       2.3       3.3
//
// In accumulator fragments (tile/fragments.cuh), two lanes hold these pairs, whether rows are
// queries, as in the forward pass, or keys, as in the backward pass.
#pragma once

#include "ptx/bytes.cuh"

// Random numbers of a call's dropout.
struct DropoutNumbers {
  unsigned key[2];
  unsigned threshold;  // pairs whose byte is below it are dropped; 1 to 255

  // Returns the index of the call that serves a query or a key, along one axis of the score matrix:
  // 0 for the indices 0, 1, 8 and 9; 1 for 2, 3, 10 and 11; 4 for 16, 17, 24 and 25.
  __device__ static unsigned call_of(int index) { return index / 16u * 4 + index % 8u / 2; }

  // Computes the four words of a call of Philox.
  __device__ void draw(unsigned (&words)[4], unsigned query_call, unsigned key_call, int head,
                       int batch) const {
    words[0] = query_call;
    words[1] = key_call;
    words[2] = head;
    words[3] = batch;
    unsigned low = key[0], high = key[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const unsigned long long first = ptx::mul_wide_u32(words[0], 0xD2511F53);
      const unsigned long long second = ptx::mul_wide_u32(words[2], 0xCD9E8D57);
      words[0] = static_cast<unsigned>(second >> 32) ^ words[1] ^ low;
      words[1] = static_cast<unsigned>(second);
      words[2] = static_cast<unsigned>(first >> 32) ^ words[3] ^ high;
      words[3] = static_cast<unsigned>(first);
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
  }

  // Returns a word whose bytes have their highest bit set where the byte of `word` is at least the
  // threshold; the other bits are arbitrary. The lower seven bits are compared by an addition that
  // carries into the highest bit. The highest bit of `word` then decides alone, unless it equals
  // that of the threshold.
  __device__ unsigned kept_bytes(unsigned word) const {
    const unsigned addend = (0x80 - threshold % 128) * 0x01010101u;
    // All bits set if the threshold is below 128. A conditional expression would become a selection
    // for each word.
    const unsigned is_low = static_cast<unsigned>(static_cast<int>(threshold - 128) >> 31);
    const unsigned carries = (word & 0x7f7f7f7f) + addend;
    return (carries & word) | (is_low & (carries | word));
  }

  // Returns whether a pair keeps its weight. Takes one call of Philox.
  __device__ bool keeps(int batch, int head, int query, int key) const {
    unsigned words[4];
    draw(words, call_of(query), call_of(key), head, batch);
    const unsigned even = key % 2 ? words[1] : words[0];
    const unsigned odd = key % 2 ? words[3] : words[2];
    const int byte = query % 16 / 8 * 2 + key % 16 / 8;
    return ((query % 2 ? odd : even) >> 8 * byte & 255) >= threshold;
  }
};

// Returns the random numbers of a call with dropout. `Config` makes the call depend on a template
// parameter, because other translation units have no `p.mods.dropout_seed`.
template <class Config, class AnyParams>
__device__ DropoutNumbers dropout_numbers(const AnyParams& p) {
  const long long* numbers = p.mods.dropout_seed.data;
  const unsigned long long seed = __ldg(numbers), offset = __ldg(numbers + 1);
  const unsigned long long key = seed ^ (offset * 0x9E3779B97F4A7C15ull);
  return {{static_cast<unsigned>(key), static_cast<unsigned>(key >> 32)},
          static_cast<unsigned>(p.mods.dropout_threshold)};
}

// Returns the factor of the weights that dropout keeps; 1 without dropout.
template <class Config, class T, class AnyParams>
__device__ T kept_weight(const AnyParams& p) {
  if constexpr (Config::dropout) {
    return T(256) / T(256 - p.mods.dropout_threshold);
  } else {
    return T(1);
  }
}

// Which pairs of a warp's accumulator fragments, of 16 rows and `Columns` columns, keep their
// weight. `RowsAreKeys` says whether rows are keys and columns are queries.
//
// A register holds the bits of the lane's pairs in a square of 16 x 16 pairs. In each of its bytes,
// bits 7 and 6 belong to the even and the odd column; the other bits are arbitrary.
template <bool RowsAreKeys, int Columns>
struct KeptPairs {
  static constexpr int squares = Columns / 16;
  static_assert(squares * 16 == Columns, "whole squares");

  unsigned bits[squares];

  // Draws the numbers. `first_row` and `first_column` are multiples of 16, indices in a sequence.
  // A call serves two lanes, which hold adjacent rows: lanes 0 and 4, for example. Of two squares,
  // each of the two lanes calls Philox for one. They then exchange the results.
  __device__ void draw(const DropoutNumbers& numbers, int batch, int head, int first_row,
                       int first_column) {
    const int lane = threadIdx.x % 32;
    const bool is_odd = lane / 4 % 2;
    const unsigned row_call = first_row / 4 + lane / 8;
    const unsigned column_call = first_column / 4 + lane % 4;
#pragma unroll
    for (int square = 0; square < squares; square += 2) {
      const bool is_last = square == squares - 1;
      const unsigned own = quarter(numbers, batch, head, row_call,
                                   column_call + 4 * (square + (is_last ? 0 : is_odd)));
      if (is_last) {
        bits[square] = own << 2 * is_odd;
      } else {
        const unsigned other = __shfl_xor_sync(~0u, own, 4);
        bits[square] = (is_odd ? other : own) << 2 * is_odd;
        bits[square + 1] = (is_odd ? own : other) << 2 * is_odd;
      }
    }
  }

  // Returns a mask for the `i`-th pair of packed 16-bit elements, in accumulator order.
  __device__ unsigned mask(int i) const {
    return ptx::prmt_sign_bytes(bits[i / 4], bits[i / 4] << 1, byte(i % 2, i / 2 % 2));
  }

  // Returns whether the `i`-th accumulator keeps its weight.
  __device__ bool keeps(int i) const {
    return bits[i / 8] >> (8 * byte(i / 2 % 2, i / 4 % 2) + 7 - i % 2) & 1;
  }

  // Sets those of four accumulators, the `j`-th of the lane, to 0 whose pairs are dropped.
  __device__ void drop(float (&four)[4], int j) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) four[c] = keeps(4 * j + c) ? four[c] : 0;
  }

 private:
  // Returns the byte of a pair, given the halves of the square that its row and column are in.
  __device__ static constexpr int byte(int row_half, int column_half) {
    return RowsAreKeys ? 2 * column_half + row_half : 2 * row_half + column_half;
  }

  // Returns the bits of a call. In each byte, bits 7 and 6 are those of the even row's pairs in
  // even and odd columns, bits 5 and 4 those of the odd row.
  __device__ static unsigned quarter(const DropoutNumbers& numbers, int batch, int head,
                                     unsigned row_call, unsigned column_call) {
    unsigned words[4];
    numbers.draw(words, RowsAreKeys ? column_call : row_call, RowsAreKeys ? row_call : column_call,
                 head, batch);
    unsigned result = numbers.kept_bytes(words[0]);
    result = joined<0x80808080>(result, numbers.kept_bytes(words[RowsAreKeys ? 2 : 1]) >> 1);
    result = joined<0xc0c0c0c0>(result, numbers.kept_bytes(words[RowsAreKeys ? 1 : 2]) >> 2);
    return joined<0xe0e0e0e0>(result, numbers.kept_bytes(words[3]) >> 3);
  }

  // Returns the bits of `first` that `Mask` selects, and the others of `second`.
  template <unsigned Mask>
  __device__ static unsigned joined(unsigned first, unsigned second) {
    return (first & Mask) | (second & ~Mask);
  }
};
