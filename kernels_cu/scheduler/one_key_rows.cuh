// Correction of rows with modified scores that attend to only one key. Such a row's output must
// equal that key's value, which GEMMs with less than float32 precision do not guarantee. The
// correction evaluates the modifications again to find these rows and their keys.
#pragma once

#include "params.cuh"
#include "scheduler/sequence_view.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"

// Called by a warp. Returns the only key of [begin, end) that a row attends to, or -1 if it attends
// to several or none. Modifications are evaluated with scores of 0, so that a result of -inf comes
// from a mask or a bias of -inf.
template <class Config>
__device__ int find_only_visible_key(const Params& p, const ScoreRow& row, int begin, int end) {
  int only_key = -1;
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int key = first + threadIdx.x % 32;
    float score = 0;
    modify_rows<Config, 1, 1>(
        p, [&](int) { return row; }, min(key, end - 1), [&](int, int) -> float& { return score; },
        [](int) { return 0; });
    const unsigned visible =
        __ballot_sync(~0u, key < end && score > -SoftmaxMath<float>::infinity());
    if (visible == 0) continue;
    if (only_key >= 0 || (visible & (visible - 1)) != 0) return -1;
    only_key = first + __ffs(visible) - 1;
  }
  return only_key;
}

// Called by a warp after it has written the result of a row to `out`. If the row attends to only
// one key of `tiles`, the result becomes the value of that key.
template <class Config, class Out>
__device__ void fix_one_key_row(const Params& p, const TileCoord& coord,
                                const SequenceView<Config>* view, const KvTileRange& tiles, int row,
                                Out* out) {
  using Element = typename Config::Element;
  const Mask<Config, Config::group> mask(p, coord.batch);
  const int begin = max(mask.visible_begin(row), tiles.begin * Config::Bc);
  const int end = min(mask.visible_end(row), tiles.end * Config::Bc);
  const int key = find_only_visible_key<Config>(p, score_row(p, coord, view, row), begin, end);
  if (key < 0) return;
  Row<Element> value = {
      p.v.template head<const Element>(coord.batch, coord.head_kv) + key * p.v.row_stride, true};
  if constexpr (Config::page_size > 0) value = view->pages(view->p.v).at(key);
#pragma unroll 1
  for (int column = threadIdx.x % 32; column < Config::head_dim_v; column += 32) {
    const float exact = value.exists ? widen(value.begin[column]) : 0;
    // NaN and infinite results stay, as do those that differ from the value by more than rounding.
    if (fabsf(out[column] - exact) <= 0x1p-20f * fabsf(exact)) out[column] = exact;
  }
}
