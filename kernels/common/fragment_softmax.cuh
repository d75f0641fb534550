// SPDX-License-Identifier: MIT
// fragment_softmax.cuh: the running softmax on accumulators of tensor-core products, base 2.
//
// A thread holds two rows of its warp's 16, and of them the columns 8 j + c, 8 j + c + 1 with
// c = lane % 4 * 2: x[4 j], x[4 j + 1] of the upper row, x[4 j + 2], x[4 j + 3] of the lower. The
// four threads of a quad hold a whole row.
#pragma once

#include "common/config.cuh"
#include "common/online_softmax.cuh"
#include "ptx/ex2.cuh"

namespace cupyflash {

constexpr int kFragmentRows = 2;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Hides the keys from end[r] on of row r, counted from the thread's own first column.
template <int n>
__device__ __forceinline__ void hide_from(float (&S)[n], const int (&end)[kFragmentRows]) {
#pragma unroll
  for (int x = 0; x < n; ++x) {
    if (x / 4 * 8 + x % 2 >= end[x / 2 % 2]) S[x] = kMinusInfinity;
  }
}

// Hides the keys before first[r].
template <int n>
__device__ __forceinline__ void hide_before(float (&S)[n], const int (&first)[kFragmentRows]) {
#pragma unroll
  for (int x = 0; x < n; ++x) {
    if (x / 4 * 8 + x % 2 < first[x / 2 % 2]) S[x] = kMinusInfinity;
  }
}

// The largest power of two that is at most x, for a positive x; never below the least normal float.
__device__ __forceinline__ float power_of_two_below(float x) {
  const float power = __builtin_bit_cast(float, __builtin_bit_cast(unsigned, x) & 0x7f800000u);
  return power == 0.0f ? __builtin_bit_cast(float, 0x00800000u) : power;
}

// (m, l) of two rows. Scores s are counted in some unit u (unscaled products in softmax_scale);
// the weights are 2^(slope s - base), where slope = u log2(e) and base = slope m. m follows the rows' maxima only when a weight
// would exceed 2^kSlack: O is seldom rescaled, and O / l is the same for any m.
// One FMA makes the exponent: it rounds base, by the same amount in every weight of the row and in
// l, which cancels. From kLargeBase on that rounding would exceed what a 16-bit P can hold; two
// different scores are then so far apart that the larger has almost all the weight at any slope,
// and one that is a power of two makes slope m exact.
struct FragmentSoftmax {
  static constexpr float kSlack = 8.0f;
  static constexpr float kLargeBase = 67108864.0f;  // 2^26

  float m[kFragmentRows];  // of the products; -inf while nothing was seen
  float l[kFragmentRows];  // of the columns that this thread holds

  __device__ FragmentSoftmax() {
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      m[r] = kMinusInfinity;
      l[r] = 0.0f;
    }
  }

  // Turns S into weights. True if m has moved: then O is to be multiplied by keep.
  template <int n>
  __device__ __forceinline__ bool fold(float (&S)[n], float slope, float (&keep)[kFragmentRows]) {
    float row_slope[kFragmentRows], base[kFragmentRows];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      float top = m[r];
#pragma unroll
      for (int x = 2 * r; x < n; x += 4) top = fmaxf(top, fmaxf(S[x], S[x + 1]));
      top = quad_max(top);
      const float base_old = slope_at(m[r], slope) * m[r];
      const bool moves = slope * top - base_old > kSlack;
      m[r] = moves ? top : m[r];
      row_slope[r] = slope_at(m[r], slope);
      base[r] = exponent_base(row_slope[r] * m[r]);
      keep[r] = ex2_approx(fminf(base_old - base[r], 0.0f));
      l[r] *= keep[r];
      moved = moved || moves;
    }
#pragma unroll
    for (int x = 0; x < n; ++x) {
      const int r = x / 2 % 2;
      S[x] = ex2_approx(fmaf(S[x], row_slope[r], -base[r]));
    }
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int x = 2 * r; x < n; x += 4) {
        sum[0] += S[x];
        sum[1] += S[x + 1];
      }
      l[r] += sum[0] + sum[1];
    }
    return moved;
  }

  // After the last tile: what O is multiplied by, and lse = ln(2) (slope m + log2 l) in nats. The
  // approximate reciprocal and logarithm err by 2^-22, far less than P does.
  __device__ __forceinline__ void finish(float slope, float (&scale)[kFragmentRows],
                                         float (&lse)[kFragmentRows]) const {
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      const float sum = quad_sum(l[r]);
      scale[r] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
      lse[r] = sum == 0.0f ? kMinusInfinity : kLn2 * (slope * m[r] + __log2f(sum));
    }
  }

 private:
  static __device__ __forceinline__ float slope_at(float m, float slope) {
    return fabsf(slope * m) < kLargeBase ? slope : power_of_two_below(slope);
  }
};

template <int n>
__device__ __forceinline__ void scale_rows(float (&O)[n], const float (&factor)[kFragmentRows]) {
#pragma unroll
  for (int x = 0; x < n; ++x) O[x] *= factor[x / 2 % 2];
}

// The weights as the A operand of products over 16 keys each.
template <int n>
__device__ __forceinline__ void pack_weights(const float (&S)[n], unsigned (&P)[n / 8][4]) {
#pragma unroll
  for (int k = 0; k < n / 8; ++k) {
#pragma unroll
    for (int x = 0; x < 4; ++x) P[k][x] = pack2(S[8 * k + 2 * x], S[8 * k + 2 * x + 1]);
  }
}

}  // namespace cupyflash
