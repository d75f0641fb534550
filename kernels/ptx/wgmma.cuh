// SPDX-License-Identifier: MIT
// wgmma.cuh: matrix products of a warpgroup, asynchronous, accumulators in registers.
// PTX manual, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// D (64 x n, float) += A (64 x 16) B (16 x n), A and B of 16-bit elements. Thread t of the
// warpgroup holds of D, with w = t / 32, g = t % 32 / 4 and c = t % 4 * 2, the elements
//   d[4 j], d[4 j + 1]        row 16 w + g,      columns 8 j + c, 8 j + c + 1
//   d[4 j + 2], d[4 j + 3]    row 16 w + g + 8,  the same columns
// and of an A in registers the same of two neighbouring j, as pairs of elements (manual, figures
// "WGMMA .m64nNk16 register fragment layout").
#pragma once

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "wgmma exists on sm_90a only: build with -arch=sm_90a"
#endif

#include "ptx/shared_address.cuh"

namespace cupyflash {

enum class MmaType { kF16, kBf16 };

// Swizzle modes by their number in a descriptor: 16-byte units of each 8 rows are permuted within
// rows of 128 or 64 bytes.
enum class Swizzle : unsigned { k128 = 1, k64 = 2 };

// Matrix descriptor; manual, "Matrix Descriptor Format": addresses and offsets count 16 bytes.
// stride_bytes lies between groups of 8 rows. leading_bytes lies between swizzled slabs along the
// contiguous axis; only a transposed B wider than one slab has more than one of them.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* matrix, Swizzle swizzle,
                                                               unsigned leading_bytes,
                                                               unsigned stride_bytes) {
  return static_cast<unsigned long long>(swizzle) << 62 |
         static_cast<unsigned long long>(stride_bytes / 16) << 32 |
         static_cast<unsigned long long>(leading_bytes / 16) << 16 |
         (shared_address(matrix) & 0x3ffff) / 16;
}

// wgmma.fence.sync.aligned; sm_90a; "wgmma.fence". Before the first wgmma, and whenever registers
// of A or D were written since the last one.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group.sync.aligned; sm_90a; "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned pending; sm_90a; "wgmma.wait_group". All but the newest `pending`
// groups are complete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// No instruction: keeps the compiler from moving a use of d to before the wait that stands above.
template <int n>
__device__ __forceinline__ void wgmma_use(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Numbers and constraints of the accumulators, eight at a time: an instruction's text and operands
// must be spelt out for each n.
#define CUPYFLASH_TEXT_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUPYFLASH_TEXT_2 CUPYFLASH_TEXT_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUPYFLASH_TEXT_3 CUPYFLASH_TEXT_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUPYFLASH_TEXT_4 CUPYFLASH_TEXT_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUPYFLASH_TEXT_5 CUPYFLASH_TEXT_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUPYFLASH_TEXT_6 CUPYFLASH_TEXT_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUPYFLASH_TEXT_7 CUPYFLASH_TEXT_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUPYFLASH_TEXT_8 CUPYFLASH_TEXT_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUPYFLASH_TEXT_9 CUPYFLASH_TEXT_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUPYFLASH_TEXT_10 CUPYFLASH_TEXT_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUPYFLASH_TEXT_11 CUPYFLASH_TEXT_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUPYFLASH_TEXT_12 CUPYFLASH_TEXT_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUPYFLASH_TEXT_13 CUPYFLASH_TEXT_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUPYFLASH_TEXT_14 CUPYFLASH_TEXT_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUPYFLASH_TEXT_15 CUPYFLASH_TEXT_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUPYFLASH_TEXT_16 CUPYFLASH_TEXT_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUPYFLASH_EIGHT(i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CUPYFLASH_OPERANDS_1 CUPYFLASH_EIGHT(0)
#define CUPYFLASH_OPERANDS_2 CUPYFLASH_OPERANDS_1, CUPYFLASH_EIGHT(8)
#define CUPYFLASH_OPERANDS_3 CUPYFLASH_OPERANDS_2, CUPYFLASH_EIGHT(16)
#define CUPYFLASH_OPERANDS_4 CUPYFLASH_OPERANDS_3, CUPYFLASH_EIGHT(24)
#define CUPYFLASH_OPERANDS_5 CUPYFLASH_OPERANDS_4, CUPYFLASH_EIGHT(32)
#define CUPYFLASH_OPERANDS_6 CUPYFLASH_OPERANDS_5, CUPYFLASH_EIGHT(40)
#define CUPYFLASH_OPERANDS_7 CUPYFLASH_OPERANDS_6, CUPYFLASH_EIGHT(48)
#define CUPYFLASH_OPERANDS_8 CUPYFLASH_OPERANDS_7, CUPYFLASH_EIGHT(56)
#define CUPYFLASH_OPERANDS_9 CUPYFLASH_OPERANDS_8, CUPYFLASH_EIGHT(64)
#define CUPYFLASH_OPERANDS_10 CUPYFLASH_OPERANDS_9, CUPYFLASH_EIGHT(72)
#define CUPYFLASH_OPERANDS_11 CUPYFLASH_OPERANDS_10, CUPYFLASH_EIGHT(80)
#define CUPYFLASH_OPERANDS_12 CUPYFLASH_OPERANDS_11, CUPYFLASH_EIGHT(88)
#define CUPYFLASH_OPERANDS_13 CUPYFLASH_OPERANDS_12, CUPYFLASH_EIGHT(96)
#define CUPYFLASH_OPERANDS_14 CUPYFLASH_OPERANDS_13, CUPYFLASH_EIGHT(104)
#define CUPYFLASH_OPERANDS_15 CUPYFLASH_OPERANDS_14, CUPYFLASH_EIGHT(112)
#define CUPYFLASH_OPERANDS_16 CUPYFLASH_OPERANDS_15, CUPYFLASH_EIGHT(120)

// The two wrappers for one n; `eights` is n / 16, and a to h are the operand numbers that follow
// those of the accumulators.
//   wgmma.mma_async.sync.aligned.m64nNk16.f32.type.type {d}, a-desc, b-desc, p, 1, 1, 0, trans-b
//   wgmma.mma_async.sync.aligned.m64nNk16.f32.type.type {d}, {a0..a3}, b-desc, p, 1, 1, trans-b
// sm_90a; "wgmma.mma_async". accumulate = false makes D = A B; transpose_b takes B stored with its
// n columns contiguous.
#define CUPYFLASH_WGMMA_SS_TEXT(n, eights, type, a, b, c, e)                                   \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                      \
  ", 0;\n"                                                                                     \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CUPYFLASH_TEXT_##eights \
      "}, %" #a ", %" #b ", p, 1, 1, 0, %" #e ";\n}"
#define CUPYFLASH_WGMMA_RS_TEXT(n, eights, type, a, b, c, e, f, g, h)                          \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                      \
  ", 0;\n"                                                                                     \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CUPYFLASH_TEXT_##eights \
      "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1, %" #h ";\n}"
#define CUPYFLASH_WGMMA(n, eights, a, b, c, e, f, g, h)                                          \
  template <MmaType type, bool accumulate, bool transpose_b>                                     \
  __device__ __forceinline__ void wgmma(float (&d)[n / 2], unsigned long long a_descriptor,      \
                                        unsigned long long b_descriptor) {                       \
    if constexpr (type == MmaType::kBf16) {                                                      \
      asm volatile(CUPYFLASH_WGMMA_SS_TEXT(n, eights, "bf16", a, b, c, e)                        \
                   : CUPYFLASH_OPERANDS_##eights                                                 \
                   : "l"(a_descriptor), "l"(b_descriptor), "n"(accumulate), "n"(transpose_b));   \
    } else {                                                                                     \
      asm volatile(CUPYFLASH_WGMMA_SS_TEXT(n, eights, "f16", a, b, c, e)                         \
                   : CUPYFLASH_OPERANDS_##eights                                                 \
                   : "l"(a_descriptor), "l"(b_descriptor), "n"(accumulate), "n"(transpose_b));   \
    }                                                                                            \
  }                                                                                              \
  template <MmaType type, bool accumulate, bool transpose_b>                                     \
  __device__ __forceinline__ void wgmma(float (&d)[n / 2], const unsigned (&a_registers)[4],     \
                                        unsigned long long b_descriptor) {                       \
    if constexpr (type == MmaType::kBf16) {                                                      \
      asm volatile(CUPYFLASH_WGMMA_RS_TEXT(n, eights, "bf16", a, b, c, e, f, g, h)               \
                   : CUPYFLASH_OPERANDS_##eights                                                 \
                   : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]),              \
                     "r"(a_registers[3]), "l"(b_descriptor), "n"(accumulate), "n"(transpose_b)); \
    } else {                                                                                     \
      asm volatile(CUPYFLASH_WGMMA_RS_TEXT(n, eights, "f16", a, b, c, e, f, g, h)                \
                   : CUPYFLASH_OPERANDS_##eights                                                 \
                   : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]),              \
                     "r"(a_registers[3]), "l"(b_descriptor), "n"(accumulate), "n"(transpose_b)); \
    }                                                                                            \
  }

// Every n that a tile may have, used or not: which one is best is found by trying rows of the tile
// table, and what no build uses costs it nothing.
CUPYFLASH_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
CUPYFLASH_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
CUPYFLASH_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
CUPYFLASH_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
CUPYFLASH_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
CUPYFLASH_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
CUPYFLASH_WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
CUPYFLASH_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
CUPYFLASH_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
CUPYFLASH_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
CUPYFLASH_WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
CUPYFLASH_WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
CUPYFLASH_WGMMA(240, 15, 120, 121, 122, 123, 124, 125, 126)
CUPYFLASH_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef CUPYFLASH_WGMMA
#undef CUPYFLASH_WGMMA_RS_TEXT
#undef CUPYFLASH_WGMMA_SS_TEXT

}  // namespace cupyflash
