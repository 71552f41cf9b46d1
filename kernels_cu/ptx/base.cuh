// PTX wrappers: one inline function per instruction, named after the instruction. Instructions that
// need a newer architecture are in stream.cuh, cluster.cuh, sm90a.cuh and wgmma.cuh. Shared-memory
// addresses are 32-bit offsets into the shared window.
#pragma once

namespace ptx {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// %ctaid.x. The asm hides from the compiler that the value equals blockIdx.x and is constant, so
// that the compiler reads it again instead of keeping results derived from it in registers.
__device__ inline int cta_index() {
  int result;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(result));
  return result;
}

// Emits no instruction. The compiler treats the result as a new value, so it does not hoist
// computations that use the result out of a loop.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// cvt.f32.f16
__device__ inline float cvt_f32_f16(unsigned short x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
}

// cvt.rn.f16.f32: round to nearest even.
__device__ inline unsigned short cvt_rn_f16_f32(float x) {
  unsigned short result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// st.shared.v4.b32
__device__ inline void st_shared_v4(unsigned shared, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// st.shared.b32
__device__ inline void st_shared(unsigned shared, unsigned x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// ld.shared.v4.b32
__device__ inline void ld_shared_v4(unsigned (&x)[4], unsigned shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// mul.rn.f32: keeps subnormal numbers, which plain products flush to zero (kernels are compiled
// with -ftz).
__device__ inline float mul_rn(float x, float y) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// div.rn.f32
__device__ inline float div_rn(float x, float y) {
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// rcp.approx.ftz.f32: 1 / x within 1 ulp.
__device__ inline float rcp_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ex2.approx.ftz.f32: 2^x within 2 ulp.
__device__ inline float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

#if __CUDA_ARCH__ >= 800

// cvt.rn.bf16.f32
__device__ inline unsigned short cvt_rn_bf16_f32(float x) {
  unsigned short result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// cvt.rn.bf16x2.f32: packs two values into one register, `low` in the lower half.
__device__ inline unsigned cvt_rn_bf16x2_f32(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// min.xorsign.abs.f32, or two instructions before sm_86: limits the magnitude of x to the positive
// `bound`, keeping the sign. NaN becomes a number of magnitude `bound`.
__device__ inline float min_magnitude(float x, float bound) {
#if __CUDA_ARCH__ >= 860
  float result;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
  return result;
#else
  return fminf(fmaxf(x, -bound), bound);
#endif
}

// cvt.rn.tf32.f32, or cvt.rna.tf32.f32 before sm_90: rounds to the nearest TF32 value.
__device__ inline unsigned cvt_tf32_f32(float x) {
  unsigned result;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
#endif
  return result;
}

// cvt.rn.f16x2.f32
__device__ inline unsigned cvt_rn_f16x2_f32(float low, float high) {
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// mul.rn.f16x2: keeps subnormal numbers.
__device__ inline unsigned mul_f16x2(unsigned x, unsigned y) {
  unsigned result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// cp.async: copies `Bytes` (4, 8 or 16) from global to shared memory. Only the first `source_bytes`
// are read; zeros fill the rest. 16-byte copies bypass L1.
template <int Bytes>
__device__ inline void cp_async(unsigned shared, const void* global, int source_bytes) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    static_assert(Bytes == 4 || Bytes == 8, "cp.async copies 4, 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(Bytes), "r"(source_bytes)
                 : "memory");
  }
}

// cp.async.commit_group
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: waits until at most `Pending` of this thread's groups are in flight.
template <int Pending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8
// of matrix l / 8.
__device__ inline void ldmatrix_x4(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// ldmatrix.x4.trans: like ldmatrix.x4, but transposes each matrix.
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

#if __CUDA_ARCH__ >= 900
// stmatrix.x4: stores four 8 x 8 matrices of 16-bit elements; the counterpart of ldmatrix.x4.
__device__ inline void stmatrix_x4(unsigned shared, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif  // __CUDA_ARCH__ >= 900

// mma.m16n8k16: d += a b, float16 operands, float32 accumulators.
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k16: d += a b, bfloat16 operands, float32 accumulators.
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k8: d += a b, TF32 operands (float32 whose low 13 bits are ignored).
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif  // __CUDA_ARCH__ >= 800

}  // namespace ptx
