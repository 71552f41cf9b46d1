// `SequenceView`: a CTA's tile coordinates, and the rows of q, k, v and out that its sequence
// occupies, for varlen, cached and paged batches. `Config::page_size` is 0 if K and V are not
// paged; `Config::group` is the number of query heads packed into a tile, see `tile_coord()`.
#pragma once

#include "score/degenerate_rows.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "scheduler/pages.cuh"
#include "params.cuh"
#include "scheduler/tile_coord.cuh"
#include "scheduler/sequences.cuh"
#include "scheduler/split_kv.cuh"
#include "scheduler/unowned_rows.cuh"

template <class Config>
struct SequenceView {
  using Element = typename Config::Element;
  using Results = Partials<Config>;
  static constexpr int group = Config::group;
  static constexpr int page_size = Config::page_size;

  const Params& p;
  const TileCoord coord;
  const Sequence sequence;

  __device__ SequenceView(const Params& p, int block)
      : p(p),
        coord(tile_coord<Config::Br, group>(p, block)),
        sequence(find_sequence<page_size>(p, coord.batch)) {}

  // Number of rows in all query tiles of this sequence: seqlen_q times heads packed into a tile.
  __device__ int rows() const { return sequence.seqlen_q * group; }

  // Returns the arguments of a call on this sequence alone. `seqlen_q` is `rows()`. Tensors begin
  // at the sequence's first row, so their batch strides are 0.
  __device__ Params params() const {
    Params local = p;
    local.q = tensor_of(p.q, sequence.q_batch, sequence.q_first);
    local.out = tensor_of(p.out, sequence.q_batch, sequence.q_first);
    local.k = tensor_of(p.k, page_size > 0 ? 0 : sequence.k_batch, sequence.k_first);
    local.v = tensor_of(p.v, page_size > 0 ? 0 : sequence.k_batch, sequence.k_first);
    local.seqlen_q = rows();
    local.seqlen_k = sequence.seqlen_k;
    local.q_offset = sequence.template q_offset<Config>(p, coord.batch);
    return local;
  }

  // Called by all warps of the CTA. Clears the unowned rows next to the sequence, which the CTAs of
  // its query tiles divide. With split KV, the combine kernel does this.
  __device__ void clear_unowned_rows() const {
    if constexpr (!Config::split_keys) {
      const int warps = blockDim.x / 32;
      const int tiles = ceil_div(p.seqlen_q * group, Config::Br);
      const int part = coord.q_begin / Config::Br * warps + threadIdx.x / 32;
      UnownedRows<Config>{p}.clear_around(coord.batch, part, tiles * warps, coord.head, group);
    }
  }

  __device__ Row<Element> query(int row) const {
    const bool exists = row < rows();
    return {row_of(p.q, exists ? row : 0), exists};
  }
  __device__ Element* out(int row) const { return row_of(p.out, row); }

  // Returns the sequence's rows of p.k or p.v (`tensor`) in a paged cache.
  __device__ PagedRows<Element, page_size> pages(const Tensor& tensor) const {
    return {tensor.head<const Element>(0, coord.head_kv),
            p.block_table + coord.batch * p.block_table_stride,
            tensor.batch_stride,
            tensor.row_stride,
            p.pages,
            sequence.seqlen_k};
  }

  __device__ Results partials() const { return Results(p); }
  // Returns the index of one of the `rows()` rows in lse, and in the partial results of a split.
  __device__ int64 index(int row) const {
    return Results::row_index(p, sequence, coord.batch, coord.head + row % group, row / group);
  }

 private:
  __device__ static Tensor tensor_of(const Tensor& tensor, int batch, int first_row) {
    Element* data = tensor.head<Element>(batch, 0) + first_row * tensor.row_stride;
    return {data, 0, tensor.row_stride, tensor.head_stride};
  }
  __device__ Element* row_of(const Tensor& tensor, int row) const {
    return tensor.head<Element>(sequence.q_batch, coord.head + row % group) +
           (sequence.q_first + row / group) * tensor.row_stride;
  }
};

// The functions below serve dense and varlen kernels alike. For dense batches `view` is null and
// `p` holds the kernel's arguments; otherwise `p` is `view->params()`.
template <class Config>
__device__ auto partials_of(const Params& p, const SequenceView<Config>* view) {
  using Results = Partials<Config>;
  if constexpr (Config::has_seqlens) {
    return view->partials();
  } else {
    return Results(p);
  }
}

template <class Config>
__device__ int64 index_of(const Params& p, const TileCoord& coord, const SequenceView<Config>* view,
                          int row) {
  using Results = Partials<Config>;
  if constexpr (Config::has_seqlens) {
    return view->index(row);
  } else {
    return Results::row_index(p, coord.batch, coord.head, row);
  }
}

// Returns the coordinates of a tile's row that mask and score functions receive.
template <class Config>
__device__ ScoreRow score_row(const Params& p, const TileCoord& coord,
                              const SequenceView<Config>* view, int row) {
  if constexpr (Config::has_seqlens) {
    return {coord.batch, coord.head + row % Config::group, row / Config::group,
            p.q_offset,  view->sequence.q_first,           view->sequence.k_first};
  } else {
    const int q_offset = first_position<Config>(p, coord.batch, p.q_offset);
    return {coord.batch, coord.head, row, q_offset, 0, 0};
  }
}

// Returns the row of V that belongs to the first key of a tile's sequence and KV head.
template <class Config>
__device__ Row<typename Config::Element> first_value(const Params& p, const TileCoord& coord,
                                                     const SequenceView<Config>* view) {
  if constexpr (Config::has_seqlens) {
    return first_value_of<Config>(view->p, view->sequence, coord.batch, coord.head_kv);
  } else {
    return {p.v.head<const typename Config::Element>(coord.batch, coord.head_kv), true};
  }
}

// Returns the address of an output element. `head` is the address of the head's first output row.
template <class Config>
__device__ typename Config::Element* out_row(typename Config::Element* head, const Params& p,
                                             const SequenceView<Config>* view, int row,
                                             int column = 0) {
  if constexpr (Config::group > 1) {
    return view->out(row) + column;
  } else {
    return head + row * p.out.row_stride + column;
  }
}

// Corrects the degenerate rows among the rows [first, end) of a tile, which attend to no key or to
// one. With split KV, the combine kernel does this.
template <class Config>
__device__ void fix_degenerate_rows(const Params& p, const TileCoord& coord,
                                    const SequenceView<Config>* view, int first, int end) {
  using Element = typename Config::Element;
  // Only rows without a key need correction in 16 bits. Without a causal mask, there are such rows
  // only if seqlen_k is 0, and their output is then 0 already.
  constexpr bool may_be_degenerate = Config::causal || !quotient_is_exact<Element>;
  if constexpr (!Config::split_keys && may_be_degenerate) {
    const Mask<Config, Config::group> mask(p, coord.batch);
    Element* head = p.out.head<Element>(coord.batch, coord.head);
    fix_degenerate_rows<Config::head_dim_v, Element>(
        first, end, [&](int row) { return mask.visible_end(row); },
        [&](int row) { return out_row(head, p, view, row); }, first_value(p, coord, view));
  }
}
