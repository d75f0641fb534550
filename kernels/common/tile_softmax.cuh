// SPDX-License-Identifier: MIT
// tile_softmax.cuh: the running softmax of a warp's rows, in base 2. float64 has one of its own.
#pragma once

#include "common/online_softmax.cuh"
#include "common/tile_config.cuh"
#include "ptx/ex2.cuh"

namespace cupyflash {

__device__ __forceinline__ float exp_base2(float x) { return ex2_approx(x); }
__device__ __forceinline__ double exp_base2(double x) { return exp2(x); }
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
// Never fused with what follows.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

// The four lanes that share a row.
__device__ __forceinline__ acc row_max(acc x) {
  x = max(x, __shfl_xor_sync(kFullWarp, x, 1));
  return max(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ acc row_sum(acc x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// (m, l) of the rows that a lane shares. Weights are 2^(slope (s - m)), slope = scale log2(e). m is
// a bound rather than the max itself: it moves only when some score of its row has outgrown it by a
// factor of 2^kSlack in weight, so that O is seldom rescaled; l and O are exact for any m. Rows
// don't depend on each other.
class TileSoftmax {
 public:
  // 16-bit P: slope s - slope m in one FMA, slope m having been rounded, by the same amount in all
  // weights of a row and in l. From kLarge on that is too coarse; then, and for wider P, m is
  // subtracted first.
  static constexpr bool kSubtractFirst = sizeof(element) > 2;
  static constexpr acc kLarge = 65536;
  static constexpr acc kSlack = 8;
  // Whether slope m stays in registers, which general variants have none left for.
  static constexpr bool kKeepBase = !kGeneral;

  // scale: what the products are multiplied by; positive.
  __device__ explicit TileSoftmax(acc scale) : slope_(scale * acc(1.442695040888963407)) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m_[m][h] = kMinusInfinity;
        base_[m][h] = 0;
        l_[m][h] = 0;
      }
    }
  }

  __device__ __forceinline__ acc slope() const { return slope_; }

  // Makes m fit S, and rescales O where it had to move. A lane looks at its own columns only, until
  // one of them has outgrown m.
  template <int n>
  __device__ __forceinline__ void settle(acc (&S)[kFragments][kKeyTiles][4],
                                         acc (&O)[kFragments][n][4]) {
    acc top[kFragments][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc x = max(S[m][0][2 * h], S[m][0][2 * h + 1]);
#pragma unroll
        for (int k = 1; k < kKeyTiles; ++k) x = max(x, max(S[m][k][2 * h], S[m][k][2 * h + 1]));
        top[m][h] = x;
        grown |= outgrown(x, m_[m][h]);
      }
    }
    if (__any_sync(kFullWarp, grown)) raise(top, O);
  }

  // Turns S into weights and adds them to l.
  __device__ __forceinline__ void weigh(acc (&S)[kFragments][kKeyTiles][4]) {
    if (kSubtractFirst || large()) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const acc first = subtracts_first(m_[m][h]) ? exponent_base(m_[m][h]) : acc(0);
#pragma unroll
          for (int k = 0; k < kKeyTiles; ++k) {
            S[m][k][2 * h] -= first;
            S[m][k][2 * h + 1] -= first;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc sum[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            acc& s = S[m][k][2 * h + e];
            s = exp_base2(kSubtractFirst ? s * slope_ : fused(s, slope_, -base(m, h)));
            sum[e] += s;
          }
        }
        l_[m][h] += sum[0] + sum[1];
      }
    }
  }

  // After the last tile: what O is to be multiplied by, and lse = scale m + ln(l) in nats.
  __device__ __forceinline__ void finish(acc scale, int m, int h, acc& factor, acc& lse) const {
    const acc l = row_sum(l_[m][h]);
    factor = l == acc(0) ? acc(0) : acc(1) / l;
    lse = l == acc(0) ? kMinusInfinity : scale * m_[m][h] + log(l);
  }

 private:
  __device__ __forceinline__ bool outgrown(acc top, acc m) const {
    return (top - m) * slope_ > kSlack;
  }
  __device__ __forceinline__ bool subtracts_first(acc m) const {
    const acc base = product(exponent_base(m), slope_);
    return kSubtractFirst || base > kLarge || base < -kLarge;
  }

  // slope m, rounded; 0 while m is -inf, and where it is subtracted first.
  __device__ __forceinline__ acc base_of(acc m) const {
    return subtracts_first(m) ? acc(0) : product(exponent_base(m), slope_);
  }
  __device__ __forceinline__ acc base(int m, int h) const {
    return kKeepBase ? base_[m][h] : base_of(m_[m][h]);
  }
  // Whether m of some row is subtracted first.
  __device__ __forceinline__ bool large() const {
    bool some = false;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) some |= subtracts_first(m_[m][h]);
    }
    return some;
  }

  template <int n>
  __device__ __forceinline__ void raise(const acc (&top)[kFragments][2],
                                        acc (&O)[kFragments][n][4]) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const acc old = m_[m][h];
        const acc top_of_row = row_max(top[m][h]);
        if (outgrown(top_of_row, old)) m_[m][h] = top_of_row;
        const acc now = exponent_base(m_[m][h]);
        const acc base = product(now, slope_);
        const bool first = subtracts_first(now);
        // The weights so far are relative to slope m as it was rounded, so this factor is too.
        // Where nothing was seen yet, O and l are 0.
        const acc keep = exp_base2(first ? (old - now) * slope_ : product(old, slope_) - base);
        base_[m][h] = first ? acc(0) : base;
        l_[m][h] *= keep;
#pragma unroll
        for (int k = 0; k < n; ++k) {
          O[m][k][2 * h] *= keep;
          O[m][k][2 * h + 1] *= keep;
        }
      }
    }
  }

  acc slope_;
  acc m_[kFragments][2];
  acc base_[kFragments][2];
  acc l_[kFragments][2];
};

}  // namespace cupyflash
