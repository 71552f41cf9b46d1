// Shared-memory layouts of a tile of rows.
#pragma once

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rows of Columns elements in 16-byte chunks, the chunk index of a row XORed with a phase.
//
// ldmatrix and 16-byte copies read or write eight chunks at a time, and shared memory has eight
// 16-byte bank groups. With c chunks per row, chunk j of row r would lie in group (r * c + j) % 8:
// eight rows' chunks of one column meet in 8 / gcd(c, 8) groups only. The phase takes gcd(c, 8)
// values, one for each run of 8 / gcd(c, 8) rows, which spreads them over all eight groups. An odd
// c needs none.
template <class Element, int Columns>
struct SwizzledRows {
  static constexpr int chunk_elements = 16 / sizeof(Element);
  static constexpr int chunks = Columns / chunk_elements;
  static constexpr int row_bytes = Columns * sizeof(Element);
  static constexpr int swizzle = chunks % 8 == 0   ? 8
                                 : chunks % 4 == 0 ? 4
                                 : chunks % 2 == 0 ? 2
                                                   : 1;  // gcd(chunks, 8)

  static_assert(Columns % chunk_elements == 0, "rows are whole chunks");

  // In bytes.
  static __device__ int offset(int row, int chunk) {
    return row * row_bytes + (chunk ^ (row / (8 / swizzle) % swizzle)) * 16;
  }

  // The address of (row + rows, chunk + chunks) from that of (row, chunk), in a tile that begins on
  // 128 bytes, where rows is a multiple of 8, chunk is 0 or 1 and chunks is even: with constants
  // for the last two this is one XOR and an offset that the load instruction takes.
  static __device__ unsigned advance(unsigned address, int rows, int chunks) {
    return (address ^ (chunks % swizzle * 16)) + chunks / swizzle * swizzle * 16 + rows * row_bytes;
  }
};
