// Preswizzled tiles: tiles of float32 inputs as float16 components (preprocess/float32_fp16x2.cuh),
// stored in the workspace in the layout that they have in shared memory. A CTA of the main kernel
// loads a tile as one contiguous range of bytes.
//
// A preswizzled query tile holds rows of q, rows of dout, their row statistics and scales. A KV
// tile holds rows of k, rows of v and scales. Rows past the end of a sequence are zeros, and
// elements are cleaned as preprocess/clean.cuh describes.
#pragma once

#include "backward/preprocess/clean.cuh"
#include "backward/params.cuh"
#include "backward/preprocess/float32_fp16x2.cuh"
#include "backward/dq/accumulate.cuh"
#include "backward/tile_coord.cuh"
#include "scheduler/tile_coord.cuh"
#include "tile/access.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ >= 800

// Scale factors of the rows of a tile of dout. The gradients of a query are proportional to its
// dout, and should be accurate relative to their own size. So a row of dout that is far smaller
// than the tile's largest is scaled up, together with its delta, by 2^(8 n), n at most 15. The
// factors stored here are the inverses, 2^(-8 n). Rows of at least 2^-8 of the largest are not
// scaled: they keep all bits that sums of float32 products need. In most tiles all factors are
// therefore 1, and the multiplications are skipped.
//
// dk and dv are sums over rows, so the contribution of a scaled row is scaled back first.
struct RowFactors {
  static constexpr int rows = 128, log2_step = 8, max_power = 15;
  bool differ;  // whether any factor is not 1
  unsigned char powers[rows / 2];

  __device__ static constexpr int power_of(float ratio) {
    int power = 0;
    for (float size = 0x1p-8f; power < max_power && ratio < size; size *= 0x1p-8f) ++power;
    return power;
  }
  __device__ static float value(int power) {
    return __uint_as_float((127 - log2_step * power) << 23);
  }
  __device__ static float inverse(int power) {
    return __uint_as_float((127 + log2_step * power) << 23);
  }
  __device__ int power(int row) const { return powers[row / 2] >> row % 2 * 4 & 15; }
  __device__ float row_factor(int row) const { return value(power(row)); }

  // Returns the factors of an even row and of the next one as float16. Factors of 2^-32 and less
  // become 0.
  __device__ unsigned factor_pair(int row) const {
    const int two = powers[row / 2];
    return pack<half_t>(value(two & 15), value(two >> 4));
  }

  // Multiplies P^T (accumulators of a warp, keys by queries) by the factors of its queries. `first`
  // is the first query row of the accumulators.
  template <int row_tiles, int column_tiles>
  __device__ void apply_to_p(float (&p)[row_tiles][column_tiles][4], int first) const {
    if (!differ) return;
#pragma unroll
    for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = row_factor(first + 8 * j + threadIdx.x % 4 * 2 + c);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          p[i][j][c] *= factor;
          p[i][j][2 + c] *= factor;
        }
      }
    }
  }

  // Multiplies a warp's rows of dq, of which the first is 16 * `first_tile`, by their factors.
  template <int row_tiles, int column_tiles>
  __device__ void apply_to_rows(float (&sums)[row_tiles][column_tiles][4], int first_tile) const {
    if (!differ) return;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = row_factor(16 * (first_tile + i) + 8 * half + threadIdx.x % 32 / 4);
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
          sums[i][j][2 * half] *= factor;
          sums[i][j][2 * half + 1] *= factor;
        }
      }
    }
  }
};

// Units (powers of two) of the components of q, dout, k and v in a tile, and the tile's largest row
// norms of dout and v. The norms bound dS: |dP| is at most the norm of a dout row times that of v.
struct QueryScales {
  float q;
  float dout;
  float dout_norm;
  float delta;  // largest magnitude of delta in the tile
  RowFactors factors;
};
struct KeyScales {
  static constexpr int keys = 256;
  float k;
  float v;
  float v_norm;
  bool has_infinite;
  unsigned infinite[keys / 32];  // one bit per key: whether it holds an infinity

  __device__ bool is_infinite(int key) const { return infinite[key / 32] >> key % 32 & 1; }
};

// Layout of a preswizzled tile of `Rows` rows, with `StatsBytes` bytes of row statistics per row.
template <int Rows, int Dim, int DimV, int StatsBytes>
struct PreswizzledTile {
  using Layout = SwizzledRows<half_t, 2 * Dim>;
  using LayoutV = SwizzledRows<half_t, 2 * DimV>;
  static constexpr int second_offset = Rows * Layout::row_bytes;
  static constexpr int stats_offset = second_offset + Rows * LayoutV::row_bytes;
  static constexpr int scales_offset = stats_offset + Rows * StatsBytes;
  static constexpr int bytes = scales_offset + 128;  // keeps the next tile aligned for the swizzle
};

// Preswizzled query tiles and KV tiles. `Config` has `Br`, `Bc`, `padded_dim`, `padded_dim_v`.
template <class Config>
struct PreswizzledTiles {
  using Stats = RowStats<float>;
  using QueryTile =
      PreswizzledTile<Config::Br, Config::padded_dim, Config::padded_dim_v, int(sizeof(Stats))>;
  using KvTile = PreswizzledTile<Config::Bc, Config::padded_dim, Config::padded_dim_v, 0>;
  static constexpr int64 floats_per_tile =
      Config::wants_q ? int64(Config::Br) * Config::padded_dim : 0;

  // Return the address of a query tile, and of a KV tile. Preswizzled tiles follow the dq sums in
  // the workspace: first query tiles, indexed by the tile slots of dq, then KV tiles, which have
  // slots of their own. Workspace arrays of later kernels may overlap the preswizzled tiles.
  __device__ static char* query_tile_address(const GradientParams& p, const Sequence& sequence,
                                             int batch, int head, int tile) {
    const DqSums<Config> sums(p);
    return begin(p, sums) +
           int64(sums.tile_slot(p, sequence, batch, head, tile)) * QueryTile::bytes;
  }
  __device__ static char* kv_tile_address(const GradientParams& p, const Sequence& sequence,
                                          int batch, int head, int tile) {
    const DqSums<Config> sums(p);
    int64 slot = (int64(batch) * p.heads_kv + head) * ceil_div(p.seqlen_k, Config::Bc) + tile;
    if constexpr (Config::packed) {
      slot = int64(head) * count_tile_slots<Config::Bc>(p.total_k, p.batch) +
             first_tile_slot<Config::Bc>(sequence.k_first, batch) + tile;
    }
    return begin(p, sums) + sums.count * int64(QueryTile::bytes) + slot * KvTile::bytes;
  }

 private:
  __device__ static char* begin(const GradientParams& p, const DqSums<Config>& sums) {
    return reinterpret_cast<char*>(sums.first_tile() + sums.count * floats_per_tile);
  }
};

// Code of a CTA that writes one preswizzled tile.
template <class Config>
struct TilePreswizzler {
  using Preswizzled = PreswizzledTiles<Config>;
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  struct Shared {
    float warp_maxima[warps];
    float row_maxima[RowFactors::rows];  // largest finite magnitude in each row of dout
    unsigned char powers[RowFactors::rows];
    unsigned infinite[KeyScales::keys / 32];
  };
  static_assert(Config::Br <= RowFactors::rows && Config::Bc <= KeyScales::keys,
                "scale factors for all rows and keys of a tile");
  static_assert(sizeof(QueryScales) <= 128 && sizeof(KeyScales) <= 128,
                "scale factors fit in 128 bytes after the tile");

  Shared& shared;

  // Returns the maximum over the CTA. NaN is ignored.
  __device__ float largest(float x) const {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.warp_maxima[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared.warp_maxima[0];
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) x = fmaxf(x, shared.warp_maxima[warp]);
    return x;
  }

  // Converts `Rows` x `Dim` floats to components at `target`. Rows from `left` on do not exist, and
  // become zeros. Elements are cleaned as preprocess/clean.cuh describes, except that an infinity
  // in k becomes 0 and sets the key's bit of `infinite`.
  template <int Rows, int Dim, int Padded>
  struct TileRows {
    using Layout = SwizzledRows<half_t, 2 * Padded>;
    static constexpr int chunks = Padded / 8;
    static constexpr int lanes = chunks % 32 == 0   ? 32
                                 : chunks % 16 == 0 ? 16
                                 : chunks % 8 == 0  ? 8
                                 : chunks % 4 == 0  ? 4
                                                    : 2;  // lanes that process one row
    static constexpr int rounds = chunks / lanes;
    static constexpr int rows_at_once = threads / lanes;

    const float* rows;
    int64 stride;
    int left;
    const typename Preswizzled::Stats* stats;  // row statistics; null for a KV tile
    bool is_q = false;
    bool is_k = false;

    __device__ bool exists(int row) const {
      if (row >= min(left, Rows)) return false;
      if (stats == nullptr) return true;
      return !(is_q ? clears_q(stats[row]) : clears_dout(stats[row]));
    }

    // Returns eight columns of a row, with zeros past the last column.
    __device__ auto read(int row, int chunk) const {
      const int columns_left = exists(row) ? max(0, min(8, Dim - 8 * chunk)) : 0;
      return load_elements<8, Config::alignment>(rows + row * stride + 8 * chunk, columns_left);
    }

    // Returns x, or 0 if x is NaN or infinite. If infinite, sets the bit of key `row`.
    __device__ static float clean(const TilePreswizzler& preswizzler, float x, int row) {
      if (fabsf(x) == SoftmaxMath<float>::infinity()) {
        atomicOr(&preswizzler.shared.infinite[row / 32], 1u << row % 32);
      }
      return fabsf(x) < SoftmaxMath<float>::infinity() ? x : 0;
    }

    // All lanes call `function(row, chunk)` for their chunks of a row, then `end(row)`.
    template <class Function, class EndRow>
    __device__ static void for_each(Function function, EndRow end) {
#pragma unroll 1
      for (int first = 0; first < Rows; first += rows_at_once) {
        const int row = first + threadIdx.x / lanes;
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
          function(row, round * lanes + threadIdx.x % lanes);
        }
        end(row);
      }
    }

    // Returns |x|, limited to 2^15: NaN and inf in a row must not make the largest norm infinite.
    __device__ static float finite(float x) { return fminf(fabsf(x), 0x1p15f); }

    // Returns the largest finite magnitude in the tile, and calls `on_row(row, row_max)` for each
    // row.
    template <class OnRow>
    __device__ float largest(const TilePreswizzler& preswizzler, OnRow on_row) const {
      float row_max = 0, tile_max = 0;
      for_each(
          [&](int row, int chunk) {
            const auto x = read(row, chunk);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float size = fabsf(x.data[e]);
              if (size < SoftmaxMath<float>::infinity()) row_max = fmaxf(row_max, size);
            }
          },
          [&](int row) {
#pragma unroll
            for (int bit = 1; bit < lanes; bit *= 2) {
              row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, bit));
            }
            if (row < Rows) on_row(row, row_max);
            tile_max = fmaxf(tile_max, row_max);
            row_max = 0;
          });
      return preswizzler.largest(tile_max);
    }

    // Writes components in the unit that fits the tile's largest element. Returns the unit, and in
    // `norm` the largest norm of a row.
    __device__ float write(const TilePreswizzler& preswizzler, char* target, float& norm) const {
      const Unit unit = Unit::for_largest(largest(preswizzler, [](int, float) {}));
      norm = write(preswizzler, target, unit, [](int) { return 1.0f; });
      return unit.size;
    }

    // Writes components in the given unit, each row multiplied by `factor(row)`. Returns the
    // largest norm of these rows.
    template <class Factor>
    __device__ float write(const TilePreswizzler& preswizzler, char* target, const Unit& unit,
                           Factor factor) const {
      float squares = 0, maximum = 0;
      for_each(
          [&](int row, int chunk) {
            if (row >= Rows) return;
            const auto x = read(row, chunk);
            const float row_factor = factor(row);
            const auto scaled = [&](float x) {
              return (is_k ? clean(preswizzler, x, row) : x) * row_factor * unit.inverse;
            };
            Vector<unsigned, 4> big, small;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float low = scaled(x.data[2 * e]), high = scaled(x.data[2 * e + 1]);
              squares = fma(finite(low), finite(low), fma(finite(high), finite(high), squares));
              const SplitPair pair = SplitPair::split(low, high);
              big.data[e] = pair.big;
              small.data[e] = pair.small;
            }
            *reinterpret_cast<Vector<unsigned, 4>*>(target + Layout::offset(row, chunk)) = big;
            *reinterpret_cast<Vector<unsigned, 4>*>(target + Layout::offset(row, chunks + chunk)) =
                small;
          },
          [&](int) {
#pragma unroll
            for (int bit = 1; bit < lanes; bit *= 2) {
              squares += __shfl_xor_sync(~0u, squares, bit);
            }
            maximum = fmaxf(maximum, squares);
            squares = 0;
          });
      return sqrtf(preswizzler.largest(maximum)) * unit.size;
    }
  };

  // Returns the power of two by which row `row` of dout and its delta, `row_delta`, are multiplied.
  // `row_max` and `delta` are the largest magnitudes of dout and delta in the tile.
  __device__ float choose_factor(int row, float row_delta, float row_max, float delta) const {
    const float size = fabsf(row_delta), dout_max = shared.row_maxima[row];
    int power = 0;
    if (size < SoftmaxMath<float>::infinity() && (size > 0 || dout_max > 0)) {
      power = RowFactors::power_of(
          fmaxf(row_max > 0 ? dout_max / row_max : 0, delta > 0 ? size / delta : 0));
    }
    shared.powers[row] = power;
    return RowFactors::inverse(power);
  }

  __device__ void write_query_tile(const GradientParams& p, int block) const {
    constexpr int Br = Config::Br;
    const GradientTileCoord coord = gradient_tile_coord<Config, Br, false, false>(p, block);
    const Sequence sequence = sequence_of<Config>(p, coord.batch);
    if (coord.begin >= sequence.seqlen_q) return;
    using Tile = typename Preswizzled::QueryTile;
    char* target =
        Preswizzled::query_tile_address(p, sequence, coord.batch, coord.head, coord.begin / Br);
    const int left = sequence.seqlen_q - coord.begin;
    const int64 first_row = sequence.q_first + int64(coord.begin);
    const auto rows = [&](const Tensor& tensor) {
      return tensor.head<const float>(sequence.q_batch, coord.head) + first_row * tensor.row_stride;
    };
    const auto* stats =
        row_stats<Config>(p) + lse_index<Config>(p, sequence, coord.head, coord.begin);
    QueryScales scales = {};
    float norm;
    scales.q = TileRows<Br, Config::head_dim, Config::padded_dim>{rows(p.q), p.q.row_stride, left,
                                                                  stats, true}
                   .write(*this, target, norm);
    const TileRows<Br, Config::head_dim_v, Config::padded_dim_v> dout = {
        rows(p.dout), p.dout.row_stride, left, stats};
    const float row_max =
        dout.largest(*this, [&](int row, float maximum) { shared.row_maxima[row] = maximum; });
    static_assert(Br <= threads, "a thread processes at most one row");
    const int row = threadIdx.x;
    const bool has_row = row < Br;
    auto own_stats = has_row && row < left ? stats[row] : typename Preswizzled::Stats{};
    if (clears_dout(own_stats)) own_stats.delta = 0;
    const auto finite_size = [&] {
      const float size = fabsf(own_stats.delta);
      return size < SoftmaxMath<float>::infinity() ? size : 0;
    };
    const float delta = largest(finite_size());
    float maximum = 0;
    if (has_row) {
      const float factor = choose_factor(row, own_stats.delta, row_max, delta);
      own_stats.delta *= factor;
      maximum = shared.row_maxima[row] * factor;
      reinterpret_cast<typename Preswizzled::Stats*>(target + Tile::stats_offset)[row] = own_stats;
    }
    const Unit unit = Unit::for_largest(largest(maximum));
    scales.dout = unit.size;
    scales.delta = largest(finite_size());
    scales.dout_norm = dout.write(*this, target + Tile::second_offset, unit,
                                  [&](int row) { return RowFactors::inverse(shared.powers[row]); });
    if (threadIdx.x == 0) {
      for (int i = 0; i < Br; ++i) {
        scales.factors.powers[i / 2] |= shared.powers[i] << i % 2 * 4;
        scales.factors.differ |= shared.powers[i] != 0;
      }
    }
    if (threadIdx.x == 0) *reinterpret_cast<QueryScales*>(target + Tile::scales_offset) = scales;
  }

  __device__ void write_kv_tile(const GradientParams& p, int block) const {
    constexpr int Bc = Config::Bc;
    const GradientTileCoord coord =
        gradient_tile_coord<Config, Bc, true, false, false>(p, block);
    const Sequence sequence = sequence_of<Config>(p, coord.batch);
    if (coord.begin >= sequence.seqlen_k) return;
    using Tile = typename Preswizzled::KvTile;
    char* target =
        Preswizzled::kv_tile_address(p, sequence, coord.batch, coord.head, coord.begin / Bc);
    const int left = sequence.seqlen_k - coord.begin;
    const int64 first_row = sequence.k_first + int64(coord.begin);
    const auto rows = [&](const Tensor& tensor) {
      return tensor.head<const float>(sequence.k_batch, coord.head) + first_row * tensor.row_stride;
    };
    constexpr int words = KeyScales::keys / 32;
    if (threadIdx.x < words) shared.infinite[threadIdx.x] = 0;
    KeyScales scales = {};
    float norm;
    scales.k = TileRows<Bc, Config::head_dim, Config::padded_dim>{rows(p.k), p.k.row_stride, left,
                                                                  nullptr,   false,          true}
                   .write(*this, target, norm);
    scales.v = TileRows<Bc, Config::head_dim_v, Config::padded_dim_v>{rows(p.v), p.v.row_stride,
                                                                      left, nullptr}
                   .write(*this, target + Tile::second_offset, scales.v_norm);
#pragma unroll
    for (int i = 0; i < words; ++i) {
      scales.infinite[i] = shared.infinite[i];
      scales.has_infinite |= scales.infinite[i] != 0;
    }
    if (threadIdx.x == 0) *reinterpret_cast<KeyScales*>(target + Tile::scales_offset) = scales;
  }
};

template <class Config>
__device__ void preswizzle_tiles(const GradientParams& p) {
  using Preswizzler = TilePreswizzler<Config>;
  __shared__ typename Preswizzler::Shared shared;
  const int query_tiles = GradientTiling<false>(p).template blocks<Config, Config::Br>(p.batch);
  const int block = blockIdx.x;
  if (block < query_tiles) {
    Preswizzler{shared}.write_query_tile(p, block);
  } else {
    Preswizzler{shared}.write_kv_tile(p, block - query_tiles);
  }
}

#endif  // __CUDA_ARCH__ >= 800
