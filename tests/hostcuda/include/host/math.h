// SPDX-License-Identifier: MIT
// math.h: CUDA's device functions by libm. The fast ones (__expf, __fdividef) are exact here up to
// libm's rounding: their error on a GPU is not what this layer is for.
#pragma once

#include <math.h>

#include <cstdio>

#include "host/runtime.h"

// ---- reinterpretation
// -----------------------------------------------------------------------------------------

namespace host {
template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}
}  // namespace host

inline float __int_as_float(int x) { return host::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return host::bit_cast<float>(x); }
inline int __float_as_int(float x) { return host::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return host::bit_cast<unsigned>(x); }
inline double __longlong_as_double(long long x) { return host::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return host::bit_cast<long long>(x); }
inline int __double2hiint(double x) { return int(host::bit_cast<long long>(x) >> 32); }
inline int __double2loint(double x) { return int(host::bit_cast<long long>(x)); }
inline double __hiloint2double(int hi, int lo) {
  return host::bit_cast<double>((unsigned long long)(unsigned)hi << 32 | (unsigned)lo);
}

// ---- minimum and maximum, as overloads
// ------------------------------------------------------------------------

#define HOSTCUDA_MIN_MAX(type)                              \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
HOSTCUDA_MIN_MAX(int)
HOSTCUDA_MIN_MAX(unsigned)
HOSTCUDA_MIN_MAX(long)
HOSTCUDA_MIN_MAX(unsigned long)
HOSTCUDA_MIN_MAX(long long)
HOSTCUDA_MIN_MAX(unsigned long long)
#undef HOSTCUDA_MIN_MAX
// A NaN loses against a number, as with fmax and fmin.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ---- arithmetic
// -----------------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// ---- integers
// -------------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return unsigned((unsigned long long)x * y >> 32);
}
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xf;
    unsigned byte = unsigned(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// ---- the half-precision functions that cuda_fp16.h and cuda_bf16.h give to device code only
// ---------------------

inline __half __hfma(__half a, __half b, __half c) {
  // The product of two halves is exact in double and so is the sum, up to 80 bits apart: one
  // rounding.
  return __double2half(double(__half2float(a)) * double(__half2float(b)) + double(__half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)),
                        __hfma(__high2half(a), __high2half(b), __high2half(c)));
}

// ---- memory and control
// -----------------------------------------------------------------------------------------

// Loads and stores with a cache hint are plain ones.
#define HOSTCUDA_LOAD(name)         \
  template <class T>                \
  inline T name(const T* address) { \
    return *address;                \
  }
HOSTCUDA_LOAD(__ldg)
HOSTCUDA_LOAD(__ldcg)
HOSTCUDA_LOAD(__ldca)
HOSTCUDA_LOAD(__ldcs)
HOSTCUDA_LOAD(__ldlu)
HOSTCUDA_LOAD(__ldcv)
#undef HOSTCUDA_LOAD
#define HOSTCUDA_STORE(name)              \
  template <class T>                      \
  inline void name(T* address, T value) { \
    *address = value;                     \
  }
HOSTCUDA_STORE(__stwb)
HOSTCUDA_STORE(__stcg)
HOSTCUDA_STORE(__stcs)
HOSTCUDA_STORE(__stwt)
#undef HOSTCUDA_STORE

inline bool __isShared(const void* address) { return host::is_shared(address); }
[[noreturn]] inline void __trap(host::Place place = host::Place::here()) {
  host::fault(place, "__trap");
}

#undef assert
#define assert(condition) \
  ((condition) ? void(0) : host::fault(host::Place::here(), "assertion failed: %s", #condition))
