// Products between a warp's keys and query tiles in the `mma` gradient kernel, and conversion of
// P^T and dS^T to operands of this warp's and other warps' products.
#pragma once

#include "backward/mma/cta.cuh"
#include "ptx/barrier.cuh"
#include "tile/access.cuh"
#include "tile/fragments.cuh"
#include "tile/products_16bit.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MmaGradientProducts : MmaCta<Config> {
  using Base = MmaCta<Config>;
  using Base::components, Base::has_components, Base::wants_ds, Base::Br, Base::warp_keys,
      Base::row_tiles, Base::columns, Base::shares_operands;
  using Base::steps, Base::dq_column_warps, Base::dq_row_tiles, Base::dim, Base::dim_v;
  using Base::refines_p, Base::units_per_operand, Base::units_offset, Base::memory, Base::shared,
      Base::warp;
  using Base::lane, Base::key_warp, Base::query_warp, Base::keys_address, Base::values_address,
      Base::ds_address;
  using Base::p_address, Base::queries_address, Base::dout_address;
  using typename Base::Element;
  using typename Base::Component;
  using typename Base::Scores;
  using typename Base::Layout;
  using typename Base::LayoutV;
  using typename Base::Pairs;
  using typename Base::Stats;
  using typename Base::Preswizzled;

  using Base::Base;

  // P^T or dS^T of the warp's keys and of `operand_columns` queries, as a left operand.
  using Left = LeftStep<row_tiles>[steps][components];

  // Converts P^T or dS^T to a left operand. If `Exchanges`, also writes it to `target` for others.
  template <bool Exchanges>
  __device__ void make_operand(Left& left, const Scores& of, unsigned target, int first) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if constexpr (has_components) {
        split_step(left[step][0], left[step][1], of, step);
      } else {
        pack_step<Element>(left[step][0], of, step);
      }
      if constexpr (Exchanges) {
#pragma unroll
        for (int component = 0; component < components; ++component) {
          Pairs::write(target, left[step][component], key_warp() * warp_keys,
                       (component * Br + first) / 16 + step);
        }
      }
    }
  }

  // Writes P^T or dS^T of eight queries to `target`, as half of a left operand, if `Exchanges`.
  template <bool Exchanges>
  __device__ void write_half_operand(const Scores& of, unsigned target, int first) {
    if constexpr (Exchanges) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        unsigned words[components][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* values = of[i][0] + 2 * half;
          if constexpr (has_components) {
            const SplitPair pair = SplitPair::split(values[0], values[1]);
            words[0][half] = pair.big;
            words[1][half] = pair.small;
          } else {
            words[0][half] = pack<Element>(values[0], values[1]);
          }
        }
#pragma unroll
        for (int component = 0; component < components; ++component) {
          Pairs::write_chunk(target, words[component][0], words[component][1],
                             key_warp() * warp_keys + 16 * i, (component * Br + first) / 8);
        }
      }
    }
  }

  // Reads a left operand from shared memory, for the queries from `first` on.
  __device__ void read(Left& left, unsigned source, int first) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int component = 0; component < components; ++component) {
        Pairs::read(left[step][component], source, key_warp() * warp_keys,
                    (component * Br + first) / 16 + step);
      }
    }
  }

  // Accumulates sums += factor * (left right). The factor is for float32; 16-bit inputs ignore it.
  template <class Slice, class RightLayout, class Sums>
  __device__ void add_product(Sums& sums, const Left& left, unsigned right_rows, float factor) {
    const unsigned right = Slice::lane_address(right_rows, query_warp());
    if constexpr (has_components) {
      Slice::add_product(sums, left, right, [&](int) { return factor; });
    } else {
      Slice::template multiply<steps>(
          sums,
          [&](LeftStep<row_tiles>& operand, int step) {
#pragma unroll
            for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
              for (int r = 0; r < 4; ++r) operand[i][r] = left[step][0][i][r];
            }
          },
          right);
    }
  }

  // Like `add_product()`, for a 16-bit left operand that other warps have written to `source`, of
  // the queries from `first` on.
  template <class Slice, class Sums>
  __device__ void add_shared_product(Sums& sums, unsigned source, int first, unsigned right_rows) {
    Slice::template multiply<steps>(
        sums,
        [&](LeftStep<row_tiles>& operand, int step) {
          Pairs::read(operand, source, key_warp() * warp_keys, first / 16 + step);
        },
        Slice::lane_address(right_rows, query_warp()));
  }

  // Does nothing between the steps of a product.
  struct Nothing {
    __device__ void operator()(int) const {}
  };

  template <int Columns>
  __device__ void multiply_keys_queries(float (&scores)[row_tiles][Columns / 8][4],
                                        unsigned query_rows) {
    multiply_rows<Layout, dim>(scores, keys_address(), query_rows, Nothing());
  }
  template <int Columns, class AfterStep = Nothing>
  __device__ void multiply_values_douts(float (&gradients)[row_tiles][Columns / 8][4],
                                        unsigned dout_rows, AfterStep after_step = {}) {
    multiply_rows<LayoutV, dim_v>(gradients, values_address(), dout_rows, after_step);
  }

  // Accumulates sums += left right^T, where the left rows are the warp's keys. Calls
  // `after_step(i)` after the i-th step of 16 columns, for 16-bit inputs only.
  template <class TileLayout, int Dim, int column_tiles, class AfterStep>
  __device__ void multiply_rows(float (&sums)[row_tiles][column_tiles][4], unsigned left_rows,
                                unsigned right_rows, AfterStep after_step) {
    const unsigned left = left_rows + key_warp() * warp_keys * TileLayout::row_bytes;
    if constexpr (has_components) {
      ::multiply_rows<TileLayout, Dim>(sums, left, right_rows);
    } else {
      multiply_prefetched<TileLayout, Dim>(sums, left, right_rows, after_step);
    }
  }

  // Implements `multiply_rows()` for 16-bit inputs. The operands of a step are read from shared
  // memory during the products of the previous step.
  template <class TileLayout, int Dim, int column_tiles, class AfterStep>
  __device__ void multiply_prefetched(float (&sums)[row_tiles][column_tiles][4],
                                      unsigned left_rows, unsigned right_rows,
                                      AfterStep after_step) {
    constexpr int pairs = column_tiles / 2;
    constexpr int k_steps = Dim / 16;
    const unsigned left_lane = left_rows + TileLayout::offset(lane % 16, lane / 16);
    const unsigned right_lane =
        right_rows + TileLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    unsigned left[2][row_tiles][4], right[2][pairs][4];
    const auto read_step = [&](int step) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        ptx::ldmatrix_x4(left[step % 2][i], TileLayout::advance(left_lane, 16 * i, 2 * step));
      }
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        ptx::ldmatrix_x4(right[step % 2][pair],
                         TileLayout::advance(right_lane, 16 * pair, 2 * step));
      }
    };
    read_step(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      if (step + 1 < k_steps) read_step(step + 1);
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        const unsigned (&b)[4] = right[step % 2][pair];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
          mma<Element>(sums[i][2 * pair], left[step % 2][i], b[0], b[1]);
          mma<Element>(sums[i][2 * pair + 1], left[step % 2][i], b[2], b[3]);
        }
      }
      after_step(step);
    }
  }

  // Computes S and dP by a pair of warps. Each warp passes half of its result to the other, through
  // the space in which the other warp later writes its P^T and dS^T.
  // `after_product()` is called after the warp's product.
  template <class AfterProduct>
  __device__ void multiply_paired(Scores& scores, Scores& gradients, int stage, int first,
                                  AfterProduct after_product) {
    // Whether the warp computes S and keeps the first half of the pair's queries. The other warp
    // computes dP and keeps the second half.
    const bool has_scores = query_warp() % 2 == 0;
    const int first_of_pair = has_scores ? first : first - columns;
    float both[row_tiles][2 * columns / 8][4];
    clear(both);
    if (has_scores) {
      multiply_keys_queries<2 * columns>(
          both, queries_address(stage) + first_of_pair * Layout::row_bytes);
      store_half(both, columns / 8, first_of_pair + columns);
    } else {
      if constexpr (wants_ds) {
        multiply_values_douts<2 * columns>(
            both, dout_address(stage) + first_of_pair * LayoutV::row_bytes);
      }
      store_half(both, 0, first_of_pair);
    }
    after_product();
    wait_for_pair();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
        unsigned received[4];
        ptx::ld_shared_v4(received, exchange_address(i, j, first));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float other = __uint_as_float(received[c]);
          scores[i][j][c] = has_scores ? both[i][j][c] : other;
          gradients[i][j][c] = has_scores ? other : both[i][j + columns / 8][c];
        }
      }
    }
    // Wait until all lanes have read their half: they will write P^T and dS^T there.
    __syncwarp();
  }

  // Waits until both warps of the pair have arrived.
  __device__ void wait_for_pair() const { ptx::barrier_sync_aligned(1 + warp / 2, 64); }

  __device__ void store_half(const float (&both)[row_tiles][2 * columns / 8][4], int begin,
                             int first) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
        unsigned words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) words[c] = __float_as_uint(both[i][begin + j][c]);
        ptx::st_shared_v4(exchange_address(i, j, first), words);
      }
    }
  }

  // Returns the address of an exchanged fragment of the queries from `first` on. Half of the lanes
  // use the space of P^T, the others that of dS^T.
  __device__ unsigned exchange_address(int i, int j, int first) const {
    const int key = key_warp() * warp_keys + 16 * i + lane % 16;
    return (lane < 16 ? p_address() : ds_address()) + Pairs::Layout::offset(key, first / 8 + j);
  }

  // Units for float32. P is in units of 2^-14, so that it stays below 2^15 even if lse is rounded
  // down. The unit of dS follows from a bound of P (|dP| + |delta|): the largest row norm of dout
  // times that of v, plus the largest |delta|. So warps need not search for a maximum before they
  // split P and dS. Second units refine these units if the bounds may be far too large.
  struct Units {
    float score;             // unit of S
    float gradient;          // (unit of dP) * (unit of P) / (unit of dS)
    float delta;             // (unit of P) / (unit of dS)
    float dq_unit, dk_unit, dv_unit;  // units of contributions to dq, dk and dv
    static constexpr float p_log2 = 14;
    static constexpr float p_unit = 0x1p-14f;

    __device__ Stats scale(const Stats& stats) const {
      if constexpr (!has_components) return stats;
      return {stats.lse_log2 - p_log2, stats.delta * delta};
    }
  };
  __device__ Units units(int stage) const {
    if constexpr (!has_components) return {};
    const auto& queries = *reinterpret_cast<const QueryScales*>(
        memory + (queries_address(ptx::opaque(stage)) - shared) +
        Preswizzled::QueryTile::scales_offset);
    const auto& keys =
        *reinterpret_cast<const KeyScales*>(memory + Preswizzled::KvTile::scales_offset);
    const Unit ds = Unit::for_largest(fma(queries.dout_norm, keys.v_norm, queries.delta));
    const float inverse = ds.inverse * Units::p_unit;
    Units units;
    units.score = queries.q * keys.k;
    units.gradient = keys.v * inverse * queries.dout;
    units.delta = inverse;
    units.dq_unit = ds.size * keys.k;
    units.dk_unit = ds.size * queries.q;
    units.dv_unit = queries.dout * Units::p_unit;
    return units;
  }

  // Returns the factors of the query rows in `stage`. Rows of dout, and hence of dS, have been
  // multiplied by the inverses of these factors.
  __device__ const RowFactors& factors(int stage) const {
    return reinterpret_cast<const QueryScales*>(memory +
                                                (queries_address(ptx::opaque(stage)) - shared) +
                                                Preswizzled::QueryTile::scales_offset)
        ->factors;
  }

  // Multiplies `left`, dS^T of the queries from `first` on, by the factors of these queries.
  __device__ void apply_to_left(Left& left, int stage, int first) const {
    const RowFactors& row_factors = factors(stage);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const unsigned two = row_factors.factor_pair(first + 16 * step + r / 2 * 8 + lane % 4 * 2);
#pragma unroll
        for (int component = 0; component < components; ++component) {
#pragma unroll
          for (int i = 0; i < row_tiles; ++i) {
            left[step][component][i][r] = ptx::mul_f16x2(left[step][component][i][r], two);
          }
        }
      }
    }
  }

  // Second units, one for each key warp and `columns` queries. First index for P, and for dS:
  static constexpr int p_units_begin = 0;
  static constexpr int ds_units_begin = refines_p ? units_per_operand : 0;
  __device__ float& stored_unit(int begin, int key_warp, int first) {
    return reinterpret_cast<float*>(
        memory + units_offset)[begin + key_warp * (Br / columns) + first / columns];
  }

  // Returns the second unit of a left operand of the queries from `first` on. If two warps compute
  // the operand, the larger one of their stored units applies.
  __device__ float second_unit(int begin, int key_warp, int first) {
    const float& unit = stored_unit(begin, key_warp, first);
    return shares_operands ? fmaxf(unit, (&unit)[1]) : unit;
  }

  // Divides `scores` (P or dS) by a second unit chosen from its maximum, and returns that unit. If
  // `stores`, also stores the unit for other warps. Without `Refines`, only returns 1. If a pair of
  // warps computes an operand, both choose the same unit.
  template <bool Refines>
  __device__ float choose_unit(Scores& scores, int begin, bool stores, int first) {
    if constexpr (!Refines) return 1;
    float top = 0;
    for_each(scores, [&](float& x) {
      const float size = fabsf(x);
      if (size < SoftmaxMath<float>::infinity()) top = fmaxf(top, size);
    });
    Unit unit = Unit::for_largest(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top))));
    if constexpr (shares_operands) {
      if (lane == 0) stored_unit(begin, key_warp(), first) = unit.size;
      wait_for_pair();
      unit = Unit::of_size(second_unit(begin, key_warp(), first / 16 * 16));
    }
    for_each(scores, [&](float& x) { x *= unit.inverse; });
    if (!shares_operands && stores && lane == 0) {
      stored_unit(begin, key_warp(), first) = unit.size;
    }
    return unit.size;
  }

  template <class Function>
  __device__ static void for_each(Scores& scores, Function function) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) function(scores[i][j][c]);
      }
    }
  }

  __device__ static void scale(Scores& scores, Scores& gradients, const Units& unit) {
    if (Config::Mods::changes_scores) for_each(scores, [&](float& x) { x *= unit.score; });
    for_each(gradients, [&](float& x) { x *= unit.gradient; });
  }

  // Reads dS as a left operand: the warp's rows of dq, and the 16 keys from `key` on.
  __device__ void read_ds(LeftStep<dq_row_tiles> (&left)[components], int key) {
#pragma unroll
    for (int component = 0; component < components; ++component) {
      Pairs::read_transposed(left[component], ds_address(), key,
                             component * Br / 16 + first_dq_tile());
    }
  }

  // Returns the first of the warp's 16-row tiles of dq.
  __device__ int first_dq_tile() const { return warp / dq_column_warps * dq_row_tiles; }
};

#endif  // __CUDA_ARCH__ >= 800
