// Division of the gradient of a bias into tiles. A tile of a bias is added to all score tiles along
// its broadcast axes, so the corresponding tile of the gradient is a sum over these score tiles.
#pragma once

#include "backward/inputs/bias_work.cuh"
#include "backward/params.cuh"
#include "scheduler/tile_coord.cuh"

// Which axes of a bias are not broadcast, and the numbers of tiles that follow.
template <class Config>
struct BiasAxes {
  const GradientParams& p;
  const bool keeps_rows = p.dbias.rows > 1;
  const bool keeps_keys = p.dbias.keys > 1;
  // A packed bias has no batch axis: each of its rows belongs to one sequence.
  const bool keeps_batch = Config::packed ? keeps_rows : p.dbias.batch > 1;
  const bool keeps_heads = p.dbias.heads > 1;

  __device__ explicit BiasAxes(const GradientParams& p) : p(p) {}

  // Return the number of gradient tiles along each axis, and the number of score tiles that are
  // summed into each of them. A tile has `rows` x `keys` scores. Along each axis, one of the two
  // numbers is 1, so the indices of a gradient tile plus those of a summed tile are the indices of
  // a score tile.
  __device__ ScoreTiles output_tiles(int rows, int keys) const {
    return {keeps_batch ? p.batch : 1, keeps_heads ? p.heads_q : 1,
            keeps_rows ? ceil_div(p.seqlen_q, rows) : 1,
            keeps_keys ? ceil_div(p.seqlen_k, keys) : 1};
  }
  __device__ ScoreTiles summed_tiles(int rows, int keys) const {
    return {keeps_batch ? 1 : p.batch, keeps_heads ? 1 : p.heads_q,
            keeps_rows ? 1 : ceil_div(p.seqlen_q, rows),
            keeps_keys ? 1 : ceil_div(p.seqlen_k, keys)};
  }
};
