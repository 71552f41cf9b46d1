// PTX wrappers for wide (vector) memory accesses: one inline function per instruction.
#pragma once

#if __CUDA_ARCH__ >= 800

namespace ptx {

// st.global.v4.f32. A plain store becomes four if the compiler cannot prove its alignment.
__device__ inline void st_global_v4(float* global, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// st.global.v2.b32
__device__ inline void st_global_v2(void* global, unsigned x, unsigned y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(x), "r"(y) : "memory");
}

// cp.async.ca of 16 bytes: like cp_async, but through L1, so that data which several warps load
// travels to the SM once.
__device__ inline void cp_async_through_l1(unsigned shared, const void* global,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(source_bytes)
               : "memory");
}

}  // namespace ptx

#endif  // __CUDA_ARCH__ >= 800
