// Argument struct of the kernels that sum attention weights over queries, and the tiles of keys
// that their CTAs own.
// cupy_flash/families/params.py declares the same struct as a NumPy dtype and asserts at compile
// time that sizes and offsets agree.
#pragma once

#include "backward/lse_exponent.cuh"
#include "scheduler/pages.cuh"

// The inherited `lse` is a result of the forward pass, and is only read. `v` and `out` are unused.
struct ReceivedParams : Params {
  void* received;   // (batch, heads, seqlen_k), or (heads, total_k) for packed keys: contiguous, of
                    // the type of lse. The heads are query heads or, with Config::grouped, KV heads
  int first_query;  // only the queries [first_query, last_query) of each sequence count; negative
  int last_query;   // indices count from its end
};

// Range [begin, end) of the queries of a sequence whose weights are summed.
struct CountedQueries {
  int begin;
  int end;

  // A template, because only kernels with modifications have the array `seqused_q`.
  template <class Config, class AnyParams>
  __device__ static CountedQueries of(const AnyParams& p, const Sequence& sequence, int batch) {
    // The host has resolved the indices of sequences of one length. Kept in the argument struct,
    // they take no registers.
    if constexpr (!Config::has_seqlens) return {p.first_query, p.last_query};
    int used = sequence.seqlen_q;
    if constexpr (Config::seqused_q) used = clamp(p.mods.seqused_q.at(batch), 0, used);
    const auto index = [=](int i) { return clamp(i < 0 ? used + i : i, 0, used); };
    return {index(p.first_query), index(p.last_query)};
  }

  __device__ bool contain(int row) const { return row >= begin && row < end; }
};

// Returns the log-sum-exp of a query row as an exponent of two; +inf for a row that does not count,
// so that its weights are 0.
template <class Config, class T = Accumulator<typename Config::Element>>
__device__ T counted_lse_log2(const ReceivedParams& p, const Sequence& sequence,
                              const CountedQueries& counted, int head, int row) {
  return counted.contain(row) ? lse_log2_of<Config, T>(p, sequence, head, row)
                              : SoftmaxMath<T>::infinity();
}

// Tile of keys that a CTA owns, and the query heads whose weights it sums.
struct KeyTile {
  int batch;
  int head;        // head of the result
  int head_kv;
  int first_head;  // query heads [first_head, last_head)
  int last_head;
  int begin;       // first key

  // Returns the tile of a CTA: consecutive CTAs own the same tile of all heads.
  template <class Config>
  __device__ static KeyTile of(const ReceivedParams& p, int block) {
    const int heads = p.batch * (Config::grouped ? p.heads_kv : p.heads_q);
    return at<Config>(p, block % heads, block / heads);
  }

  // Returns a tile, given the index of its head in the batch.
  template <class Config>
  __device__ static KeyTile at(const ReceivedParams& p, int batch_head, int tile) {
    const int group = p.heads_q / p.heads_kv;
    const int heads = Config::grouped ? p.heads_kv : p.heads_q;
    const int head = batch_head % heads;
    const int first_head = Config::grouped ? head * group : head;
    return {batch_head / heads,
            head,
            Config::grouped ? head : head / group,
            first_head,
            first_head + (Config::grouped ? group : 1),
            tile * Config::Bc};
  }
};

// Sums of the keys of one sequence and one head in `received`. If keys are packed, they are the
// `count` keys of the sequence. Otherwise they are all `seqlen_k` keys that a sequence may have, and
// the sums of those past its last key are 0.
template <class T>
struct ReceivedSums {
  T* begin;
  int count;
};
template <class Config, class T>
__device__ ReceivedSums<T> received_sums(const ReceivedParams& p, const Sequence& sequence,
                                         const KeyTile& tile) {
  T* const received = static_cast<T*>(p.received);
  if constexpr (Config::packed) {
    return {received + int64(tile.head) * p.total_k + sequence.k_first, sequence.seqlen_k};
  }
  const int heads = Config::grouped ? p.heads_kv : p.heads_q;
  return {received + (int64(tile.batch) * heads + tile.head) * p.seqlen_k, p.seqlen_k};
}

// Returns the rows of a sequence's keys in a paged cache.
template <class Config>
__device__ PagedRows<typename Config::Element, Config::page_size> paged_keys(
    const Params& p, const Sequence& sequence, const KeyTile& tile) {
  return {p.k.head<const typename Config::Element>(0, tile.head_kv),
          p.block_table + tile.batch * p.block_table_stride,
          p.k.batch_stride,
          p.k.row_stride,
          p.pages,
          sequence.seqlen_k};
}
