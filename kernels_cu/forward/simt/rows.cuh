// The query rows of a thread: scores, probabilities and output, and the products that make them.
//
// A thread owns rows_per_thread query rows; the row_threads lanes of its warp that own the same
// rows divide the tile's keys among them for S, and the columns for O. Both products are outer
// products in registers:
//   S[rows][keys]    = Q K^T, operands read as 128-bit vectors along head_dim;
//   O[rows][columns] += P V,  P read along the keys, V along head_dim_v.
// With r rows and c columns a step of w elements (16 bytes) reads r + c vectors and does w r c
// multiply-adds. An SM does 128 float FMAs (64 double) and reads 128 bytes of shared memory, one
// wavefront, per cycle; a warp's 128-bit read takes at least two wavefronts. For float at 8 x 8
// that is 32 wavefronts under 64 cycles of FMA, at 8 x 4 24 under 32, at 4 x 4 16 under 16: 8 x 8
// leaves the shared memory half idle and spends 16 of 272 issue slots on loads.
#pragma once

#include "forward/simt/layout.cuh"
#include "params.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"

namespace simt {

// The rows that a thread owns: row i is at warp's first row + row_in_warp + i * warp_rows.
template <class Config>
struct Rows {
  using L = Layout<Config>;
  using T = typename L::T;
  using Vec = typename L::Vec;
  using KeyMask = Mask<Config, Config::group>;
  // Whether modifications only hide keys: then p of the largest score has to be made exactly 1.
  // Changed scores are exponents already, whose p is 1, and without modifications rows that attend
  // to one key are set to its value at the end.
  static constexpr bool hides_only = Config::modified && !Config::Mods::changes_scores;

  T scores[L::rows][L::keys];      // key j is at position + j * row_threads
  T out[L::rows][L::columns];      // vector j is at (position + j * row_threads) * width
  SoftmaxRow<T> softmax[L::rows];  // its sum is of this thread's keys only, until finish()

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
    if constexpr (dim <= most_in_one_sum) {
      add_products<dim>(q, k, scores);
    } else {
      constexpr int rest = dim % wide_piece;
#pragma unroll 1
      for (int d = 0; d < dim - rest; d += wide_piece) add_piece<wide_piece>(q + d, k + d);
      if constexpr (rest > 0) add_piece<rest>(q + dim - rest, k + dim - rest);
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

  // at(row) is a row of the tile as modifications know it.
  template <class At>
  __device__ void modify(const Params& p, At at, int key_begin) {
    if constexpr (Config::modified) {
      modify_rows<Config, L::rows, L::keys>(
          p, [&](int i) { return at(first() + i * L::warp_rows); }, key_begin + L::position(),
          [&](int i, int j) -> T& { return scores[i][j]; },
          [](int j) { return j * L::row_threads; });
    }
  }

  // Turns scores into probabilities in shared memory, and rescales what came before.
  __device__ void exponentiate(T* p, T scale_log2) {
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
      const T rescale = softmax[i].update_max(tile_max[i], scale_log2);
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] *= rescale;
      const T base = softmax[i].base(scale_log2);
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        // Of 32 bits and more, a power of two costs no precision where the sum of the exponents
        // would.
        const T probability = SoftmaxRow<T>::template probability<hides_only>(
                                  scores[i][j], scale_log2, base) *
                              T(power_of_half(L::headroom));
        softmax[i].sum += probability;
        p[i * L::warp_rows * L::p_stride + j * L::row_threads] = probability;
      }
    }
  }

  // out += P V. The tile's share is summed alone, in the registers that the scores have left: a sum
  // over thousands of keys in one go would lose more to rounding than a library's blocked product.
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
              sums[i][j + x] = fma(p_part[i].at[w], v_part.at[x], sums[i][j + x]);
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

  // Sums over the threads of each row and divides by it: the normalization, put off until here.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int bit = 1; bit < L::row_threads; bit *= 2) {
        softmax[i].sum += exchange(softmax[i].sum, bit);
      }
      const T normalizer = softmax[i].normalizer();
#pragma unroll
      for (int j = 0; j < L::columns; ++j) {
        // A row without a key holds 0 times the values that others of its tile see.
        out[i][j] = Config::modified && softmax[i].saw_nothing() ? T(0) : out[i][j] * normalizer;
      }
    }
  }

  __device__ void scale(int i, T factor) {
#pragma unroll
    for (int j = 0; j < L::columns; ++j) out[i][j] *= factor;
  }

  // Row i's columns of the result, Unit at a time.
  template <int Unit, class Out>
  __device__ void store(Out* row, int i) const {
#pragma unroll
    for (int j = 0; j < L::columns; j += Unit) {
      const int column = (L::position() + j / L::width * L::row_threads) * L::width + j % L::width;
      if (column + Unit <= Config::head_dim_v) {
        Vector<Out, Unit> vector;
#pragma unroll
        for (int x = 0; x < Unit; ++x) vector.at[x] = narrow<Out>(out[i][j + x]);
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
  // A sum of n products in one go is off by about n / sqrt(2) roundings of one of them, in pieces of
  // m by sqrt(n (m + n / m) / 2): of 512 columns 362, or 136. A library's blocked product is nearer
  // to the latter.
  static constexpr int most_in_one_sum = 256;
  static constexpr int wide_piece = 64;

  using Scores = T[L::rows][L::keys];

  __device__ static void clear(Scores& sums) {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::keys; ++j) sums[i][j] = 0;
    }
  }

  // Of the first Dim columns from q and k on.
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
            sums[i][j] = fma(q_part[i].at[w], k_part.at[w], sums[i][j]);
          }
        }
      }
    }
  }

  template <int Dim>
  __device__ void add_piece(const T* q, const T* k) {
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

  // The value of the thread whose position in the row differs in one bit.
  __device__ static T exchange(T value, int bit) {
    return __shfl_xor_sync(0xffffffffu, value, bit << L::position_shift);
  }
};

}  // namespace simt
