// Rows that the softmax of the Hopper kernel leaves out. All scores of such a row are very low, as
// for padding under a bias of -1e9 or of -FLT_MAX, or a score is very high, above -low_score.
// That softmax treats scores up to `low_score` (score/softmax.cuh) as masked, so a row without
// other scores comes out as 0. A high score would be rounded differently in the KV tile that sets
// the base than in later ones. This launch follows the Hopper kernel. It recomputes the query tiles
// that hold such rows with the `mma` kernel, whose softmax takes scores of any size, and writes
// only those rows. Doing so in the Hopper kernel takes registers from its main loop and slows other
// rows by up to 10% (bfloat16 bias, head_dim 128, 8192 keys, H100).
#pragma once

#include "forward/mma.cu"
#include "scheduler/row_selection.cuh"
#include "scheduler/sequence_view.cuh"
#include "scheduler/tile_coord.cuh"
#include "params.cuh"
#include "ptx/stream.cuh"
#include "tile/access.cuh"

#if __CUDA_ARCH__ == 900

// Configuration of the `mma` kernel: that of the attention (Hopper) kernel, with a different tile.
template <class Attention>
struct LowRowsConfig : Attention {
  static constexpr int Br = Attention::low_Br;
  static constexpr int Bc = Attention::low_Bc;
  static constexpr int warps = Attention::low_warps;
  static constexpr int stages = Attention::low_stages;
  static constexpr bool q_in_registers = Attention::low_q_in_registers;
  static constexpr int shared_memory = Attention::low_shared_memory;
  static constexpr bool split_keys = false;  // the splits of the attention kernel are merged by now
  static constexpr int group = 1;
};

// Rows that the attention kernel leaves to this launch are called empty, even those with a high
// score, see is_empty(). A CTA computes in rounds: each warp looks for empty rows in a few query
// tiles, then all warps together compute each tile that has any.
template <class Attention>
struct LowRows {
  using Config = LowRowsConfig<Attention>;
  using Element = typename Config::Element;
  using Selection = RowSelection<Config>;
  static constexpr int tiles_per_warp = 4;
  static constexpr int tiles_per_round = tiles_per_warp * Config::warps;
  static constexpr int words = ceil_div(Config::Br, 32);

  const Params& p;

  // The attention kernel sets counters[0] if it leaves any row to this launch. Most calls have no
  // such row, and then the launch ends here. The last CTA to finish clears the counters for the
  // next call.
  __device__ void compute_all() const {
    if (*static_cast<volatile int*>(p.counters) == 0) return;
    compute_rounds();
    __syncthreads();
    if (threadIdx.x == 0 && ptx::atom_add_acq_rel(p.counters + 1, 1) == int(gridDim.x) - 1) {
      p.counters[0] = p.counters[1] = 0;
    }
  }

 private:
  __device__ void compute_rounds() const {
    __shared__ unsigned low_rows[tiles_per_round][words];
    const int tiles = ceil_div(p.seqlen_q, Config::Br) * p.batch * p.heads_q;
    for (int first = blockIdx.x; first < tiles; first += gridDim.x * tiles_per_round) {
#pragma unroll
      for (int i = 0; i < tiles_per_warp; ++i) {
        const int index = threadIdx.x / 32 * tiles_per_warp + i;
        const int tile = first + index * gridDim.x;
        find(tile < tiles ? tile * p.num_splits : -1, low_rows[index]);
      }
      __syncthreads();
#pragma unroll 1
      for (int index = 0; index < tiles_per_round; ++index) {
        compute((first + index * gridDim.x) * p.num_splits, low_rows[index]);
      }
      __syncthreads();
    }
  }

  // Called by a warp. Sets one bit for each empty row of the tile; none if `tile` is negative.
  __device__ void find(int tile, unsigned (&bits)[words]) const {
#pragma unroll
    for (int word = 0; word < words; ++word) {
      const int row = 32 * word + threadIdx.x % 32;
      const unsigned empty = __ballot_sync(~0u, tile >= 0 && row < Config::Br && is_empty(tile, row));
      if (threadIdx.x % 32 == 0) bits[word] = empty;
    }
  }

  // Called by all threads of the CTA. Computes the rows of the tile whose bits are set.
  __device__ void compute(int tile, const unsigned (&bits)[words]) const {
    unsigned any = 0;
#pragma unroll
    for (int word = 0; word < words; ++word) any |= bits[word];
    if (any == 0) return;
    Selection::select(tile, bits);
    mma_forward<Config>(p, tile);
    __syncthreads();
  }

  // Returns whether the attention kernel left a row of a tile to this launch, as all its scores
  // are low or one is high. If KV is not split, the first columns of its output are then -0. If KV
  // is split, there are two cases: the log-sum-exp of every split is so low that splits written as
  // -inf would have weight, too, or the base of some split is inf.
  __device__ bool is_empty(int tile, int row_in_tile) const {
    if constexpr (Config::has_seqlens) {
      const SequenceView<Config> view(p, tile);
      return is_empty(view.params(), view.coord, &view, view.coord.q_begin + row_in_tile);
    } else {
      const TileCoord coord = tile_coord<Config::Br>(p, tile);
      return is_empty(p, coord, static_cast<const SequenceView<Config>*>(nullptr),
                      coord.q_begin + row_in_tile);
    }
  }
  __device__ static bool is_empty(const Params& p, const TileCoord& coord,
                                  const SequenceView<Config>* view, int row) {
    if (row >= p.seqlen_q) return false;
    bool is_empty = true;
    [[maybe_unused]] bool is_high = false;
    if constexpr (Attention::split_keys) {
      const Partials<Config> partials(p);
      for (int split = 0; split < p.num_splits; ++split) {
        const auto sum = partials.sum(p, split, index_of(p, coord, view, row));
        is_empty &= sum.base + sum.log_sum < low_score<float> + 128;
        is_high |= sum.base == SoftmaxMath<float>::infinity();
      }
    } else {
      constexpr int columns = 16 / int(sizeof(Element));
      const Element* output = out_row(p.out.head<Element>(coord.batch, coord.head), p, view, row);
      const auto first = load_elements<columns, Config::out_alignment>(output, Config::head_dim_v);
#pragma unroll
      for (int e = 0; e < min(columns, Config::head_dim_v); ++e) {
        is_empty &= __float_as_uint(widen(first.data[e])) == 0x80000000u;
      }
    }
    return is_empty || is_high;
  }
};

template <class Attention>
struct RowSelection<LowRowsConfig<Attention>> {
  using Config = LowRowsConfig<Attention>;
  static constexpr int words = ceil_div(Config::Br, 32);
  struct SelectedRows {
    int tile;
    unsigned rows[words];
  };

  // Sets the tile and rows to compute. Called by all threads after they finish the previous tile.
  __device__ static void select(int tile, const unsigned (&bits)[words]) {
    if (threadIdx.x == 0) {
      selected().tile = tile;
#pragma unroll
      for (int word = 0; word < words; ++word) selected().rows[word] = bits[word];
    }
    __syncthreads();
  }
  __device__ static int tile() { return selected().tile; }
  __device__ static bool include(int row) { return selected().rows[row / 32] >> row % 32 & 1; }

 private:
  __device__ static SelectedRows& selected() {
    __shared__ SelectedRows selected;
    return selected;
  }
};

template <class Config>
__device__ void compute_low_rows(const Params& p) {
  LowRows<Config>{p}.compute_all();
}

#endif  // __CUDA_ARCH__ == 900
