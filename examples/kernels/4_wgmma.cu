// Rung 4: warpgroup products (wgmma), bulk copies by TMA, and warps with different roles, as in
// FlashAttention-3 (Shah et al. 2024). Needs sm_90a (Hopper).
//
// A CTA computes 128 query rows with three warpgroups of 128 threads:
//
//   producer     one thread loads Q, then K and V tiles of 128 rows, into two stages each
//   consumer 0   rows 0 to 63 of the query tile: S = Q K^T, softmax, O += P V
//   consumer 1   rows 64 to 127, the same
//
// Two barriers per stage connect the roles. A stage is full when all bytes of its tile have
// arrived, and empty when all warps of both consumers have released it:
//
//   producer    wait(empty)  load ~~~ bytes arrive ~~~> full
//   consumers                                           wait(full)  wgmma  arrive(empty)
//
// wgmma reads tiles from shared memory by itself, and runs while its warpgroup computes something
// else. A consumer issues the scores of the next KV tile before the output of this one, and
// computes the next softmax while the tensor cores still work on the output:
//
//   tensor cores   S0 |    | S1   O0   | S2   O1   | O2
//   CUDA cores        | P0 |      P1   |      P2   |
//
// Idle tensor cores limit the rate: both consumers compute a softmax at about the same time.
//
// Arrays as in rung 1, with q, k and v as tensor maps. Launch: grid (seqlen / 128 rounded up,
// heads, batch), 384 threads, sizeof(SharedMemory) = 163,912 bytes of dynamic shared memory.

#ifndef CAUSAL
#define CAUSAL 0  // 1: query i attends to the keys j <= i
#endif

using half_t = unsigned short;  // bits of a float16
using Barrier = unsigned long long;
constexpr int head_dim = 128, tile_rows = 128, stages = 2;

// Opaque record of the CUDA driver: address, shape and strides of an array, and the size of the box
// that one copy loads, here 128 rows x 64 columns of a head.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// A tile is two boxes of 64 columns. A row of a box is eight chunks of 16 bytes, and TMA stores
// chunk c of row r as chunk c ^ (r % 8). This 128-byte swizzle spreads a column over all banks.
struct Tile {
  half_t boxes[2][tile_rows][64];
};
constexpr int box_bytes = sizeof(Tile) / 2;

struct SharedMemory {
  Tile q, k[stages], v[stages];
  Barrier q_full, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
};
static_assert(sizeof(SharedMemory) == 163912, "bytes of the launch");

__device__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// mbarrier: a phase is complete after `arrivals` arrivals and all bytes that they expect.
__device__ void init_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
__device__ void arrive_and_expect(Barrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the phase of this parity is complete. Phases have parity 0, 1, 0, ... A new barrier
// behaves as if a phase of parity 1 had just been completed.
__device__ void wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}
// Makes initialized barriers visible to TMA.
__device__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Starts to load a box from (column, row, head, batch). Its bytes count on the barrier. Rows past
// the end of the sequence arrive as zeros.
__device__ void load_box(void* box, const TensorMap& map, int column, int row, int head, int batch,
                         Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(box)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}
__device__ void load_tile(Tile& tile, const TensorMap& map, int row, Barrier& full) {
  arrive_and_expect(full, sizeof(Tile));
  load_box(tile.boxes[0], map, 0, row, blockIdx.y, blockIdx.z, full);
  load_box(tile.boxes[1], map, 64, row, blockIdx.y, blockIdx.z, full);
}

// setmaxnreg: a warpgroup releases registers, or takes those that another warpgroup released.
template <int registers>
__device__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Returns the matrix descriptor of a tile, from which wgmma computes addresses. In units of 16
// bytes it holds the address, the distance between boxes (ignored for Q and K, of which a product
// reads one box only) and the distance between groups of eight rows; then the kind of swizzle.
__device__ unsigned long long descriptor(const void* tile, int box_distance) {
  const unsigned long long distance = box_distance / 16, eight_rows = 8 * 128 / 16, swizzle_128 = 1;
  return swizzle_128 << 62 | eight_rows << 32 | distance << 16 | shared_address(tile) / 16;
}

// Makes the compiler believe that registers change here, so that it moves no use of them to the
// other side. It does not know that wgmma writes its results some time after it is issued.
template <int count>
__device__ void pin(float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int count>
__device__ void pin(unsigned (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Orders earlier accesses to registers before the products that follow.
__device__ void wgmma_fence(float (&d)[64]) {
  pin(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of products.
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are incomplete; `d` is the result that is complete then.
template <int pending>
__device__ void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  pin(d);
}

// The 64 accumulators of a thread, as text and as operands of asm.
#define D_TEXT                                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63}"
#define D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_16(i) D_4(i), D_4(i + 4), D_4(i + 8), D_4(i + 12)
#define D_OPERANDS D_16(0), D_16(16), D_16(32), D_16(48)

// d = a b + (accumulate ? d : 0), with a of 64 x 16 and b of 16 x 128 elements in shared memory.
// The last two operands of wgmma, both 0, say that a and b are contiguous along k, as in Q K^T.
__device__ void wgmma_scores(float (&d)[64], unsigned long long a, unsigned long long b,
                             int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " D_TEXT
      ", %64, %65, accumulate, 1, 1, 0, 0;\n"
      "}"
      : D_OPERANDS
      : "l"(a), "l"(b), "r"(accumulate));
}
// d += a b, with a in registers. The last operand, 1: b is contiguous along columns, as in P V.
__device__ void wgmma_output(float (&d)[64], const unsigned* a, unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " D_TEXT
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : D_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Issues S = Q K^T of 64 query rows and 128 keys, in steps of 16 columns (32 bytes of a row).
__device__ void start_scores(float (&s)[64], const half_t* q, const Tile& k) {
  wgmma_fence(s);
#pragma unroll
  for (int step = 0; step < head_dim / 16; ++step) {
    const int offset = (step / 4 * box_bytes + step % 4 * 32) / 16;
    wgmma_scores(s, descriptor(q, 0) + offset, descriptor(&k, 0) + offset, step > 0);
  }
  wgmma_commit();
}

// Issues O += P V, in steps of 16 keys (16 rows of V).
__device__ void start_output(float (&out)[64], const unsigned (&p)[32], const Tile& v) {
  wgmma_fence(out);
#pragma unroll
  for (int step = 0; step < tile_rows / 16; ++step) {
    wgmma_output(out, p + 4 * step, descriptor(&v, box_bytes) + step * 16 * 128 / 16);
  }
  wgmma_commit();
}

// Replaces the scores by P = exp(S - m) and computes `rescale` = exp(m_old - m). Accumulator
// 4 j + 2 h + c of wgmma is element (16 warp + lane / 4 + 8 h, 8 j + 2 (lane % 4) + c) of the
// 64 x 128 result. Hence a thread holds 32 columns of two rows, and four lanes hold a row.
__device__ void softmax(float (&s)[64], float (&max)[2], float (&sum)[2], float (&rescale)[2],
                        float scale_log2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float new_max = max[h];
#pragma unroll
    for (int i = 2 * h; i < 64; i += 4) new_max = fmaxf(new_max, fmaxf(s[i], s[i + 1]));
    new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
    new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
    rescale[h] = exp2f((max[h] - new_max) * scale_log2);
    max[h] = new_max;
    sum[h] *= rescale[h];  // sum over this lane's keys; the 4 sums of a row are added at the end
#pragma unroll
    for (int i = 2 * h; i < 64; i += 4) {
      s[i] = exp2f(s[i] * scale_log2 - new_max * scale_log2);
      s[i + 1] = exp2f(s[i + 1] * scale_log2 - new_max * scale_log2);
      sum[h] += s[i] + s[i + 1];
    }
  }
}

// Returns two numbers as float16, `low` in the lower half.
__device__ unsigned pack(float low, float high) {
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
// Converts P to the left operand of the next product, whose layout is that of the scores.
__device__ void pack_operand(unsigned (&p)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
  pin(p);
}

extern "C" __global__ void __launch_bounds__(384)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, half_t* out, int seqlen, int heads,
              float scale_log2) {
  extern __shared__ __align__(1024) unsigned char memory[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
  // The longest query tiles of a head start first, so that no long one is left at the end.
  const int q_tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int q_begin = q_tile * tile_rows;
  // KV tiles are processed from the last one to the first. Only the last one has masked pairs, at
  // the diagonal or past the end of the sequence, because query and KV tiles have the same size.
  const int kv_tiles = CAUSAL ? q_tile + 1 : (seqlen + tile_rows - 1) / tile_rows;

  if (threadIdx.x == 0) {
    init_barrier(shared.q_full, 1);
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(shared.k_full[stage], 1);  // the producer, and the bytes that it expects
      init_barrier(shared.v_full[stage], 1);
      init_barrier(shared.k_empty[stage], 8);  // the warps of two consumers
      init_barrier(shared.v_empty[stage], 8);
    }
    fence_barrier_init();
  }
  __syncthreads();

  // The shuffle tells the compiler that the value is uniform within a warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x > 0) return;
    load_tile(shared.q, q_map, q_begin, shared.q_full);
    for (int i = 0; i < kv_tiles; ++i) {
      const int row = (kv_tiles - 1 - i) * tile_rows, stage = i % stages, parity = i / stages % 2;
      wait(shared.k_empty[stage], parity ^ 1);
      load_tile(shared.k[stage], k_map, row, shared.k_full[stage]);
      wait(shared.v_empty[stage], parity ^ 1);
      load_tile(shared.v[stage], v_map, row, shared.v_full[stage]);
    }
    return;
  }

  increase_registers<240>();  // 128 x 24 + 256 x 240 registers are the 384 x 168 of the launch
  const int consumer = warpgroup - 1, lane = threadIdx.x % 32;
  const half_t* q = shared.q.boxes[0][64 * consumer];
  const int query = q_begin + 64 * consumer + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const float infinity = __int_as_float(0x7f800000);
  float s[64], result[64] = {}, max[2] = {-infinity, -infinity}, sum[2] = {}, rescale[2];
  unsigned p[32];

  wait(shared.q_full, 0);
  wait(shared.k_full[0], 0);
  start_scores(s, q, shared.k[0]);
  wgmma_wait<0>(s);
  if (lane == 0) arrive(shared.k_empty[0]);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = (kv_tiles - 1) * tile_rows + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const bool visible = key < seqlen && (!CAUSAL || key <= query + i / 2 % 2 * 8);
    if (!visible) s[i] = -infinity;
  }
  // All rows attend to the first key of this tile, so maxima are finite and no difference is NaN.
  softmax(s, max, sum, rescale, scale_log2);
  pack_operand(p, s);

  wait(shared.v_full[0], 0);
  for (int i = 1; i < kv_tiles; ++i) {
    const int stage = i % stages, parity = i / stages % 2, previous = (i - 1) % stages;
    wait(shared.k_full[stage], parity);
    start_scores(s, q, shared.k[stage]);
    start_output(result, p, shared.v[previous]);

    wgmma_wait<1>(s);
    if (lane == 0) arrive(shared.k_empty[stage]);
    softmax(s, max, sum, rescale, scale_log2);
    pin(s);  // computed before the waits below, while the tensor cores work on the output
    wait(shared.v_full[stage], parity);

    wgmma_wait<0>(result);
    if (lane == 0) arrive(shared.v_empty[previous]);
#pragma unroll
    for (int j = 0; j < 64; ++j) result[j] *= rescale[j / 2 % 2];
    pack_operand(p, s);
  }
  start_output(result, p, shared.v[(kv_tiles - 1) % stages]);
  wgmma_wait<0>(result);

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (query + 8 * h >= seqlen) continue;
    const long long row = (blockIdx.z * seqlen + query + 8 * h) * static_cast<long long>(heads);
    half_t* out_row = out + (row + blockIdx.y) * head_dim + lane % 4 * 2;
    const float normalizer = 1 / sum[h];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      *reinterpret_cast<unsigned*>(out_row + 8 * j) =
          pack(result[4 * j + 2 * h] * normalizer, result[4 * j + 2 * h + 1] * normalizer);
    }
  }
}
