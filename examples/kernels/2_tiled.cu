// Rung 2: tiles in shared memory and the online softmax: FlashAttention (Dao et al. 2022).
//
// Tiles: a thread block computes 64 query rows. It copies 32 keys and their values at a time to
// shared memory, where all rows use them. A thread holds 4 x 2 scores and 4 x 8 outputs in
// registers, so that it uses each number that it reads from shared memory 2 to 8 times.
//
// Online softmax: K is read once. If a tile raises the maximum m of a row, the sums up to that tile
// are multiplied by exp(m_old - m_new), as if the new maximum had been known from the start.
//
// CUDA cores limit the rate, and so does shared memory, which feeds their multiply-adds.
//
// Arrays as in rung 1. Launch: grid (seqlen / 64 rounded up, heads, batch), 256 threads.

#ifndef CAUSAL
#define CAUSAL 0  // 1: query i attends to the keys j <= i
#endif

using half_t = unsigned short;  // bits of a float16
constexpr int head_dim = 128, Br = 64, Bc = 32, threads = 256;
// A row takes 65 words of 32 bits, so that the same column of 16 rows is in 16 different banks.
constexpr int padded = head_dim + 2;

__device__ float to_float(half_t x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
}

__device__ half_t to_half(float x) {
  half_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// Copies the rows of a head from `begin` on to shared memory, and zeros for rows past the end.
template <int rows>
__device__ void load_tile(half_t (&tile)[rows][padded], const half_t* head, long long row_stride,
                          int begin, int seqlen) {
  for (int i = threadIdx.x; i < rows * head_dim; i += threads) {
    const int row = i / head_dim, d = i % head_dim;
    tile[row][d] = begin + row < seqlen ? head[(begin + row) * row_stride + d] : half_t(0);
  }
}

extern "C" __global__ void __launch_bounds__(threads)
    attention(const half_t* q, const half_t* k, const half_t* v, half_t* out, int seqlen, int heads,
              float scale_log2) {
  __shared__ half_t q_tile[Br][padded], k_tile[Bc][padded], v_tile[Bc][padded];
  __shared__ float p_tile[Br][Bc + 1];
  const long long row_stride = heads * head_dim;
  const long long head = blockIdx.z * seqlen * row_stride + blockIdx.y * head_dim;
  const int q_begin = blockIdx.x * Br;
  const int keys = CAUSAL ? min(q_begin + Br, seqlen) : seqlen;
  // Thread (y, x) of 16 x 16 computes rows y + i, scores of keys x + 16 j, and output columns
  // x + 16 j. The 16 threads of a row are half a warp.
  const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
  const float infinity = __int_as_float(0x7f800000);

  float result[4][8] = {}, sum[4] = {}, max[4] = {-infinity, -infinity, -infinity, -infinity};
  load_tile(q_tile, q + head, row_stride, q_begin, seqlen);
  for (int begin = 0; begin < keys; begin += Bc) {
    __syncthreads();  // all threads have finished with the previous K and V
    load_tile(k_tile, k + head, row_stride, begin, seqlen);
    load_tile(v_tile, v + head, row_stride, begin, seqlen);
    __syncthreads();

    float s[4][2] = {};  // S = Q K^T
    for (int d = 0; d < head_dim; ++d) {
      for (int j = 0; j < 2; ++j) {
        const float k_value = to_float(k_tile[x + 16 * j][d]);
        for (int i = 0; i < 4; ++i) s[i][j] += to_float(q_tile[y + i][d]) * k_value;
      }
    }

    for (int i = 0; i < 4; ++i) {  // P = exp(S - m)
      float new_max = max[i];
      for (int j = 0; j < 2; ++j) {
        const int key = begin + x + 16 * j;
        const bool visible = key < seqlen && (!CAUSAL || key <= q_begin + y + i);
        s[i][j] = visible ? s[i][j] * scale_log2 : -infinity;
        new_max = fmaxf(new_max, s[i][j]);
      }
      for (int lane = 1; lane < 16; lane *= 2) {
        new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, lane));
      }
      // All rows attend to key 0, so new_max is finite and no difference is inf - inf.
      const float rescale = exp2f(max[i] - new_max);
      max[i] = new_max;
      sum[i] *= rescale;  // sum over this thread's keys; the 16 sums of a row are added at the end
      for (int j = 0; j < 8; ++j) result[i][j] *= rescale;
      for (int j = 0; j < 2; ++j) {
        sum[i] += p_tile[y + i][x + 16 * j] = exp2f(s[i][j] - new_max);
      }
    }
    __syncwarp();  // the threads that read a row of P are in the warp that wrote it

    for (int key = 0; key < Bc; ++key) {  // O += P V
      for (int j = 0; j < 8; ++j) {
        const float v_value = to_float(v_tile[key][x + 16 * j]);
        for (int i = 0; i < 4; ++i) result[i][j] += p_tile[y + i][key] * v_value;
      }
    }
  }

  for (int i = 0; i < 4; ++i) {
    for (int lane = 1; lane < 16; lane *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], lane);
    for (int j = 0; j < 8 && q_begin + y + i < seqlen; ++j) {
      out[head + (q_begin + y + i) * row_stride + x + 16 * j] = to_half(result[i][j] / sum[i]);
    }
  }
}
