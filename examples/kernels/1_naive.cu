// Rung 1: attention as the formula says it. One thread computes one query row:
//
//   s_j = (q . k_j) / sqrt(head_dim)        out = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)
//
// The largest score m keeps the exponentials from overflowing. It is known only after all keys have
// been read, so every thread reads K twice and computes every score twice.
//
// Loads limit the rate: every thread reads all of K and V through the caches, 2 bytes at a time,
// and uses each number for a single multiply-add.
//
// q, k, v and out are contiguous float16 arrays of shape (batch, seqlen, heads, head_dim).
// Launch: grid (seqlen / 128 rounded up, heads, batch), 128 threads.

#ifndef CAUSAL
#define CAUSAL 0  // 1: query i attends to the keys j <= i
#endif

using half_t = unsigned short;  // bits of a float16, so that no CUDA header is needed
constexpr int head_dim = 128;

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

// Returns the score of a query row and a key, times log2(e): exp(s - m) is then a power of 2, which
// the GPU computes in one instruction. `scale_log2` is log2(e) / sqrt(head_dim).
__device__ float score(const half_t* q_row, const half_t* k_row, float scale_log2) {
  float sum = 0;
  for (int d = 0; d < head_dim; ++d) sum += to_float(q_row[d]) * to_float(k_row[d]);
  return sum * scale_log2;
}

extern "C" __global__ void __launch_bounds__(128)
    attention(const half_t* q, const half_t* k, const half_t* v, half_t* out, int seqlen, int heads,
              float scale_log2) {
  const int query = blockIdx.x * blockDim.x + threadIdx.x;
  if (query >= seqlen) return;
  // First element of this head in all four arrays, and the distance between two rows of the head.
  const long long row_stride = heads * head_dim;
  const long long head = blockIdx.z * seqlen * row_stride + blockIdx.y * head_dim;
  const half_t* q_row = q + head + query * row_stride;
  const int keys = CAUSAL ? query + 1 : seqlen;

  float max = score(q_row, k + head, scale_log2);
  for (int key = 1; key < keys; ++key) {
    max = fmaxf(max, score(q_row, k + head + key * row_stride, scale_log2));
  }

  float sum = 0;
  float result[head_dim] = {};
  for (int key = 0; key < keys; ++key) {
    const float p = exp2f(score(q_row, k + head + key * row_stride, scale_log2) - max);
    const half_t* v_row = v + head + key * row_stride;
    sum += p;
#pragma unroll  // constant indices keep `result` in registers
    for (int d = 0; d < head_dim; ++d) result[d] += p * to_float(v_row[d]);
  }

  half_t* out_row = out + head + query * row_stride;
#pragma unroll
  for (int d = 0; d < head_dim; ++d) out_row[d] = to_half(result[d] / sum);
}
