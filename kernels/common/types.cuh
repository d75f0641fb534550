// SPDX-License-Identifier: MIT
// types.cuh: number types by their numpy names, their conversions, 16-byte vectors.
#pragma once

// The headers of the 16-bit types cost most of a build: only the one that is used is read.
#define CUPYFLASH_HEADER_float16 1
#define CUPYFLASH_HEADER_bfloat16 2
#define CUPYFLASH_HEADER_float32 3
#define CUPYFLASH_HEADER_float64 4
#define CUPYFLASH_CONCAT_(a, b) a##b
#define CUPYFLASH_CONCAT(a, b) CUPYFLASH_CONCAT_(a, b)
#define CUPYFLASH_HEADER CUPYFLASH_CONCAT(CUPYFLASH_HEADER_, CUPYFLASH_ELEMENT)

#if CUPYFLASH_HEADER == CUPYFLASH_HEADER_float16
#include <cuda_fp16.h>
#elif CUPYFLASH_HEADER == CUPYFLASH_HEADER_bfloat16
#include <cuda_bf16.h>
#endif

namespace cupyflash {

using int32 = int;
using int64 = long long;
using uint8 = unsigned char;

using float32 = float;
using float64 = double;

// The dtype of scores, statistics and sums.
template <class T>
struct accumulator {
  using type = float;
};
template <>
struct accumulator<double> {
  using type = double;
};

__device__ __forceinline__ float to_acc(float x) { return x; }
__device__ __forceinline__ double to_acc(double x) { return x; }

template <class T, class Acc>
struct from_acc_ {
  static __device__ __forceinline__ T convert(Acc x) { return static_cast<T>(x); }
};

#if CUPYFLASH_HEADER == CUPYFLASH_HEADER_float16
using float16 = __half;
using element2 = __half2;
__device__ __forceinline__ float to_acc(__half x) { return __half2float(x); }
template <>
struct from_acc_<__half, float> {
  static __device__ __forceinline__ __half convert(float x) { return __float2half_rn(x); }
};
// Two elements in one register, the first in the lower half.
__device__ __forceinline__ unsigned pack2(float lower, float upper) {
  const __half2 pair = __floats2half2_rn(lower, upper);
  return reinterpret_cast<const unsigned&>(pair);
}
#elif CUPYFLASH_HEADER == CUPYFLASH_HEADER_bfloat16
using bfloat16 = __nv_bfloat16;
using element2 = __nv_bfloat162;
__device__ __forceinline__ float to_acc(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
struct from_acc_<__nv_bfloat16, float> {
  static __device__ __forceinline__ __nv_bfloat16 convert(float x) {
    return __float2bfloat16_rn(x);
  }
};
__device__ __forceinline__ unsigned pack2(float lower, float upper) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(lower, upper);
  return reinterpret_cast<const unsigned&>(pair);
}
#endif

// Rounds to nearest, ties to even.
template <class T, class Acc>
__device__ __forceinline__ T from_acc(Acc x) {
  return from_acc_<T, Acc>::convert(x);
}

template <class T, class U>
struct is_same {
  static constexpr bool value = false;
};
template <class T>
struct is_same<T, T> {
  static constexpr bool value = true;
};

// The widest access of one thread: 16 bytes, 16-byte aligned.
template <class T>
struct alignas(16) Vec16 {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

template <class T>
__device__ __forceinline__ Vec16<T> load_vec16(const T* p) {
  return *reinterpret_cast<const Vec16<T>*>(p);
}

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64 ceil_div(int64 a, int64 b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

}  // namespace cupyflash
