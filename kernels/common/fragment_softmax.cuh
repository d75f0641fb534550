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

__device__ __forceinline__ bool quad_any(bool x) {
  return __ballot_sync(kFullWarp, x) >> threadIdx.x % kWarpSize / 4 * 4 & 0xf;
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

// (m, l) of two rows. Scores s are counted in some unit u (unscaled products in softmax_scale); the
// weights are 2^(slope s - base), where slope = u log2(e) and base = slope m. O / l is the same for
// any m, and P, O and l hold numbers much larger than 1 as well as those below: m need not be the
// maximum, only near enough to it. So it is looked for where a row begins and where position
// masks tiles (fold); from there on tiles are folded by the m that is there (fold_steady), and a
// new one is looked for only by rows that get a weight beyond kRoom (fold_grown).
// One FMA makes the exponent: it rounds base, by the same amount in every weight of the row and in
// l, which cancels. From kLargeBase on that rounding would exceed what a 16-bit P can hold: there m
// is taken from the scores first, which is exact for those that are near it, and base is 0.
struct FragmentSoftmax {
  static constexpr float kSlack = 8.0f;             // fold lets m be, while weights stay below 2^8
  static constexpr float kRoom = 16384.0f;          // 2^14, far below 65,504, what float16 ends at
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
    float base[kFragmentRows], offset[kFragmentRows];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      const float top = quad_max(fmaxf(m[r], row_max(S, r)));
      const float m_old = m[r];
      const bool moves = slope * (top - m_old) > kSlack;  // false where nothing was seen yet
      m[r] = moves ? top : m_old;
      const float factor = rebase(m_old, m[r], slope, base[r], offset[r]);
      keep[r] = moves ? factor : 1.0f;
      l[r] *= keep[r];
      moved = moved || moves;
    }
    subtract(S, offset);
#pragma unroll
    for (int x = 0; x < n; ++x) S[x] = ex2_approx(fmaf(S[x], slope, -base[x / 2 % 2]));
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) l[r] += row_sum(S, r);
    return moved;
  }

  // Whether fold_steady may take what comes: every row of the warp has seen a key, and has a base
  // that one FMA is exact enough for. The same in all lanes.
  __device__ __forceinline__ bool steady(float slope) const {
    return __all_sync(kFullWarp,
                      fabsf(slope * m[0]) < kLargeBase && fabsf(slope * m[1]) < kLargeBase);
  }

  // Turns S into weights by the m that is there. True, in all lanes, if some row has grown too
  // large for it: then S is to be made again in the rows that `grown` tells of, for fold_grown.
  template <int n>
  __device__ __forceinline__ bool fold_steady(float (&S)[n], float slope,
                                              bool (&grown)[kFragmentRows]) {
    const float base[] = {slope * m[0], slope * m[1]};
#pragma unroll
    for (int x = 0; x < n; ++x) S[x] = ex2_approx(fmaf(S[x], slope, -base[x / 2 % 2]));
    float sum[kFragmentRows];
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      sum[r] = row_sum(S, r);
      grown[r] = sum[r] > kRoom;
    }
    if (__any_sync(kFullWarp, grown[0] || grown[1])) {
#pragma unroll
      for (int r = 0; r < kFragmentRows; ++r) grown[r] = quad_any(grown[r]);
      return true;
    }
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) l[r] += sum[r];
    return false;
  }

  // S holds scores in the rows that have grown, and weights in the others, whose result is, to the
  // bit, what it is without such a neighbour. O is to be multiplied by keep.
  template <int n>
  __device__ __forceinline__ void fold_grown(float (&S)[n], float slope,
                                             const bool (&grown)[kFragmentRows],
                                             float (&keep)[kFragmentRows]) {
    float base[kFragmentRows], offset[kFragmentRows];
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      const float top = quad_max(fmaxf(m[r], row_max(S, r)));
      const float m_old = m[r];
      m[r] = grown[r] ? top : m_old;
      const float factor = rebase(m_old, m[r], slope, base[r], offset[r]);
      keep[r] = grown[r] ? factor : 1.0f;
    }
    subtract(S, offset);
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
#pragma unroll
      for (int x = 2 * r; x < n; x += 4) {
        S[x] = grown[r] ? ex2_approx(fmaf(S[x], slope, -base[r])) : S[x];
        S[x + 1] = grown[r] ? ex2_approx(fmaf(S[x + 1], slope, -base[r])) : S[x + 1];
      }
      l[r] = fmaf(l[r], keep[r], row_sum(S, r));
    }
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
      lse[r] = sum == 0.0f ? kMinusInfinity : fmaf(kLn2 * slope, m[r], kLn2 * __log2f(sum));
    }
  }

 private:
  // Of the columns that this thread holds.
  template <int n>
  static __device__ __forceinline__ float row_max(const float (&S)[n], int r) {
    float top = kMinusInfinity;
#pragma unroll
    for (int x = 2 * r; x < n; x += 4) top = fmaxf(top, fmaxf(S[x], S[x + 1]));
    return top;
  }
  template <int n>
  static __device__ __forceinline__ float row_sum(const float (&S)[n], int r) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int x = 2 * r; x < n; x += 4) {
      sum[0] += S[x];
      sum[1] += S[x + 1];
    }
    return sum[0] + sum[1];
  }

  // What the weights of a row with this m are made with: scores less offset, times slope, less
  // base. Returns what sums that were made with a smaller m are to be multiplied by.
  static __device__ __forceinline__ float rebase(float m_old, float m, float slope, float& base,
                                                 float& offset) {
    const bool large = fabsf(slope * m) >= kLargeBase && m != kMinusInfinity;
    offset = large ? m : 0.0f;
    base = large ? 0.0f : exponent_base(slope * m);
    // The old base as it was rounded then, and not within an FMA.
    const float step = large ? slope * (m_old - m) : __fmul_rn(slope, m_old) - base;
    return ex2_approx(fminf(step, 0.0f));
  }

  // Takes its offset, nearly always 0, from each row.
  template <int n>
  static __device__ __forceinline__ void subtract(float (&S)[n],
                                                  const float (&offset)[kFragmentRows]) {
    if (!__any_sync(kFullWarp, offset[0] != 0.0f || offset[1] != 0.0f)) return;
#pragma unroll
    for (int x = 0; x < n; ++x) S[x] -= offset[x / 2 % 2];
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
