// The query rows of a thread: scores, probabilities and output, and the two matrix products.
//
// A thread owns rows_per_thread query rows. The row_threads lanes of its warp that own the same
// rows each compute S for a part of the keys of a KV tile, and O for a part of the columns. Both
// products are outer products in registers:
//   S[rows][keys]    = Q K^T, operands read as 128-bit vectors along head_dim;
//   O[rows][columns] += P V,  P read along the keys, V along head_dim_v.
// With r rows and c keys or columns per thread, a step of w elements (16 bytes) reads r + c vectors
// and does w r c multiply-adds. Per cycle, an SM does 128 float FMAs (64 double) and one wavefront
// of 128 bytes of shared memory. A 128-bit read of a warp takes at least two wavefronts. In float,
// a warp's step with r x c = 8 x 8 takes 32 wavefronts and 64 cycles of FMA, 8 x 4 takes 24 and 32,
// and 4 x 4 takes 16 and 16. So 8 x 8 leaves shared memory half idle, and 16 of the 272
// instructions of a step are loads.
#pragma once

#include "forward/simt/layout.cuh"
#include "params.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"

namespace simt {

// The rows that a thread owns. Row i is first() + i * warp_rows of the query tile.
template <class Config>
struct Rows {
  using L = Layout<Config>;
  using T = typename L::T;
  using Vec = typename L::Vec;
  using KeyMask = Mask<Config, Config::group>;
  // Whether modifications mask keys but change no scores. Then the largest p of a row must be
  // exactly 1, so that the output of a row that attends to one key is the value of that key.
  // Changed scores are exponents already, so that their largest p is 1 anyway. Without
  // modifications, fix_rows() sets such rows to the value.
  static constexpr bool only_masks = Config::modified && !Config::Mods::changes_scores;

  T scores[L::rows][L::keys];      // key j is position() + j * row_threads
  T out[L::rows][L::columns];      // vector j is at column (position() + j * row_threads) * width
  // The row sums include only this thread's keys until finish().
  SoftmaxRow<T, StatisticsOf<Config, T>> softmax[L::rows];

  __device__ static int first() {
    return threadIdx.x / 32 * (L::warp_rows * L::rows) + L::row_in_warp();
  }

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      softmax[i].reset();
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] = 0;
    }
  }

  __device__ void multiply_keys(const T* q, const T* k) {
    clear(scores);
    q += first() * L::qk_stride;
    k += L::position() * L::qk_stride;
    constexpr int dim = round_up(Config::head_dim, L::width);
    if constexpr (dim <= max_single_sum) {
      add_products<dim>(q, k, scores);
    } else {
      constexpr int rest = dim % slice_columns;
#pragma unroll 1
      for (int d = 0; d < dim - rest; d += slice_columns) add_slice<slice_columns>(q + d, k + d);
      if constexpr (rest > 0) add_slice<rest>(q + dim - rest, k + dim - rest);
    }
    if constexpr (prior_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < L::rows; ++i) {
#pragma unroll
        for (int j = 0; j < L::keys; ++j) scores[i][j] *= prior_factor<Config>;
      }
    }
  }

  __device__ void mask(const KeyMask& mask, int q_begin, int key_begin) {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      const int row = q_begin + first() + i * L::warp_rows;
      const int end = mask.visible_end(row) - key_begin - L::position();
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        if (j * L::row_threads >= end) scores[i][j] = -SoftmaxMath<T>::infinity();
      }
      if constexpr (Config::window_left) {
        const int begin = mask.visible_begin(row) - key_begin - L::position();
#pragma unroll
        for (int j = 0; j < L::keys; ++j) {
          if (j * L::row_threads < begin) scores[i][j] = -SoftmaxMath<T>::infinity();
        }
      }
    }
  }

  // Applies modifications. row_coord(row) returns the coordinates of a row of the query tile.
  template <class RowCoord>
  __device__ void modify(const Params& p, RowCoord row_coord, int key_begin) {
    if constexpr (Config::modified) {
      modify_rows<Config, L::rows, L::keys>(
          p, [&](int i) { return row_coord(first() + i * L::warp_rows); },
          key_begin + L::position(), [&](int i, int j) -> T& { return scores[i][j]; },
          [](int j) { return j * L::row_threads; });
    }
  }

  // Converts scores to probabilities in shared memory, and rescales the previous output and sum.
  // The sum includes the pairs for which keeps(i, j) is false, but their probabilities become 0.
  template <class Keeps>
  __device__ void exponentiate(T* p, T scale_log2, Keeps keeps) {
    p += first() * L::p_stride + L::position();
    T tile_max[L::rows];
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      tile_max[i] = scores[i][0];
#pragma unroll
      for (int j = 1; j < L::keys; ++j) tile_max[i] = fmax(tile_max[i], scores[i][j]);
    }
#pragma unroll
    for (int bit = 1; bit < L::row_threads; bit *= 2) {
#pragma unroll
      for (int i = 0; i < L::rows; ++i) tile_max[i] = fmax(tile_max[i], exchange(tile_max[i], bit));
    }
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      softmax[i].include_score(tile_max[i]);
      const T rescale = softmax[i].update_max(tile_max[i], scale_log2);
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] *= rescale;
      const T base = softmax[i].base(scale_log2);
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        // p is scaled by 2^-headroom. For p of 32 bits or more, multiplying by a power of two is
        // exact; subtracting headroom from the exponent before exp2 would round the exponent.
        const T exponent =
            SoftmaxRow<T>::template exponent<only_masks>(scores[i][j], scale_log2, base);
        const T probability = SoftmaxMath<T>::exp2(exponent) * T(power_of_half(L::headroom));
        softmax[i].sum += probability;
        softmax[i].include_exponent(probability, exponent);
        p[i * L::warp_rows * L::p_stride + j * L::row_threads] = keeps(i, j) ? probability : T(0);
      }
    }
  }

  // Computes out += P V. The product of one KV tile is summed separately, in registers of `scores`:
  // one sum over thousands of keys would have larger rounding errors than a blocked library GEMM.
  __device__ void multiply_values(const T* p, const T* v) {
    T sums[L::rows][L::columns] = {};
    p += first() * L::p_stride;
    v += L::position() * L::width;
#pragma unroll(Config::unroll)
    for (int key = 0; key < Config::Bc; key += L::width) {
      Vec p_part[L::rows];
#pragma unroll
      for (int i = 0; i < L::rows; ++i) p_part[i] = read(p + i * L::warp_rows * L::p_stride + key);
#pragma unroll
      for (int w = 0; w < L::width; ++w) {
#pragma unroll
        for (int j = 0; j < L::columns; j += L::width) {
          const Vec v_part = read(v + (key + w) * L::v_stride + j * L::row_threads);
#pragma unroll
          for (int i = 0; i < L::rows; ++i) {
#pragma unroll
            for (int x = 0; x < L::width; ++x) {
              sums[i][j + x] = fma(p_part[i].data[w], v_part.data[x], sums[i][j + x]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] += sums[i][j];
    }
  }

  // Reduces the sum of each row over its threads, and divides the output by it.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int bit = 1; bit < L::row_threads; bit *= 2) {
        softmax[i].sum += exchange(softmax[i].sum, bit);
        if constexpr (Config::entropy) softmax[i].moment += exchange(softmax[i].moment, bit);
      }
      const T normalizer = softmax[i].normalizer();
#pragma unroll
      for (int j = 0; j < L::columns; ++j) {
        // A fully masked row holds 0 times values that other rows of the tile attend to.
        out[i][j] =
            Config::modified && softmax[i].is_fully_masked() ? T(0) : out[i][j] * normalizer;
      }
    }
  }

  __device__ void scale(int i, T factor) {
#pragma unroll
    for (int j = 0; j < L::columns; ++j) out[i][j] *= factor;
  }

  // Writes this thread's columns of output row i, `Unit` at a time.
  template <int Unit, class Out>
  __device__ void store(Out* row, int i) const {
#pragma unroll
    for (int j = 0; j < L::columns; j += Unit) {
      const int column = (L::position() + j / L::width * L::row_threads) * L::width + j % L::width;
      if (column + Unit <= Config::head_dim_v) {
        Vector<Out, Unit> vector;
#pragma unroll
        for (int x = 0; x < Unit; ++x) vector.data[x] = narrow<Out>(out[i][j + x]);
        *reinterpret_cast<Vector<Out, Unit>*>(row + column) = vector;
      } else if (Config::head_dim_v % Unit != 0) {
#pragma unroll
        for (int x = 0; x < Unit; ++x) {
          if (column + x < Config::head_dim_v) row[column + x] = narrow<Out>(out[i][j + x]);
        }
      }
    }
  }

 private:
  // The error of a running sum of n products is about n / sqrt(2) times the rounding error of one
  // product. With sums over blocks of m products, it is sqrt(n (m + n / m) / 2) times that error:
  // for 512 columns and m = 64, 136 times instead of 362. A blocked library GEMM is closer to 136.
  static constexpr int max_single_sum = 256;
  static constexpr int slice_columns = 64;

  using Scores = T[L::rows][L::keys];

  __device__ static void clear(Scores& sums) {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::keys; ++j) sums[i][j] = 0;
    }
  }

  // Adds the products of the first `Dim` columns of q and k to `sums`.
  template <int Dim>
  __device__ static void add_products(const T* q, const T* k, Scores& sums) {
#pragma unroll(Config::unroll)
    for (int d = 0; d < Dim; d += L::width) {
      Vec q_part[L::rows];
#pragma unroll
      for (int i = 0; i < L::rows; ++i) q_part[i] = read(q + i * L::warp_rows * L::qk_stride + d);
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        const Vec k_part = read(k + j * L::row_threads * L::qk_stride + d);
#pragma unroll
        for (int w = 0; w < L::width; ++w) {
#pragma unroll
          for (int i = 0; i < L::rows; ++i) {
            sums[i][j] = fma(q_part[i].data[w], k_part.data[w], sums[i][j]);
          }
        }
      }
    }
  }

  template <int Dim>
  __device__ void add_slice(const T* q, const T* k) {
    Scores sums;
    clear(sums);
    add_products<Dim>(q, k, sums);
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::keys; ++j) scores[i][j] += sums[i][j];
    }
  }

  __device__ static Vec read(const T* shared) { return *reinterpret_cast<const Vec*>(shared); }

  // Returns the value of the lane whose position in the row differs in `bit`.
  __device__ static T exchange(T value, int bit) {
    return __shfl_xor_sync(0xffffffffu, value, bit << L::position_shift);
  }
};

}  // namespace simt
