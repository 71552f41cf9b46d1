// Masks by position: causal, window and prefix. Computes which keys a query row attends to, the KV
// tiles of a query tile, and which of these KV tiles need masking. For the backward pass, computes
// the query tiles of a KV tile. cupy_flash/problem/mask.py is the host's counterpart.
#pragma once

#include "params.cuh"
#include "scheduler/tile_coord.cuh"

// Bounds on the keys of a row in addition to Config::causal: a window, and a prefix that is visible
// regardless of causality and the window. With a prefix there is no left bound here: generated
// source masks the keys between the prefix and the window, so that the keys of each row remain one
// range. Empty if Config has neither.
template <class Config,
          bool Bounded = Config::window_left || Config::window_right || Config::prefix>
struct Band {
  __device__ Band() {}
  __device__ Band(const Params&, int) {}
  __device__ Band counted_from(int) const { return {}; }
};
template <class Config>
struct Band<Config, true> {
  static_assert(!(Config::prefix && Config::window_left),
                "prefix and left window exclude each other");

  int left;
  int right;
  int prefix;

  __device__ Band(int left, int right, int prefix) : left(left), right(right), prefix(prefix) {}

  // A template, because only kernels with modifications have the members of `p.mods`.
  template <class AnyParams>
  __device__ Band(const AnyParams& p, int batch) {
    if constexpr (Config::window_left) left = p.mods.window_left;
    if constexpr (Config::window_right) right = p.mods.window_right;
    if constexpr (Config::prefix) prefix = p.mods.prefix_lens.at(batch);
  }

  __device__ Band counted_from(int key) const { return {left, right, prefix - key}; }
};

// Mask of a query tile whose rows interleave `Group` query heads; see `tile_coord()`.
template <class Config, int Group = 1>
struct Mask : Band<Config> {
  int seqlen_k;
  int q_offset;

  __device__ explicit Mask(const Params& p, int batch)
      : Band<Config>(p, batch),
        seqlen_k(p.seqlen_k),
        q_offset(first_position<Config>(p, batch, p.q_offset)) {}

  __device__ Mask(int seqlen_k, int q_offset, const Band<Config>& band)
      : Band<Config>(band), seqlen_k(seqlen_k), q_offset(q_offset) {}

  // Returns the same mask with keys counted from `key` on. (If callers subtracted `key` from each
  // row's end, these ends would be loop-invariant, and the compiler would keep them in registers.)
  __device__ Mask counted_from(int key) const {
    return {seqlen_k - key, q_offset - key, Band<Config>::counted_from(key)};
  }

  // A query row attends to the keys [visible_begin(row), visible_end(row)).
  __device__ int visible_end(int row) const {
    if constexpr (!Config::causal && !Config::window_right) return seqlen_k;
    const int causal_end = row / Group + q_offset + 1;
    int end = Config::causal ? causal_end : seqlen_k;
    if constexpr (Config::window_right) end = min(end, causal_end + this->right);
    if constexpr (Config::prefix) end = max(end, this->prefix);
    return max(0, min(seqlen_k, end));
  }
  __device__ int visible_begin(int row) const {
    if constexpr (Config::window_left) {
      return max(0, min(seqlen_k, row / Group + q_offset - this->left));
    } else {
      return 0;
    }
  }

  // Returns the number of KV tiles (of Bc keys) that end at or before visible_end(row). A tile is
  // full here if no key is masked.
  template <int Bc>
  __device__ int full_tiles(int row) const {
    return visible_end(row) / Bc;
  }
  // Returns the index of the first KV tile that begins at or after visible_begin(row).
  template <int Bc>
  __device__ int first_full_tile(int row) const {
    return Config::window_left ? ceil_div(visible_begin(row), Bc) : 0;
  }

  // The transpose: among `rows` query rows, [`row_begin()`, `row_end()`) attend to the key.
  __device__ int row_begin(int key, int rows) const {
    int first = 0;
    if constexpr (Config::causal) first = key - q_offset;
    if constexpr (Config::window_right) first = max(first, key - q_offset - this->right);
    if constexpr (Config::prefix) {
      if (key < this->prefix) first = 0;
    }
    return max(0, min(rows / Group, first)) * Group;
  }
  __device__ int row_end(int key, int rows) const {
    if constexpr (Config::window_left) {
      return max(0, min(rows / Group, key + this->left - q_offset + 1)) * Group;
    } else {
      return rows;
    }
  }
};

// Indices of the KV tiles of one work tile, processed from end - 1 down to begin. Tiles in
// [full_end, end) need a mask for some row of the query tile or reach past the last key. Tiles
// before full_end need none, unless a window masks some of their keys (see `first_full_tile`).
struct KvTileRange {
  int begin;
  int full_end;
  int end;
};

// Returns the KV tiles of the rows [q_begin, q_end) of one head. With `Split`, returns only those
// of KV split `split` of num_splits.
template <int Bc, bool Split, class Config, int Group>
__device__ KvTileRange kv_tile_range(const Mask<Config, Group>& mask, int q_begin, int q_end,
                                     int split, int num_splits) {
  const int visible_end_tile = ceil_div(mask.visible_end(q_end - 1), Bc);
  const int full = mask.template full_tiles<Bc>(q_begin);
  const int first =
      Config::window_left ? min(visible_end_tile, mask.visible_begin(q_begin) / Bc) : 0;
  if constexpr (!Split) {
    return {
        first,
        Config::window_left ? max(first, min(full, visible_end_tile)) : min(full, visible_end_tile),
        visible_end_tile};
  }
  const int split_tiles = ceil_div(visible_end_tile - first, num_splits);
  const int begin = min(visible_end_tile, first + split * split_tiles);
  const int end = min(visible_end_tile, begin + split_tiles);
  return {begin, max(begin, min(full, end)), end};
}

// Query tiles [begin, end) whose rows attend to a KV tile. Tiles in [full_begin, full_end) need no
// mask.
struct QueryTileRange {
  int begin;
  int full_begin;
  int full_end;
  int end;
};

// Returns the query tiles of `rows` query rows that attend to keys [k_begin, k_end), at least one.
template <int Br, class Config, int Group>
__device__ QueryTileRange query_tile_range(const Mask<Config, Group>& mask, int k_begin, int k_end,
                                           int rows) {
  const int end = ceil_div(mask.row_end(k_end - 1, rows), Br);
  const int begin = min(end, mask.row_begin(k_begin, rows) / Br);
  const int full_begin = max(begin, min(end, ceil_div(mask.row_begin(k_end - 1, rows), Br)));
  const int last = mask.row_end(k_begin, rows);
  const int full_end = last == rows ? end : min(end, last / Br);
  return {begin, full_begin, max(full_begin, full_end), end};
}
