// Kernel that runs before the Hopper kernel and splits float32 q, k and v into components
// (operand.cuh) in the workspace, for TMA. Each array becomes three arrays, that of the largest
// components first, in the order (batch, seqlen, heads, columns). Rows of a head are padded to
// whole 16-byte chunks.
#pragma once

#include "forward/hopper/operand.cuh"
#include "params.cuh"
#include "tile/access.cuh"
#include "tile/layout.cuh"

#if __CUDA_ARCH__ == 900

template <class Config>
struct HopperComponents {
  using Operand = HopperOperand<float>;
  using Chunk = Vector<bfloat16_t, 8>;
  static constexpr int alignment = Config::alignment;

  // Splits one array, with any number of CTAs and threads. Returns the address for the next array.
  template <int dim>
  __device__ static Chunk* write(const Tensor& tensor, int batch, int seqlen, int heads,
                                 Chunk* components) {
    constexpr int chunks = ceil_div(dim, 8);
    const int chunks_per_row = heads * chunks;
    const int64 rows = int64(batch) * seqlen;
    const int64 component_chunks = rows * chunks_per_row;
    // A CTA processes several rows at once if one row has too few chunks for all threads.
    const int rows_at_once = max(1, int(blockDim.x) / chunks_per_row);
    for (int64 first = int64(blockIdx.x) * rows_at_once; first < rows;
         first += int64(gridDim.x) * rows_at_once) {
      for (int i = threadIdx.x; i < rows_at_once * chunks_per_row; i += blockDim.x) {
        const int64 row = first + i / chunks_per_row;
        if (row >= rows) break;
        const int chunk = i % chunks_per_row;
        const int column = chunk % chunks * 8;
        const float* source = tensor.head<const float>(int(row / seqlen), chunk / chunks) +
                              row % seqlen * tensor.row_stride + column;
        unsigned split[4][3];
#pragma unroll
        for (int quarter = 0; quarter < 2; ++quarter) {
          const auto four =
              load_elements<4, alignment>(source + 4 * quarter, dim - column - 4 * quarter);
          Operand::split_any(four.data[0], four.data[1], split[2 * quarter]);
          Operand::split_any(four.data[2], four.data[3], split[2 * quarter + 1]);
        }
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          const unsigned words[4] = {split[0][k], split[1][k], split[2][k], split[3][k]};
          components[k * component_chunks + row * chunks_per_row + chunk] =
              reinterpret_cast<const Chunk&>(words);
        }
      }
    }
    return components + 3 * component_chunks;
  }
};

template <class Config>
__device__ void hopper_components(const Params& p) {
  using Components = HopperComponents<Config>;
  auto* target = static_cast<typename Components::Chunk*>(p.workspace);
  target =
      Components::template write<Config::head_dim>(p.q, p.batch, p.seqlen_q, p.heads_q, target);
  target =
      Components::template write<Config::head_dim>(p.k, p.batch, p.seqlen_k, p.heads_kv, target);
  Components::template write<Config::head_dim_v>(p.v, p.batch, p.seqlen_k, p.heads_kv, target);
}

#endif  // __CUDA_ARCH__ == 900
