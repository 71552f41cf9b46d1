// Shared-memory layouts of a tile of rows.
#pragma once

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rows of `Columns` elements in 16-byte chunks, with the chunk index of a row XORed with a phase.
//
// ldmatrix and 16-byte copies access eight chunks at a time, and shared memory has eight 16-byte
// bank groups. Without the phase, chunk j of row r would lie in bank group (r * c + j) % 8, with c
// chunks per row. Chunks j of eight rows would then use only 8 / gcd(c, 8) bank groups. The phase
// has gcd(c, 8) values, one for each run of 8 / gcd(c, 8) rows, so that these chunks use all eight
// bank groups. An odd c needs no phase.
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

  // Returns the offset of a chunk in bytes.
  static __device__ int offset(int row, int chunk) {
    return row * row_bytes + (chunk ^ (row / (8 / swizzle) % swizzle)) * 16;
  }

  // Returns the address of (row + rows, chunk + chunks), given the address of (row, chunk). The
  // tile is aligned to 128 bytes, `rows` is a multiple of 8, and chunk is less than a power of two
  // that divides `chunks`. If `rows` and `chunks` are constants, this is one XOR and an immediate
  // offset of the load.
  static __device__ unsigned advance(unsigned address, int rows, int chunks) {
    return (address ^ (chunks % swizzle * 16)) + chunks / swizzle * swizzle * 16 + rows * row_bytes;
  }
};
