// How threads divide a tile, and the layout of its rows in shared memory.
#pragma once

#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "tile/layout.cuh"
#include "scheduler/tile_coord.cuh"

namespace simt {

template <class Config>
struct Layout {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;

  static constexpr int headroom = ::headroom<Element>;
  static constexpr int width = 16 / sizeof(T);  // elements per 128-bit shared access
  using Vec = Vector<T, width>;

  // Number of elements per global access: as many as `alignment` bytes hold, but at least one.
  static constexpr int unit = Config::alignment > sizeof(Element)
                                  ? Config::alignment / int(sizeof(Element))
                                  : 1;

  static constexpr int rows = Config::rows_per_thread;
  static constexpr int row_threads = Config::threads * rows / Config::Br;
  static constexpr int warp_rows = 32 / row_threads;  // distinct rows that a warp reads at once
  static constexpr int keys = Config::Bc / row_threads;
  static constexpr int columns = ceil_div(Config::head_dim_v, width* row_threads) * width;
  static_assert(Config::threads % 32 == 0);
  static_assert(row_threads == 4 || row_threads == 8 || row_threads == 16 || row_threads == 32);
  static_assert(row_threads * Config::Br == Config::threads * rows);
  static_assert(Config::Bc % row_threads == 0 && Config::Bc % width == 0);

  // The hardware serves a 128-bit read one half warp at a time. A half warp takes one wavefront if
  // lanes l and l ^ 1, or l and l ^ 2, always read the same address, and the distinct vectors (then
  // at most eight) are in distinct groups of four banks. So bit 0 of the lane selects the row, and
  // the next bits position(), which selects the keys or columns: neighbour lanes read the same
  // addresses of K and V, and lanes two apart the same addresses of Q and P.
  static constexpr int position_shift = row_threads < 32 ? 1 : 0;
  __device__ static int position() {
    return threadIdx.x % 32 >> position_shift & (row_threads - 1);
  }
  __device__ static int row_in_warp() {
    const int lane = threadIdx.x % 32;
    return (lane & position_shift) | (lane / (row_threads << position_shift) << position_shift);
  }

  // Lanes of eight consecutive positions read eight consecutive rows of K. An odd row length,
  // counted in vectors, places these rows in distinct bank groups. The same holds for rows of Q.
  static constexpr int padded_dim = round_up(Config::head_dim, unit > width ? unit : width);
  static constexpr int qk_stride = (padded_dim / width | 1) * width;
  // V needs no padding: lanes of eight consecutive positions read consecutive vectors of one row.
  static constexpr int v_stride = round_up(columns * row_threads, unit > width ? unit : width);
  // A warp (for double, a half warp) writes one element of P per lane: row_threads consecutive
  // elements in each of several rows. Together they cover the 128 bytes of all banks once if the
  // row length modulo `banks` is `span`.
  static constexpr int banks = 128 / sizeof(T);
  static constexpr int span = row_threads < banks / 2 ? row_threads : banks / 2;
  static constexpr int p_stride = Config::Bc + (span - Config::Bc % banks + banks) % banks;

  static constexpr int q_size = Config::Br * qk_stride;
  static constexpr int k_size = Config::Bc * qk_stride;
  static constexpr int v_size = Config::Bc * v_stride;
  static constexpr int kv_size =
      Config::share_kv ? (k_size > v_size ? k_size : v_size) : k_size + v_size;
  static constexpr int p_size = Config::Br * p_stride;
  static_assert(int(sizeof(T)) * (q_size + kv_size + p_size) == Config::shared_memory);
};

}  // namespace simt
