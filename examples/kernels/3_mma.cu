// Rung 3: tensor cores through mma.sync, and copies that run in the background: FlashAttention-2
// (Dao 2023). Needs sm_80 (Ampere).
//
// A CTA of 8 warps computes 128 query rows, 16 per warp, so that the softmax of a row stays in one
// warp. Both products consist of mma.m16n8k16: a warp multiplies 16 x 16 by 16 x 8 elements. A lane
// holds two columns of rows r and r + 8 of the result, where r = lane / 4:
//
//   column      0    1    2    3    4    5    6    7
//   row r       lane 4 r  4 r + 1   4 r + 2   4 r + 3
//   row r + 8   the same lanes
//
// The left operand of a product has the same layout. Hence P goes from S = Q K^T to O = P V without
// leaving the registers.
//
// There is one buffer for K and one for V. While a product reads one, the other is filled:
//
//   copies         K0 | V0         | K1         | V1         | K2         |
//   tensor cores      | S = Q K0^T | O += P V0  | S = Q K1^T | O += P V1  |
//
// Instruction issue and latency limit the rate: each warp loads the fragments of every product, and
// waits for the results.
//
// Arrays as in rung 1. Launch: grid (seqlen / 128 rounded up, heads, batch), 256 threads.

#ifndef CAUSAL
#define CAUSAL 0  // 1: query i attends to the keys j <= i
#endif

using half_t = unsigned short;  // bits of a float16
constexpr int head_dim = 128, Br = 128, Bc = 64, threads = 256;
constexpr int row_bytes = head_dim * sizeof(half_t), tile_bytes = Bc * row_bytes;

// Returns the byte offset of a chunk of 16 bytes in a tile. A row of 256 bytes covers all banks
// twice, so that the same chunk of eight rows would be in the same banks. The XOR spreads the eight
// chunks over all banks, and ldmatrix reads them at once.
__device__ unsigned offset(int row, int chunk) { return row * row_bytes + (chunk ^ row % 8) * 16; }

// Starts to copy `bytes` bytes, and zeros for the rest of 16 bytes.
__device__ void copy_16_bytes(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Waits until the copies of all threads of the CTA are complete.
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix
// l / 8, and receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ void ldmatrix(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Like ldmatrix(), with each matrix transposed.
__device__ void ldmatrix_trans(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// d += a b, with a of 16 x 16 and b of 16 x 8 elements.
__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns two numbers as float16, `low` in the lower half.
__device__ unsigned pack(float low, float high) {
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Starts to copy `rows` rows of a head to shared memory, and zeros for rows past the end.
template <int rows>
__device__ void start_copy(unsigned shared, const half_t* head, long long row_stride, int begin,
                           int seqlen) {
  for (int i = threadIdx.x; i < rows * 16; i += threads) {
    const int row = i / 16, chunk = i % 16;
    const bool inside = begin + row < seqlen;
    copy_16_bytes(shared + offset(row, chunk),
                  head + (inside ? begin + row : 0) * row_stride + chunk * 8, inside ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(threads)
    attention(const half_t* q, const half_t* k, const half_t* v, half_t* out, int seqlen, int heads,
              float scale_log2) {
  __shared__ __align__(128) unsigned char memory[2 * tile_bytes];
  const unsigned k_tile = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  const unsigned v_tile = k_tile + tile_bytes;
  const long long row_stride = heads * head_dim;
  const long long head = blockIdx.z * seqlen * row_stride + blockIdx.y * head_dim;
  const int q_begin = blockIdx.x * Br;
  const int keys = CAUSAL ? min(q_begin + Br, seqlen) : seqlen;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int query = q_begin + warp_row + lane / 4;  // row r of this lane; the other is query + 8
  const float infinity = __int_as_float(0x7f800000);

  // Q passes through the memory of both tiles to registers, where it stays.
  unsigned q_fragments[head_dim / 16][4];
  start_copy<Br>(k_tile, q + head, row_stride, q_begin, seqlen);
  wait_for_copies();
  for (int step = 0; step < head_dim / 16; ++step) {
    ldmatrix(q_fragments[step], k_tile + offset(warp_row + lane % 16, 2 * step + lane / 16));
  }
  __syncthreads();  // all warps have read their queries before K overwrites them

  float result[head_dim / 8][4] = {}, sum[2] = {}, max[2] = {-infinity, -infinity};
  start_copy<Bc>(k_tile, k + head, row_stride, 0, seqlen);
  for (int begin = 0; begin < keys; begin += Bc) {
    wait_for_copies();  // K has arrived, and all warps have finished with the previous V
    start_copy<Bc>(v_tile, v + head, row_stride, begin, seqlen);

    float s[Bc / 8][4] = {};  // S = Q K^T: s[j] are the scores of keys 8 j to 8 j + 7
    for (int step = 0; step < head_dim / 16; ++step) {
      for (int j = 0; j < Bc / 8; j += 2) {
        unsigned b[4];  // 16 keys x 16 columns
        const int key = 8 * j + lane / 16 * 8 + lane % 8;
        ldmatrix(b, k_tile + offset(key, 2 * step + lane / 8 % 2));
        mma(s[j], q_fragments[step], b[0], b[1]);
        mma(s[j + 1], q_fragments[step], b[2], b[3]);
      }
    }

    // Only tiles at the diagonal and at the end of the sequence have masked pairs.
    if (begin + Bc > seqlen || (CAUSAL && begin + Bc > q_begin + warp_row)) {
      for (int j = 0; j < Bc / 8; ++j) {
        for (int i = 0; i < 4; ++i) {
          const int key = begin + 8 * j + lane % 4 * 2 + i % 2;
          const bool visible = key < seqlen && (!CAUSAL || key <= query + i / 2 * 8);
          if (!visible) s[j][i] = -infinity;
        }
      }
    }

    for (int h = 0; h < 2; ++h) {  // P = exp(S - m) of row r, then of row r + 8
      float new_max = max[h];
      for (int j = 0; j < Bc / 8; ++j)
        new_max = fmaxf(new_max, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
      // All rows attend to key 0, so new_max is finite and no difference is inf - inf.
      const float rescale = exp2f((max[h] - new_max) * scale_log2);
      max[h] = new_max;
      sum[h] *= rescale;  // sum over this lane's keys; the 4 sums of a row are added at the end
      for (int j = 0; j < Bc / 8; ++j) {
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[j][i] = exp2f(s[j][i] * scale_log2 - new_max * scale_log2);
          sum[h] += s[j][i];
        }
      }
      for (int j = 0; j < head_dim / 8; ++j) {
        for (int i = 2 * h; i < 2 * h + 2; ++i) result[j][i] *= rescale;
      }
    }

    wait_for_copies();  // V has arrived, and all warps have finished with K
    if (begin + Bc < keys) start_copy<Bc>(k_tile, k + head, row_stride, begin + Bc, seqlen);

    for (int step = 0; step < Bc / 16; ++step) {  // O += P V
      const float (&left)[4] = s[2 * step], (&right)[4] = s[2 * step + 1];
      const unsigned p[4] = {pack(left[0], left[1]), pack(left[2], left[3]),
                             pack(right[0], right[1]), pack(right[2], right[3])};
      for (int j = 0; j < head_dim / 8; j += 2) {
        unsigned b[4];  // 16 keys x 16 columns
        ldmatrix_trans(b, v_tile + offset(16 * step + lane % 16, j + lane / 16));
        mma(result[j], p, b[0], b[1]);
        mma(result[j + 1], p, b[2], b[3]);
      }
    }
  }

  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (query + 8 * h >= seqlen) continue;
    half_t* out_row = out + head + (query + 8 * h) * row_stride;
    const float normalizer = 1 / sum[h];
    for (int j = 0; j < head_dim / 8; ++j) {
      *reinterpret_cast<unsigned*>(out_row + 8 * j + lane % 4 * 2) =
          pack(result[j][2 * h] * normalizer, result[j][2 * h + 1] * normalizer);
    }
  }
}
