// The columns of a head that a warp has: all, or where a team of warps shares them its part.
#pragma once

#include "tile/layout.cuh"

// Each of the team has as many, whole steps of the tensor cores; those past the last are zeros.
template <int Columns, int Team>
struct TeamColumns {
  static constexpr int padded = round_up(Columns, 16 * Team) / Team;
  // That are there, of the last of the team.
  static constexpr int least = Columns - (Team - 1) * padded;

  // And of any: more than `padded` stands for all, a negative number for none.
  __device__ static int left_of(int member) { return Columns - member * padded; }
};

// A config as one of the team has it.
template <class Config>
struct TeamShare : Config {
  static constexpr int head_dim = TeamColumns<Config::head_dim, Config::team>::padded;
  // Values that are columns of their keys are taken from the same part of them. Then there may be
  // some that are no values, of which nothing is written.
  static constexpr int head_dim_v =
      Config::values_in_keys ? head_dim : TeamColumns<Config::head_dim_v, Config::team>::padded;
};
