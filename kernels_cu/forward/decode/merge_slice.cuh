// Columns of a query tile that a CTA merges, in chunks of four columns. If a query tile has partial
// tiles in every CTA of one or more clusters, it is sliced: CTA i of each cluster merges slice i of
// the columns. Otherwise, one CTA of the cluster merges all columns.
//
// If several clusters have partial tiles of a query tile, the CTAs that merge the same slice
// exchange their results in global memory, independently of other slices.
#pragma once

#include "forward/decode/cta.cuh"

#if __CUDA_ARCH__ >= 800

template <class Config>
struct MergeSlice {
  using Cta = DecodeCta<Config>;
  static constexpr int all_chunks = Cta::output_chunks;
  static constexpr int slice_chunks = Cta::slice_chunks;

  bool is_slice = false;
  int index = 0;

  // Returns the columns that the CTA with partial tile `index` of the query tile merges.
  __device__ static MergeSlice for_cta(const PartialTile& partial_tile, int index) {
    return partial_tile.is_sliced ? MergeSlice{true, index} : MergeSlice{};
  }
  // Returns the columns of the CTA that merges `chunk`.
  __device__ static MergeSlice for_chunk(const PartialTile& partial_tile, int chunk) {
    return for_cta(partial_tile, chunk / slice_chunks);
  }

  __device__ int first_chunk() const { return is_slice ? index * slice_chunks : 0; }
  // Number of chunks per row, where the last slice counts as full. valid_chunks() is exact.
  __device__ int chunks() const { return is_slice ? slice_chunks : all_chunks; }
  __device__ int valid_chunks() const {
    return is_slice ? max(0, min(slice_chunks, all_chunks - first_chunk())) : all_chunks;
  }

  // A thread merges one chunk of every rows_at_once()-th row. If a row has more chunks than the CTA
  // has threads, a thread merges several chunks of the row.
  static constexpr int threads = 32 * Config::warps;
  __device__ int rows_at_once() const {
    return max(1, is_slice ? threads / slice_chunks : threads / all_chunks);
  }
  __device__ int first_row() const {
    return is_slice ? threadIdx.x / slice_chunks : threadIdx.x / all_chunks;
  }

  // state() is the offset of base and sum in a record; they follow the columns. first_record() is
  // the offset of a slice in global memory, where all records of one slice are consecutive.
  __device__ int state() const { return is_slice ? 4 * slice_chunks : Cta::record_columns; }
  __device__ int record() const { return is_slice ? Cta::slice_record : Cta::record; }
  __device__ int first_record() const { return index * Config::Br * Cta::slice_record; }
};

#endif  // __CUDA_ARCH__ >= 800
