// SPDX-License-Identifier: MIT
// online_softmax.cuh: what one warp does to one row of scores (notes, page 2).
#pragma once

#include "common/config.cuh"

namespace cupyflash {

constexpr acc kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);

// e^x; the difference x of two scores is taken before the change of base, so that the error does
// not grow with the scores. exp2f errs by 2 ulp at most.
__device__ __forceinline__ float exp_nat(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return exp2f(x * kLog2E);
}
__device__ __forceinline__ double exp_nat(double x) { return exp(x); }

// Over a warp, or over each `width` neighbouring lanes of it.
template <int width = kWarpSize>
__device__ __forceinline__ acc warp_max(acc x) {
#pragma unroll
  for (int lanes = width / 2; lanes > 0; lanes /= 2) {
    const acc other = __shfl_xor_sync(kFullWarp, x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

template <int width = kWarpSize>
__device__ __forceinline__ acc warp_sum(acc x) {
#pragma unroll
  for (int lanes = width / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

// A max of -inf (nothing seen yet) is a base of 0: e^(-inf - 0) = 0, never e^(-inf + inf) = NaN.
__device__ __forceinline__ acc exponent_base(acc m) { return m == kMinusInfinity ? acc(0) : m; }

}  // namespace cupyflash
