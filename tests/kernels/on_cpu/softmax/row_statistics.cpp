// Prints the statistics of rows of scores, computed as the kernels do: an online softmax iterates
// over the KV tiles of each KV split, and the splits are merged. Standard input has one line for
// each row: the number of scores, the number of scores in a KV tile, the number of splits, whether
// there is a sink, the sink, and the scores in natural units. The output has the largest score and
// the entropy of each row.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "cuda_on_cpu.h"

inline double __longlong_as_double(long long bits) {
  double result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline float __int_as_float(int bits) {
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline unsigned __float_as_uint(float x) { return __float_as_int(x); }
inline float __uint_as_float(unsigned bits) { return __int_as_float(bits); }
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fmul_rn(float x, float y) { return x * y; }
using std::fma;
using std::fmax;
using std::fmin;

#include "score/softmax.cuh"

using Math = SoftmaxMath<double>;
using Row = SoftmaxRow<double, RowStatistics<double, true, true>>;
// Sums of p are in units of 2^-headroom, as for dtypes with headroom.
constexpr int units = 16;

Row attend(const double* scores, int count, int tile) {
  Row row;
  row.reset();
  for (int first = 0; first < count; first += tile) {
    const int end = std::min(count, first + tile);
    double tile_max = -Math::infinity();
    for (int j = first; j < end; ++j) tile_max = fmax(tile_max, scores[j]);
    row.include_score(tile_max);
    row.update_max(tile_max, Math::log2_e);
    const double base = row.base(Math::log2_e);
    for (int j = first; j < end; ++j) {
      const double exponent = Row::exponent(scores[j], Math::log2_e, base);
      const double p = Math::exp2(exponent) * power_of_half(units);
      row.sum += p;
      row.include_exponent(p, exponent);
    }
  }
  return row;
}

int main() {
  int count, tile, splits, has_sink;
  double sink;
  while (std::scanf("%d %d %d %d %lf", &count, &tile, &splits, &has_sink, &sink) == 5) {
    std::vector<double> scores(count);
    for (double& score : scores) {
      if (std::scanf("%lf", &score) != 1) return 1;
    }
    std::vector<Row> rows;
    double lse = has_sink ? sink : -Math::infinity();
    for (int s = 0; s < splits; ++s) {
      const int first = count * s / splits;
      rows.push_back(attend(scores.data() + first, count * (s + 1) / splits - first, tile));
      const double own = rows.back().log_sum_exp<units>(Math::log2_e);
      const double most = fmax(lse, own);
      if (most == -Math::infinity()) continue;
      lse = most + std::log(std::exp(lse - most) + std::exp(own - most));
    }
    RowSummary<double> summary;
    if (splits == 1) {
      summary = rows[0].summary<units>(1.0);
      const double own = rows[0].log_sum_exp<units>(Math::log2_e);
      summary.scale_weights(own == -Math::infinity() ? 0 : std::exp(own - lse));
    } else {
      for (const Row& row : rows) {
        const double own = row.log_sum_exp<units>(Math::log2_e);
        const double weight = own == -Math::infinity() ? 0 : std::exp(own - lse);
        summary.add_split(weight, row.summary<units>(1.0));
      }
    }
    std::printf("%.17g %.17g\n", summary.max_logit, summary.entropy);
  }
}
