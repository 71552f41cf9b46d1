// What a thread block of a kernel for packed, cached or paged sequences works on, and where that
// lies. Of Config it reads sequences (whether there are such), page_size (that of the keys and
// values, 0 where they are not paged) and group (the query heads in a tile, see find_work()).
#pragma once

#include "score/few_seen.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "grid/pages.cuh"
#include "params.cuh"
#include "grid/schedule.cuh"
#include "grid/sequences.cuh"
#include "grid/split.cuh"
#include "grid/unowned_rows.cuh"

template <class Config>
struct Place {
  using Element = typename Config::Element;
  using Results = Partials<Config>;
  static constexpr int group = Config::group;
  static constexpr int page_size = Config::page_size;

  const Params& p;
  const Work work;
  const Sequence at;

  __device__ Place(const Params& p, int block)
      : p(p),
        work(find_work<Config::Br, group>(p, block)),
        at(find_sequence<page_size>(p, work.batch)) {}

  // Of all tiles of this sequence and these heads.
  __device__ int rows() const { return at.seqlen_q * group; }

  // What the kernel would be given for this sequence alone: seqlen_q counts the rows of tiles.
  // Strides of batches are zeros, since the addresses are those of the sequence.
  __device__ Params params() const {
    Params own = p;
    own.q = tensor_of(p.q, at.q_batch, at.q_first);
    own.out = tensor_of(p.out, at.q_batch, at.q_first);
    own.k = tensor_of(p.k, page_size > 0 ? 0 : at.k_batch, at.k_first);
    own.v = tensor_of(p.v, page_size > 0 ? 0 : at.k_batch, at.k_first);
    own.seqlen_q = rows();
    own.seqlen_k = at.seqlen_k;
    own.q_offset = at.template q_offset<Config>(p, work.batch);
    return own;
  }

  // Called by all warps of the thread block. The rows around the sequence that belong to none are
  // distributed over the query tiles of the sequence. If keys are split, the kernel that merges the
  // parts clears them.
  __device__ void clear_unowned_rows() const {
    if constexpr (!Config::split_keys) {
      const int warps = blockDim.x / 32;
      const int tiles = ceil_div(p.seqlen_q * group, Config::Br);
      const int part = work.q_begin / Config::Br * warps + threadIdx.x / 32;
      UnownedRows<Config>{p}.clear_around(work.batch, part, tiles * warps, work.head, group);
    }
  }

  __device__ Row<Element> query(int row) const {
    const bool is_there = row < rows();
    return {row_of(p.q, is_there ? row : 0), is_there};
  }
  __device__ Element* out(int row) const { return row_of(p.out, row); }

  // The pages of p.k or p.v.
  __device__ PagedRows<Element, page_size> pages(const Tensor& tensor) const {
    return {tensor.head<const Element>(0, work.head_kv),
            p.block_table + work.batch * p.block_table_stride,
            tensor.batch_stride,
            tensor.row_stride,
            p.pages,
            at.seqlen_k};
  }

  __device__ Results partials() const { return Results(p); }
  // Where a row stands in lse, and among the rows of a split.
  __device__ int64 index(int row) const {
    return Results::row_index(p, at, work.batch, work.head + row % group, row / group);
  }

 private:
  __device__ static Tensor tensor_of(const Tensor& all, int batch, int first_row) {
    Element* data = all.head<Element>(batch, 0) + first_row * all.row_stride;
    return {data, 0, all.row_stride, all.head_stride};
  }
  __device__ Element* row_of(const Tensor& tensor, int row) const {
    return tensor.head<Element>(at.q_batch, work.head + row % group) +
           (at.q_first + row / group) * tensor.row_stride;
  }
};

// The same questions for kernels that serve both: `place` is null where there are no sequences, p
// is what the kernel was given for them, or place->params().
template <class Config>
__device__ auto partials_of(const Params& p, const Place<Config>* place) {
  using Results = Partials<Config>;
  if constexpr (Config::sequences) {
    return place->partials();
  } else {
    return Results(p);
  }
}

template <class Config>
__device__ int64 index_of(const Params& p, const Work& work, const Place<Config>* place, int row) {
  using Results = Partials<Config>;
  if constexpr (Config::sequences) {
    return place->index(row);
  } else {
    return Results::row_index(p, work.batch, work.head, row);
  }
}

// A row of a tile as modifications know it.
template <class Config>
__device__ ScoreRow score_row(const Params& p, const Work& work, const Place<Config>* place,
                              int row) {
  if constexpr (Config::sequences) {
    return {work.batch, work.head + row % Config::group, row / Config::group, p.q_offset,
            place->at.q_first, place->at.k_first};
  } else {
    const int q_offset = first_position<Config>(p, work.batch, p.q_offset);
    return {work.batch, work.head, row, q_offset, 0, 0};
  }
}

// The value of the first key, for the heads of a tile.
template <class Config>
__device__ Row<typename Config::Element> first_value(const Params& p, const Work& work,
                                                     const Place<Config>* place) {
  if constexpr (Config::sequences) {
    return first_value_of<Config>(place->p, place->at, work.batch, work.head_kv);
  } else {
    return {p.v.head<const typename Config::Element>(work.batch, work.head_kv), true};
  }
}

// `head` is where the head's first row of the output begins.
template <class Config>
__device__ typename Config::Element* out_row(typename Config::Element* head, const Params& p,
                                             const Place<Config>* place, int row, int column = 0) {
  if constexpr (Config::group > 1) {
    return place->out(row) + column;
  } else {
    return head + row * p.out.row_stride + column;
  }
}

// settle_few_seen() for the rows [first, end) of a tile. Where keys are split, merging does it.
template <class Config>
__device__ void settle_few_seen(const Params& p, const Work& work, const Place<Config>* place,
                                int first, int end) {
  using Element = typename Config::Element;
  // Without a mask there are no such rows, or they are right as they are.
  constexpr bool may_be_few = Config::causal || !quotient_is_exact<Element>;
  if constexpr (!Config::split_keys && may_be_few) {
    const Mask<Config, Config::group> mask(p, work.batch);
    Element* head = p.out.head<Element>(work.batch, work.head);
    settle_few_seen<Config::head_dim_v, Element>(
        first, end, [&](int row) { return mask.visible_end(row); },
        [&](int row) { return out_row(head, p, place, row); }, first_value(p, work, place));
  }
}
