// wgmma.mma_async.m64nNk16: the asynchronous warpgroup product d (+)= a b of 16-bit operands with
// float32 accumulators. There is one specialization of `Wgmma` for each N that is a multiple of 16.
//
// Thread t of the warpgroup holds elements (row, column) of the 64 x N result as d[4 j + 2 h + c],
// with row = 16 (t / 32) + t % 32 / 4 + 8 h and column = 8 j + 2 (t % 4) + c. The 64 x 16 operand a
// has the same register layout, with two columns packed into each register.
#pragma once

#include "tile/element.cuh"
#include "ptx/sm90a.cuh"

#if __CUDA_ARCH__ == 900

template <class Element, int N>
struct Wgmma;

// The accumulator registers as asm text and as asm operands, built up eight at a time.

#define ACCUMULATORS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ACCUMULATORS_16 ACCUMULATORS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ACCUMULATORS_24 ACCUMULATORS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ACCUMULATORS_32 ACCUMULATORS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ACCUMULATORS_40 ACCUMULATORS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ACCUMULATORS_48 ACCUMULATORS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ACCUMULATORS_56 ACCUMULATORS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ACCUMULATORS_64 ACCUMULATORS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ACCUMULATORS_72 ACCUMULATORS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ACCUMULATORS_80 ACCUMULATORS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define ACCUMULATORS_88 ACCUMULATORS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ACCUMULATORS_96 ACCUMULATORS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define ACCUMULATORS_104 ACCUMULATORS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define ACCUMULATORS_112 ACCUMULATORS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define ACCUMULATORS_120 ACCUMULATORS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define ACCUMULATORS_128 ACCUMULATORS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT_OF(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPERANDS_8 EIGHT_OF(0)
#define OPERANDS_16 OPERANDS_8, EIGHT_OF(8)
#define OPERANDS_24 OPERANDS_16, EIGHT_OF(16)
#define OPERANDS_32 OPERANDS_24, EIGHT_OF(24)
#define OPERANDS_40 OPERANDS_32, EIGHT_OF(32)
#define OPERANDS_48 OPERANDS_40, EIGHT_OF(40)
#define OPERANDS_56 OPERANDS_48, EIGHT_OF(48)
#define OPERANDS_64 OPERANDS_56, EIGHT_OF(56)
#define OPERANDS_72 OPERANDS_64, EIGHT_OF(64)
#define OPERANDS_80 OPERANDS_72, EIGHT_OF(72)
#define OPERANDS_88 OPERANDS_80, EIGHT_OF(80)
#define OPERANDS_96 OPERANDS_88, EIGHT_OF(88)
#define OPERANDS_104 OPERANDS_96, EIGHT_OF(96)
#define OPERANDS_112 OPERANDS_104, EIGHT_OF(104)
#define OPERANDS_120 OPERANDS_112, EIGHT_OF(112)
#define OPERANDS_128 OPERANDS_120, EIGHT_OF(120)

// The two macros below define one product each. SHAPE is the instruction's name from k on. FLAGS
// are its immediate operands: the signs of a and b and, for 16-bit types, whether each operand in
// shared memory is transposed (k not contiguous). Asm operands i0, i1, ... follow the COUNT
// accumulators. The product overwrites d if `accumulate` is 0. Here a and b are in shared memory.
#define WGMMA_FROM_SHARED(NAME, SHAPE, FLAGS, N, COUNT, i0, i1, i2)                                \
  __device__ static void NAME(float (&d)[COUNT], unsigned long long a, unsigned long long b,       \
                              int accumulate) {                                                    \
    asm volatile(                                                                                  \
        "{\n"                                                                                      \
        ".reg .pred accumulate;\n"                                                                 \
        "setp.ne.b32 accumulate, %" #i2                                                            \
        ", 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #N SHAPE                                               \
        " {" ACCUMULATORS_##COUNT "}, %" #i0 ", %" #i1                                             \
                                  ", accumulate, " FLAGS ";\n"                                     \
                                  "}"                                                              \
        : OPERANDS_##COUNT                                                                         \
        : "l"(a), "l"(b), "r"(accumulate));                                                        \
  }

// Defines a product with a in registers and b in shared memory.
#define WGMMA_FROM_REGISTERS(NAME, SHAPE, FLAGS, N, COUNT, i0, i1, i2, i3, i4, i5)                 \
  __device__ static void NAME(float (&d)[COUNT], const unsigned* a, unsigned long long b,          \
                              int accumulate) {                                                    \
    asm volatile(                                                                                  \
        "{\n"                                                                                      \
        ".reg .pred accumulate;\n"                                                                 \
        "setp.ne.b32 accumulate, %" #i5                                                            \
        ", 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #N SHAPE                                               \
        " {" ACCUMULATORS_##COUNT "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4             \
                                  ", accumulate, " FLAGS ";\n"                                     \
                                  "}"                                                              \
        : OPERANDS_##COUNT                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                    \
  }

#define WGMMA_16_BITS(TYPE) "k16.f32." TYPE "." TYPE

#define WGMMA(ELEMENT, TYPE, N, COUNT, i0, i1, i2, i3, i4, i5)                                     \
  template <>                                                                                      \
  struct Wgmma<ELEMENT, N> {                                                                       \
    /* a and b have k contiguous. */                                                               \
    WGMMA_FROM_SHARED(multiply, WGMMA_16_BITS(TYPE), "1, 1, 0, 0", N, COUNT, i0, i1, i2)           \
    /* b has k contiguous in the first function, n in the second. */                               \
    WGMMA_FROM_REGISTERS(multiply_k_contiguous, WGMMA_16_BITS(TYPE), "1, 1, 0", N, COUNT, i0, i1,  \
                         i2, i3, i4, i5)                                                           \
    WGMMA_FROM_REGISTERS(multiply_n_contiguous, WGMMA_16_BITS(TYPE), "1, 1, 1", N, COUNT, i0, i1,  \
                         i2, i3, i4, i5)                                                           \
  };
#define WGMMA_FOR_BOTH_TYPES(N, COUNT, ...)   \
  WGMMA(half_t, "f16", N, COUNT, __VA_ARGS__) \
  WGMMA(bfloat16_t, "bf16", N, COUNT, __VA_ARGS__)

// Expands WITH(N, COUNT, i0, i1, ...) for each N: see WGMMA_FROM_REGISTERS for the arguments.
#define WGMMA_OF_EACH_WIDTH(WITH)                                                                  \
  WITH(16, 8, 8, 9, 10, 11, 12, 13)                                                                \
  WITH(32, 16, 16, 17, 18, 19, 20, 21)                                                             \
  WITH(48, 24, 24, 25, 26, 27, 28, 29)                                                             \
  WITH(64, 32, 32, 33, 34, 35, 36, 37)                                                             \
  WITH(80, 40, 40, 41, 42, 43, 44, 45)                                                             \
  WITH(96, 48, 48, 49, 50, 51, 52, 53)                                                             \
  WITH(112, 56, 56, 57, 58, 59, 60, 61)                                                            \
  WITH(128, 64, 64, 65, 66, 67, 68, 69)                                                            \
  WITH(144, 72, 72, 73, 74, 75, 76, 77)                                                            \
  WITH(160, 80, 80, 81, 82, 83, 84, 85)                                                            \
  WITH(176, 88, 88, 89, 90, 91, 92, 93)                                                            \
  WITH(192, 96, 96, 97, 98, 99, 100, 101)                                                          \
  WITH(208, 104, 104, 105, 106, 107, 108, 109)                                                     \
  WITH(224, 112, 112, 113, 114, 115, 116, 117)                                                     \
  WITH(240, 120, 120, 121, 122, 123, 124, 125)                                                     \
  WITH(256, 128, 128, 129, 130, 131, 132, 133)

WGMMA_OF_EACH_WIDTH(WGMMA_FOR_BOTH_TYPES)

#endif  // __CUDA_ARCH__ == 900
