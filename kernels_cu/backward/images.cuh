// Tiles of float32 inputs in pieces (pieces.cuh), in the workspace as shared memory will hold them:
// a thread block of the main kernel copies a tile as so many bytes, wherever the rows came from.
//
// An image of queries is the tile's rows of q, of dout, its row terms and its scales; one of keys
// its rows of k, of v and its scales. Rows behind a sequence's last are zeros.
#pragma once

#include "backward/params.cuh"
#include "backward/pieces.cuh"
#include "backward/query_sums.cuh"
#include "backward/work.cuh"
#include "grid/schedule.cuh"
#include "tile/access.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ >= 800

// Powers of two that pieces are in units of, and what bounds gradients of scores: a product dp is
// at most that of the rows' norms.
struct QueryScales {
  float q;
  float dout;
  float dout_norm;
  float delta;  // the largest without its sign
};
struct KeyScales {
  float k;
  float v;
  float v_norm;
};

// How images of tiles lie: Rows x (Dim + DimV) pieces, and so many bytes of terms for each row.
template <int Rows, int Dim, int DimV, int TermBytes>
struct TileImage {
  using Layout = SwizzledRows<half_t, 2 * Dim>;
  using LayoutV = SwizzledRows<half_t, 2 * DimV>;
  static constexpr int second_at = Rows * Layout::row_bytes;
  static constexpr int terms_at = second_at + Rows * LayoutV::row_bytes;
  static constexpr int scales_at = terms_at + Rows * TermBytes;
  static constexpr int bytes = scales_at + 128;  // the next begins as swizzles have it
};

// Both kinds, of a Config with Br, Bc, padded_dim and padded_dim_v.
template <class Config>
struct TileImages {
  using Terms = RowTerms<float>;
  using OfQueries =
      TileImage<Config::Br, Config::padded_dim, Config::padded_dim_v, int(sizeof(Terms))>;
  using OfKeys = TileImage<Config::Bc, Config::padded_dim, Config::padded_dim_v, 0>;
  static constexpr int64 sums_of_tile =
      Config::wants_q ? int64(Config::Br) * Config::padded_dim : 0;

  // Behind the sums in the workspace, where others may lie once they were read. They have the places
  // of sums of dq, and tiles of keys their own likewise.
  __device__ static char* of_queries(const GradientParams& p, const Sequence& at, int batch,
                                     int head, int tile) {
    const QuerySums<Config> sums(p);
    return begin(p, sums) + int64(sums.place(p, at, batch, head, tile)) * OfQueries::bytes;
  }
  __device__ static char* of_keys(const GradientParams& p, const Sequence& at, int batch, int head,
                                  int tile) {
    const QuerySums<Config> sums(p);
    int64 place = (int64(batch) * p.heads_kv + head) * ceil_div(p.seqlen_k, Config::Bc) + tile;
    if (Config::sequences && p.cu_seqlens_k != nullptr) {
      place = int64(head) * count_places<Config::Bc>(p.total_k, p.batch) +
              first_place<Config::Bc>(at.k_first, batch) + tile;
    }
    return begin(p, sums) + sums.count * int64(OfQueries::bytes) + place * OfKeys::bytes;
  }

 private:
  __device__ static char* begin(const GradientParams& p, const QuerySums<Config>& sums) {
    return reinterpret_cast<char*>(sums.first_sums() + sums.count * sums_of_tile);
  }
};

// What a thread block does that makes images.
template <class Config>
struct ImageMaker {
  using Images = TileImages<Config>;
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  struct Shared {
    float of_warps[warps];
  };

  Shared& shared;

  // Of the whole block; NaN stands for no number.
  __device__ float largest(float x) const {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared.of_warps[0];
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) x = fmaxf(x, shared.of_warps[warp]);
    return x;
  }

  // Rows x Dim numbers, of which rows from `left` on are not there, become pieces at `image`.
  template <int Rows, int Dim, int Padded>
  struct Part {
    using Layout = SwizzledRows<half_t, 2 * Padded>;
    static constexpr int chunks = Padded / 8;
    static constexpr int lanes = chunks % 32 == 0   ? 32
                                 : chunks % 16 == 0 ? 16
                                 : chunks % 8 == 0  ? 8
                                 : chunks % 4 == 0  ? 4
                                                    : 2;  // that share a row
    static constexpr int rounds = chunks / lanes;
    static constexpr int rows_at_once = threads / lanes;

    const float* rows;
    int64 stride;
    int left;

    // Eight columns of a row, and zeros behind the last one.
    __device__ auto read(int row, int chunk) const {
      const int inside = row < left ? max(0, min(8, Dim - 8 * chunk)) : 0;
      return load_elements<8, Config::alignment>(rows + row * stride + 8 * chunk, inside);
    }

    // All lanes call visit(row, chunk of the row), and behind the last chunk end(row).
    template <class Visit, class End>
    __device__ static void for_each(Visit visit, End end) {
#pragma unroll 1
      for (int first = 0; first < Rows; first += rows_at_once) {
        const int row = first + threadIdx.x / lanes;
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
          visit(row, round * lanes + threadIdx.x % lanes);
        }
        end(row);
      }
    }

    // What is no number makes no unit of others' infinite.
    __device__ static float finite(float x) { return fminf(fabsf(x), 0x1p15f); }

    // Gives the pieces' unit, and `norm` the largest of a row's.
    __device__ float write(const ImageMaker& maker, char* image, float& norm) const {
      float top = 0;
      for_each(
          [&](int row, int chunk) {
            const auto x = read(row, chunk);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float size = fabsf(x.at[e]);
              if (size < SoftmaxMath<float>::infinity()) top = fmaxf(top, size);
            }
          },
          [](int) {});
      const Unit unit = Unit::of(maker.largest(top));
      float squares = 0, most = 0;
      for_each(
          [&](int row, int chunk) {
            const auto x = read(row, chunk);
            Vector<unsigned, 4> big, small;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float low = x.at[2 * e] * unit.inverse, high = x.at[2 * e + 1] * unit.inverse;
              squares = fma(finite(low), finite(low), fma(finite(high), finite(high), squares));
              const SplitPair pair = SplitPair::of(low, high);
              big.at[e] = pair.big;
              small.at[e] = pair.small;
            }
            if (row >= Rows) return;
            *reinterpret_cast<Vector<unsigned, 4>*>(image + Layout::offset(row, chunk)) = big;
            *reinterpret_cast<Vector<unsigned, 4>*>(image + Layout::offset(row, chunks + chunk)) =
                small;
          },
          [&](int) {
#pragma unroll
            for (int bit = 1; bit < lanes; bit *= 2) {
              squares += __shfl_xor_sync(~0u, squares, bit);
            }
            most = fmaxf(most, squares);
            squares = 0;
          });
      norm = sqrtf(maker.largest(most)) * unit.size;
      return unit.size;
    }
  };

  __device__ void of_queries(const GradientParams& p, int block) const {
    constexpr int Br = Config::Br;
    const GradientWork work = find_gradient_work<Config, Br, false, false>(p, block);
    const Sequence at = sequence_of<Config>(p, work.batch);
    if (work.begin >= at.seqlen_q) return;
    using Image = typename Images::OfQueries;
    char* image = Images::of_queries(p, at, work.batch, work.head, work.begin / Br);
    const int left = at.seqlen_q - work.begin;
    const int64 first_row = at.q_first + int64(work.begin);
    const auto rows = [&](const Tensor& tensor) {
      return tensor.head<const float>(at.q_batch, work.head) + first_row * tensor.row_stride;
    };
    QueryScales scales = {};
    float norm;
    scales.q = Part<Br, Config::head_dim, Config::padded_dim>{rows(p.q), p.q.row_stride, left}
                   .write(*this, image, norm);
    scales.dout =
        Part<Br, Config::head_dim_v, Config::padded_dim_v>{rows(p.dout), p.dout.row_stride, left}
            .write(*this, image + Image::second_at, scales.dout_norm);
    const auto* terms = row_terms<Config>(p) + first_row_of_head(p, at, work.head) + work.begin;
    auto* of_image = reinterpret_cast<typename Images::Terms*>(image + Image::terms_at);
    float delta = 0;
    for (int row = threadIdx.x; row < Br; row += threads) {
      of_image[row] = row < left ? terms[row] : typename Images::Terms{};
      const float size = fabsf(of_image[row].delta);
      if (size < SoftmaxMath<float>::infinity()) delta = fmaxf(delta, size);
    }
    scales.delta = largest(delta);
    if (threadIdx.x == 0) *reinterpret_cast<QueryScales*>(image + Image::scales_at) = scales;
  }

  __device__ void of_keys(const GradientParams& p, int block) const {
    constexpr int Bc = Config::Bc;
    const GradientWork work = find_gradient_work<Config, Bc, true, false>(p, block);
    const Sequence at = sequence_of<Config>(p, work.batch);
    if (work.begin >= at.seqlen_k) return;
    using Image = typename Images::OfKeys;
    char* image = Images::of_keys(p, at, work.batch, work.head, work.begin / Bc);
    const int left = at.seqlen_k - work.begin;
    const int64 first_row = at.k_first + int64(work.begin);
    const auto rows = [&](const Tensor& tensor) {
      return tensor.head<const float>(at.k_batch, work.head) + first_row * tensor.row_stride;
    };
    KeyScales scales = {};
    float norm;
    scales.k = Part<Bc, Config::head_dim, Config::padded_dim>{rows(p.k), p.k.row_stride, left}
                   .write(*this, image, norm);
    scales.v = Part<Bc, Config::head_dim_v, Config::padded_dim_v>{rows(p.v), p.v.row_stride, left}
                   .write(*this, image + Image::second_at, scales.v_norm);
    if (threadIdx.x == 0) *reinterpret_cast<KeyScales*>(image + Image::scales_at) = scales;
  }
};

template <class Config>
__device__ void make_tile_images(const GradientParams& p) {
  using Maker = ImageMaker<Config>;
  __shared__ typename Maker::Shared shared;
  const int of_queries = GradientRows<false>(p).template blocks<Config::Br>(p.batch);
  const int block = blockIdx.x;
  if (block < of_queries) {
    Maker{shared}.of_queries(p, block);
  } else {
    Maker{shared}.of_keys(p, block - of_queries);
  }
}

#endif  // __CUDA_ARCH__ >= 800
