// SPDX-License-Identifier: MIT
// products_wide.cuh: Q K^T and P V of float32 elements at their own accuracy: m16n8k8, operands
// through 16-byte reads.
//
// The order in which a product's k is summed is free, and so is the order of O's columns. Both are
// chosen so that every read is 16 bytes of one row: lane (g = lane / 4, t = lane % 4) reads chunk
// t of four chunks of a row of Q or K, and chunk g of eight of a row of V. S is held as by 16-bit
// elements: row 16 m + 8 h + g, key 8 n + 2 t + e at [m][n][2 h + e]; as left operand of P V its
// keys 2 t and 2 t + 1 stand for k = t and t + 4. O[m][kVec u' + u] holds the columns
// 8 kVec u' + kVec (2 t + e) + u.
//
// float32 is split: x = high + low, high having TF32's 11 bits, and x y = high high + (high low +
// low high), the products in brackets in accumulators of their own: what they add would be cut off
// beside the large sums, since tensor cores don't round their sums. For the same reason no sum runs
// on in an accumulator: both are folded into rounded registers every kBc keys. An infinite x has no
// low part, and the NaN that its split makes is only in the correction, which is dropped where the
// main sum is not finite. With kTf32 high high is all there is.
#pragma once

#include "common/tile.cuh"
#include "common/tile_scores.cuh"
#include "common/online_softmax.cuh"
#include "ptx/mma.cuh"

namespace cupyflash {

// A sum of products in accumulators of the tensor cores.
struct ProductSum {
  float main[4];
  float correction[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 4; ++e) main[e] = correction[e] = 0.0f;
  }
  __device__ __forceinline__ float value(int e) const {
    float sum = main[e];
    if constexpr (kTf32) return sum;
    if (fabsf(sum) < -kMinusInfinity) sum += correction[e];
    return sum;
  }
};

// n numbers of an operand as products take them.
template <int n>
struct Operand {
  unsigned high[n];
  unsigned low[n];

  // The high part is x cut off, for one integer operation; rounding it takes a second one, and that
  // pipe has time for one. kMakeUp makes the low part larger by what is lost on average: its own
  // last two bits, the product of two low parts, and what the sums cut off.
  __device__ __forceinline__ void set(int i, float x) {
    if constexpr (kTf32) {
      // A product ignores the last 13 bits. What that takes away on average is added before: the
      // mean of half a unit of the last place, over numbers of all magnitudes.
      high[i] = __float_as_uint(x * (1.0f + 1.386f / 4096));
      return;
    }
    constexpr float kMakeUp = 1.0f + 2.4f / 4096;
    // ptxas finds that a TF32 product ignores what the mask cuts off, and copies x, often more than
    // once, instead of masking it: a quarter of all instructions. Blocks are flat, so that this is
    // 0xffffe000 too, but it can't know. With two row fragments copies are fewer, and registers are
    // better spent on sums.
    const unsigned mask = kFragments == 1 ? 0xffffdfffu + blockDim.z : 0xffffe000u;
    high[i] = __float_as_uint(x) & mask;
    low[i] = __float_as_uint((x - __uint_as_float(high[i])) * kMakeUp);
  }
};

__device__ __forceinline__ void multiply(ProductSum& sum, const Operand<4>& a,
                                         const Operand<2>& b) {
  if constexpr (!kTf32) {
    mma_m16n8k8_tf32(sum.correction, a.low, b.high);
    mma_m16n8k8_tf32(sum.correction, a.high, b.low);
  }
  mma_m16n8k8_tf32(sum.main, a.high, b.high);
}

// The largest divisor of n that is at most `most`.
constexpr int largest_divisor(int n, int most) {
  int divisor = most;
  while (n % divisor) --divisor;
  return divisor;
}

class Products {
 public:
  using QTile = Tile<kBr, kHeadDim>;
  using KTile = Tile<kBc, kHeadDim>;
  using VTile = Tile<kBc, kHeadDimV>;
  static constexpr int kStepColumns = 4 * kVec;   // of Q and K, that one read of a warp covers
  static constexpr int kGroupColumns = 8 * kVec;  // of V, likewise
  static constexpr int kColumnTiles = kHeadDimV / 8;
  // Column fragments of S, and of O, that are summed at a time: as many as there are registers for.
  static constexpr bool kSpare = kFragments * kHeadDimV <= 128;
  // For sm_80 two row fragments take more registers than for later GPUs, and would spill.
#if __CUDA_ARCH__ >= 900
  static constexpr bool kTight = false;
#else
  static constexpr bool kTight = kFragments == 2;
#endif
  static constexpr int kMostKeys = kSpare && !kTight ? 4 : 2;
  static constexpr int kGroupKeys = largest_divisor(kKeyTiles, kMostKeys);
  static constexpr int kGroupTiles = kSpare && kFragments == 2 ? kVec : 2;
  static constexpr int kUnrolledSteps = kFragments == 2 && !kTight ? 4 : 2;
  static_assert(kHeadDim % kStepColumns == 0 && kHeadDimV % kGroupColumns == 0, "of whole reads");

  __device__ explicit Products(unsigned char* Q_smem)
      : Q_smem_(Q_smem), g_(threadIdx.x % kWarpSize / 4), t_(threadIdx.x % 4) {}

  // After Q's tile has landed. negate: turns the sign of this warp's rows.
  __device__ __forceinline__ void take_q(bool negate, acc) {
    if (negate) negate_rows<QTile>(Q_smem_);
  }

  // S = Q K^T.
  __device__ __forceinline__ void scores(acc (&S)[kFragments][kKeyTiles][4],
                                         const unsigned char* K_smem) {
    const int row = threadIdx.x / kWarpSize * kWarpRows;
#pragma unroll
    for (int n0 = 0; n0 < kKeyTiles; n0 += kGroupKeys) {
      ProductSum sum[kFragments][kGroupKeys];
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kGroupKeys; ++n) sum[m][n].clear();
      }
#pragma unroll kUnrolledSteps
      for (int k = 0; k < kHeadDim / kStepColumns; ++k) {
        Operand<4> a[kVec / 2][kFragments];
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const Vec16<acc> q = read<QTile>(Q_smem_, row + 16 * m + 8 * h + g_, 4 * k + t_);
#pragma unroll
            for (int x = 0; x < kVec; ++x) a[x / 2][m].set(x % 2 * 2 + h, q.x[x]);
          }
        }
#pragma unroll
        for (int n = 0; n < kGroupKeys; ++n) {
          const Vec16<acc> key = read<KTile>(K_smem, 8 * (n0 + n) + g_, 4 * k + t_);
          Operand<2> b[kVec / 2];
#pragma unroll
          for (int x = 0; x < kVec; ++x) b[x / 2].set(x % 2, key.x[x]);
#pragma unroll
          for (int x = 0; x < kVec / 2; ++x) {
#pragma unroll
            for (int m = 0; m < kFragments; ++m) multiply(sum[m][n], a[x][m], b[x]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kGroupKeys; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) S[m][n0 + n][e] = sum[m][n].value(e);
        }
      }
    }
  }

  // O += P V; seen as for 16-bit elements.
  template <bool all>
  __device__ __forceinline__ void accumulate(acc (&O)[kFragments][kColumnTiles][4],
                                             const acc (&S)[kFragments][kKeyTiles][4],
                                             const unsigned char* V_smem, unsigned seen) {
#pragma unroll
    for (int u0 = 0; u0 < kColumnTiles; u0 += kGroupTiles) {
      // Keeps ptxas from loading V for all groups at once, and from spilling then.
      if constexpr (kFragments == 1 || kTight) __syncwarp();
      ProductSum sum[kFragments][kGroupTiles];
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int u = 0; u < kGroupTiles; ++u) sum[m][u].clear();
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        add_products<all, kGroupTiles>(sum, 0, S, V_smem, n, u0, seen);
      }
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int u = 0; u < kGroupTiles; ++u) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O[m][u0 + u][e] += sum[m][u].value(e);
        }
      }
    }
  }

 private:
  // sum[m][to + u] += P V for keys 8 n ... and the column fragments u0 + u, u < count.
  template <bool all, int count, class Sum, int size>
  __device__ __forceinline__ void add_products(Sum (&sum)[kFragments][size], int to,
                                               const acc (&S)[kFragments][kKeyTiles][4],
                                               const unsigned char* V_smem, int n, int u0,
                                               unsigned seen) const {
    Operand<4> a[kFragments];
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int x = 0; x < 4; ++x) a[m].set(x, S[m][n][x % 2 * 2 + x / 2]);
    }
    Operand<2> b[count];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Vec16<acc> v = read<VTile>(V_smem, 8 * n + 2 * t_ + e, 8 * (u0 / kVec) + g_);
      const bool use = all || seen >> (n + 8 * e) & 1;
#pragma unroll
      for (int u = 0; u < count; ++u) b[u].set(e, use ? v.x[u0 % kVec + u] : acc(0));
    }
#pragma unroll
    for (int u = 0; u < count; ++u) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) multiply(sum[m][to + u], a[m], b[u]);
    }
  }

  template <class T>
  static __device__ __forceinline__ Vec16<acc> read(const unsigned char* tile, int row, int chunk) {
    return load_vec16(reinterpret_cast<const acc*>(tile + T::offset(row, chunk)));
  }

  unsigned char* Q_smem_;
  int g_;
  int t_;
};

using RowSoftmax = TileSoftmax;
// Rows of half h of a fragment that a lane holds columns of O of: the one that it has scores of.
constexpr int kStoredRows = 1;
__device__ __forceinline__ int stored_row(int m, int h, int) { return lane_row(m, h); }
__device__ __forceinline__ acc of_stored_row(acc x, int) { return x; }
__device__ __forceinline__ bool stores_first_column() { return threadIdx.x % 4 == 0; }

// Row h of O's fragment m, times factor, to where `to` points: the `cols` first columns.
// vectors: they are contiguous and 16-byte aligned.
__device__ __forceinline__ void store_row(const acc (&O)[kHeadDimV / 8][4], int h, acc factor,
                                          bool valid, element* to, int64 col_stride, int cols,
                                          bool vectors) {
#pragma unroll
  for (int c = 0; c < kHeadDimV / (8 * kVec); ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * kVec * c + kVec * (threadIdx.x % 4 * 2 + e);
      Vec16<acc> x;
#pragma unroll
      for (int u = 0; u < kVec; ++u) x.x[u] = O[kVec * c + u][2 * h + e] * factor;
      if (!valid || column >= cols) continue;
      if (vectors && column + kVec <= cols) {
        *reinterpret_cast<Vec16<acc>*>(to + column) = x;
      } else {
#pragma unroll
        for (int u = 0; u < kVec; ++u) {
          if (column + u < cols) to[(column + u) * col_stride] = x.x[u];
        }
      }
    }
  }
}

// The same into contiguous accumulators.
__device__ __forceinline__ void store_partial_row(const acc (&O)[kHeadDimV / 8][4], int h,
                                                  acc factor, bool valid, acc* to, int cols) {
  store_row(O, h, factor, valid, to, 1, cols, false);
}

}  // namespace cupyflash
