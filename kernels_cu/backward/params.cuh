// Argument struct of the gradient kernels. cupy_flash/families/params.py declares the same struct
// as a NumPy dtype and asserts at compile time that sizes and offsets agree.
#pragma once

#include "params.cuh"
#include "scheduler/packed_tiles.cuh"
#include "score/mask.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "scheduler/sequences.cuh"

// Gradient of a bias, a contiguous array. An axis along which the bias is broadcast has length 1.
// With packed sequences there is no batch axis, and the row axis spans all sequences.
struct BiasGradient {
  void* data;
  int batch;
  int heads;
  int rows;
  int keys;
  int64 parts;  // number of CTAs that compute partial sums of the same tile
};

// The inherited `out` and `lse` are results of the forward pass, and are only read.
struct GradientParams : Params {
  Tensor dout;       // gradient of out
  Tensor dq;         // dq, dk and dv: gradients of q, k and v; `data` is null if not wanted
  Tensor dk;
  Tensor dv;
  const void* dlse;  // gradient of lse, or null
  void* dsinks;      // gradient of the sinks, shape (heads_q), or null
  BiasGradient dbias;
  void* bias_parts;    // partial sums of dbias in the workspace, see inputs/bias.cuh
  void* bias_runs;     // sums of runs in the workspace, see hopper/bias_gradients.cuh
  void* capture_sums;  // sums of dcaptures in the workspace, see inputs/captures.cuh
  // With Config::splits_queries (query_chunks.cuh): array in the workspace of `kv_semaphores`
  // semaphores, followed by sums of dk and dv of KV tiles.
  void* kv_sums;
  void* packed_tiles;  // array in the workspace, with Config::orders_sequences (packed_order.cuh)
  int kv_semaphores;
  // Number of chunks of query heads, and number of chunks of query tiles in the last section or,
  // with packed keys, in all sections.
  int head_chunks;
  int tile_chunks;
  // Index of the first CTA of the last section (tile_coord.cuh), or the number of CTAs if there is
  // no such section.
  int last_section;
#ifdef CUPY_FLASH_MODIFIED
  // Contiguous gradients of captured arrays, by the number in generated code; null if not wanted.
  void* dcaptures[Mods::differentiable > 0 ? Mods::differentiable : 1];
#endif
};

// Row statistics of a query row, from which gradients are computed: P = exp2(score log2(e) -
// lse_log2) and dS = P (dP - delta).
template <class T>
struct alignas(2 * sizeof(T)) RowStats {
  // +inf if the row has no gradient, because it attends to no key or its scores are too large in
  // magnitude; P is then 0.
  T lse_log2;
  T delta;     // rowsum(dout * out) - dlse
};

// Returns the row statistics in the workspace: an array entry per query row, in the order of lse.
template <class Config>
__device__ auto* row_stats(const GradientParams& p) {
  return static_cast<RowStats<Accumulator<typename Config::Element>>*>(p.workspace);
}

// Returns the index in lse of a query row of a sequence's head.
template <class Config>
__device__ int64 lse_index(const Params& p, const Sequence& sequence, int head, int row) {
  if constexpr (Config::packed) return int64(head) * p.total_q + (sequence.q_first + row);
  return (int64(sequence.q_batch) * p.heads_q + head) * p.seqlen_q + row;
}

// Returns the statistics of a query row. A row past the end of the sequence counts as fully masked.
template <class Config, class T = Accumulator<typename Config::Element>>
__device__ RowStats<T> row_stats_of(const GradientParams& p, const Sequence& sequence, int head,
                                    int row) {
  if (row >= sequence.seqlen_q) return {SoftmaxMath<T>::infinity(), 0};
  return row_stats<Config>(p)[lse_index<Config>(p, sequence, head, row)];
}

// Threshold of P above which a row counts as attending to one key only.
//
// The output of such a row is that key's value, and its scores have no gradient: P is 1, and dP
// equals delta. dP and delta are summed in different orders, so their computed difference would be
// a small number instead of 0. If keys are masked by position alone, such rows are known exactly.
// Otherwise a row counts as such if one P exceeds this threshold. The true gradient of that score,
// P (1 - P) (dP - the mean dP of the other keys), is then below the error of delta, which is
// computed from an output rounded to `Element`. (For float32 and float64 it is below the error of
// dP, a sum of `columns` rounded products.) Rounding of lse and of scores gives P an error of the
// same size. Tensor cores truncate the sums of scores: for scores of 40, each 16 columns add an
// error of up to 2^-18, so float16 needs a larger threshold above 256 columns.
template <class Element, int columns = 64>
constexpr Accumulator<Element> p_of_one_key =
    1 - (columns > 64 ? columns : 64) *
            Accumulator<Element>(sizeof(Element) == 4 ? 0x1p-24 : 0x1p-50);
template <int columns>
constexpr float p_of_one_key<bfloat16_t, columns> = 1 - 0x1p-11f;
template <int columns>
constexpr float p_of_one_key<half_t, columns> = 1 - (columns > 256 ? 0x1p-13f : 0x1p-14f);

// Larger number of columns of q and k, and of v.
template <class Config>
constexpr int most_columns =
    Config::head_dim > Config::head_dim_v ? Config::head_dim : Config::head_dim_v;

// Returns the threshold for inputs of float32 or float64. `lse_log2` is the row's log-sum-exp times
// log2(e), and the rounding error of P is proportional to it. The threshold allows for about 20
// roundings of half an ulp, but is never below the threshold for bfloat16. If the terms of a score
// cancel, the error of P may be larger. P of a row that attends to one key may then be below the
// threshold, and dS is a rounding error instead of 0.
template <class T, int columns>
__device__ inline T least_p_of_one_key(T lse_log2) {
  const T rounding = sizeof(T) == 4 ? T(0x1p-20) : T(0x1p-49);
  const T size = lse_log2 < 0 ? -lse_log2 : lse_log2;
  const T least = fma(-rounding, size, p_of_one_key<T, columns>);
  return least > p_of_one_key<bfloat16_t> ? least : T(p_of_one_key<bfloat16_t>);
}

// Whether dS of rows that attend to one key is set to 0. It is not if lse has a gradient or
// includes a sink, because dS of such a row may then differ from 0.
template <class Config>
constexpr bool zeroes_one_key_ds = Config::has_one_key_rows && !Config::has_dlse && !Config::sinks;

// Element type of the gradient of an `Input`: the same type if `AsInput`, else `Config::Gradient`.
template <class Config, class Input, bool AsInput = Config::as_inputs>
struct GradientType {
  using type = Input;
};
template <class Config, class Input>
struct GradientType<Config, Input, false> {
  using type = typename Config::Gradient;
};

// Returns the mask that decides by position which pairs of a sequence are visible.
template <class Config>
__device__ Mask<Config> mask_of(const Params& p, const Sequence& sequence, int batch) {
  const int q_offset = Config::has_seqlens ? sequence.q_offset<Config>(p, batch)
                                           : first_position<Config>(p, batch, p.q_offset);
  return {sequence.seqlen_k, q_offset, {p, batch}};
}

// Returns the softmax scale with its sign. The sums of dq and dk are multiplied by it at the end.
template <class Config, class T>
__device__ T signed_scale(const Params& p) {
  return T(p.softmax_scale * score_factor<Config>);
}
