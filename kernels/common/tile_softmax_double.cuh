// SPDX-License-Identifier: MIT
// tile_softmax_double.cuh: as tile_softmax.cuh, of float64, in few instructions: all of what is
// unusual is found by two integer operations a score, and done elsewhere.
#pragma once

#include "common/online_softmax.cuh"
#include "common/tile_config.cuh"

namespace cupyflash {

// What lane 8 t + 4 e has, for row g = 2 t + e, as a lane needs it that holds column 2 t + e of a
// product whose columns are queries.
__device__ __forceinline__ double of_column(double x, int e) {
  return __shfl_sync(kFullWarp, x, threadIdx.x % 4 * 8 + 4 * e);
}

__device__ __forceinline__ unsigned high_word(double x) {
  return static_cast<unsigned>(__double2hiint(x));
}

// 2^-x for x in 0 .. infinity, relative error 1.4e-16. From 1023 on, 0. -x and not a number are
// another's affair.
__device__ __forceinline__ double weight(double x) {
  constexpr unsigned kNothing = 0x408ff800u;  // the high word of 1023.0
  // 1.5 * 2^52 + 1023: a sum with it is an integer, and its low word the exponent's field of 2^-x.
  constexpr double kRound = 6755399441055744.0 + 1023.0;
  const unsigned high = min(high_word(x), kNothing);
  x = __hiloint2double(static_cast<int>(high), __double2loint(x));
  const double integer = kRound - x;
  const double r = x - (kRound - integer);  // -1/2 .. 1/2
  // 2^-r, interpolated at the Chebyshev nodes.
  double p = -4.4558179083360645e-10;
  p = fma(p, r, 7.074194297288521e-09);
  p = fma(p, r, -1.0178057087733941e-07);
  p = fma(p, r, 1.3215432535912375e-06);
  p = fma(p, r, -1.5252733841556773e-05);
  p = fma(p, r, 0.00015403530463724353);
  p = fma(p, r, -0.001333355814640647);
  p = fma(p, r, 0.009618129107587256);
  p = fma(p, r, -0.055504108664821625);
  p = fma(p, r, 0.24022650695910158);
  p = fma(p, r, -0.6931471805599453);
  p = fma(p, r, 1.0);
  return p * __hiloint2double(__double2loint(integer) << 20, 0);
}

// (m, l) of the rows that a lane shares. Weights are 2^-x, x = slope (m - s) + 8, slope being
// scale log2(e). Scores of plain variants come multiplied by slope, and their m has the 8 in it. m
// is a bound as in tile_softmax.cuh: x is negative for scores that have outgrown it.
class DoubleTileSoftmax {
 public:
  static constexpr acc kSlack = 8;

  // scale: what the products are multiplied by; positive.
  __device__ explicit DoubleTileSoftmax(acc scale) : slope_(scale * kLog2E) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m_[m][h] = kMinusInfinity;
        l_[m][h] = 0;
      }
    }
  }

  __device__ __forceinline__ acc slope() const { return slope_; }

  // Makes m fit S, rescales O where it had to move, and turns S into x.
  template <int n>
  __device__ __forceinline__ void settle(acc (&S)[kFragments][kKeyTiles][4],
                                         acc (&O)[kFragments][n][4]) {
    acc x[kFragments][kKeyTiles][4];
    // Of unsigned high words, those of negative numbers and of what is not a number are above the
    // one of infinity, which a hidden key has.
    unsigned most = 0;
    each([&](int m, int k, int e) {
      x[m][k][e] = negative_exponent(S[m][k][e], m_[m][e / 2]);
      most = max(most, high_word(x[m][k][e]));
    });
    if (__any_sync(kFullWarp, most > kInfinityHigh)) {
      raise(S, O);
      each([&](int m, int k, int e) {
        x[m][k][e] = negative_exponent(S[m][k][e], exponent_base(m_[m][e / 2]));
      });
    }
    each([&](int m, int k, int e) { S[m][k][e] = x[m][k][e]; });
  }

  // Turns x into weights and adds them to l.
  __device__ __forceinline__ void weigh(acc (&S)[kFragments][kKeyTiles][4]) {
    each([&](int m, int k, int e) { S[m][k][e] = weight(S[m][k][e]); });
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc sum = S[m][0][2 * h] + S[m][0][2 * h + 1];
#pragma unroll
        for (int k = 1; k < kKeyTiles; ++k) sum += S[m][k][2 * h] + S[m][k][2 * h + 1];
        l_[m][h] += sum;
      }
    }
  }

  // After the last tile: what O is to be multiplied by, and lse = scale m + ln(l) in nats.
  __device__ __forceinline__ void finish(acc scale, int m, int h, acc& factor, acc& lse) const {
    acc l = l_[m][h];
    l += __shfl_xor_sync(kFullWarp, l, 1);
    l += __shfl_xor_sync(kFullWarp, l, 2);
    factor = l == acc(0) ? acc(0) : acc(1) / l;
    const acc bound = kGeneral ? fma(scale, m_[m][h], kSlack * kLn2) : kLn2 * m_[m][h];
    lse = l == acc(0) ? acc(kMinusInfinity) : bound + log(l);
  }

 private:
  static constexpr acc kLog2E = 1.442695040888963407;
  static constexpr acc kLn2 = 0.693147180559945309;
  static constexpr unsigned kInfinityHigh = 0x7ff00000u;

  template <class F>
  static __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(m, k, e);
      }
    }
  }

  __device__ __forceinline__ acc negative_exponent(acc s, acc m) const {
    return kGeneral ? fma(m - s, slope_, kSlack) : m - s;
  }

  template <int n>
  __device__ __forceinline__ void raise(const acc (&S)[kFragments][kKeyTiles][4],
                                        acc (&O)[kFragments][n][4]) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        acc top = kMinusInfinity;
        bool finite = true;
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const acc s = S[m][k][2 * h + e];
            finite &= s < -kMinusInfinity;
            top = s > top ? s : top;
          }
        }
        acc other = __shfl_xor_sync(kFullWarp, top, 1);
        top = other > top ? other : top;
        other = __shfl_xor_sync(kFullWarp, top, 2);
        top = other > top ? other : top;
        const acc old = m_[m][h];
        const bool grown = old == kMinusInfinity || negative_exponent(top, old) < 0;
        const acc now = grown ? (kGeneral ? top : top + kSlack) : old;
        m_[m][h] = now;
        // Where nothing was seen yet, O and l are 0.
        const acc moved = exponent_base(now) - old;
        const acc keep = grown ? weight(kGeneral ? moved * slope_ : moved) : acc(1);
        // A score of infinity or not a number makes all of its row not a number.
        l_[m][h] = finite ? l_[m][h] * keep : acc(0) * -kMinusInfinity;
        acc keeps[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) keeps[e] = of_column(keep, e);
#pragma unroll
        for (int u = h; u < n; u += 2) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O[m][u][e] *= keeps[e % 2];
        }
      }
    }
  }

  acc slope_;
  acc m_[kFragments][2];
  acc l_[kFragments][2];
};

}  // namespace cupyflash
