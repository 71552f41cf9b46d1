// Columns of a head that a warp processes: all, or a slice if several warps process the same keys.
#pragma once

#include "tile/layout.cuh"

// `Columns` columns distributed over `Warps` warps. Each warp has `padded` columns, a multiple of
// 16; columns past the end of the head are zeros.
template <int Columns, int Warps>
struct WarpColumns {
  static constexpr int padded = round_up(Columns, 16 * Warps) / Warps;
  // Number of valid (not padding) columns of the last warp.
  static constexpr int last_valid = Columns - (Warps - 1) * padded;

  // Returns the number of columns from the first column of warp `warp` to the end of the head. All
  // of the warp's columns are valid if it is at least `padded`, none if it is at most 0.
  __device__ static int columns_from(int warp) { return Columns - warp * padded; }
};

// The Config of one warp: its head dims are those of the warp's slice of the columns.
template <class Config>
struct WarpColumnsConfig : Config {
  static constexpr int head_dim = WarpColumns<Config::head_dim, Config::column_warps>::padded;
  // For MLA, where V is a prefix of K's columns, the warp's slice of K also serves as V. It may
  // extend past head_dim_v; such columns are not written.
  static constexpr int head_dim_v =
      Config::values_in_keys ? head_dim
                             : WarpColumns<Config::head_dim_v, Config::column_warps>::padded;
};
