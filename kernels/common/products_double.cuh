// SPDX-License-Identifier: MIT
// products_double.cuh: Q K^T and P V of float64 elements: m16n8k16, or m8n8k4 before sm_90.
//
// An instruction takes each operand from neighbouring registers, and a 16-byte read fills four of
// them. So that reads are operands as they are, without a move, and at addresses that are known but
// for a few offsets of the lane:
//   S = Q K^T      b: a lane (g = lane / 4, t = lane % 4) reads chunk t of every four of row g of
//                  K, and the order of k follows. a has numbers of rows g and g + 8 side by side:
//                  take_q() puts Q in that order, once.
//   O^T = V^T P^T  a: chunk g of every eight of a row of V, two columns. b is S as it is held: row
//                  16 m + 8 h + g, key 8 n + 2 t + e at [m][n][2 h + e].
// O[m][2 u + h][2 c + e] is column 16 u + 2 g + c of query 16 m + 8 h + 2 t + e.
#pragma once

#include "common/tile.cuh"
#include "common/tile_softmax_double.cuh"
#include "ptx/mma.cuh"

namespace cupyflash {

// d += a b, with a of 16 x k and b of k x 8; k is 8 or 16.
template <int k>
__device__ __forceinline__ void multiply(double (&d)[4], const double (&a)[k / 2],
                                         const double (&b)[k / 4]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (k == 16) {
    mma_m16n8k16_f64(d, a, b);
  } else {
    mma_m16n8k8_f64(d, a, b);
  }
#else
#pragma unroll
  for (int x = 0; x < k / 4; ++x) {
    mma_m8n8k4_f64(d[0], d[1], a[2 * x], b[x]);
    mma_m8n8k4_f64(d[2], d[3], a[2 * x + 1], b[x]);
  }
#endif
}

class Products {
 public:
  using QTile = Tile<kBr, kHeadDim>;
  using KTile = Tile<kBc, kHeadDim>;
  using VTile = Tile<kBc, kHeadDimV>;
  static constexpr int kColumnTiles = kHeadDimV / 8;
  static constexpr int kLineBytes = 128;  // chunks are permuted within a line
  static constexpr int kLineColumns = kLineBytes / static_cast<int>(sizeof(element));
  static constexpr int kSteps = kHeadDim / kLineColumns;
  // Where O leaves registers for it: reading Q is a third to half of what Q K^T reads.
  static constexpr bool kQInRegisters =
      kFragments == 1 && kHeadDim <= 64 && kBlocks * kThreads <= 256;
  static_assert(kHeadDim % kLineColumns == 0 && kHeadDimV % kLineColumns == 0, "whole lines");

  __device__ explicit Products(unsigned char* Q_smem)
      : Q_(Q_smem + threadIdx.x / kWarpSize * kWarpRows * QTile::kRowBytes) {}

  // After Q's tile has landed: puts this warp's rows in the order of operands, a line of 16 rows at
  // a time, in place. Operand numbers 2 i and 2 i + 1 of lane x are chunk 32 i + x of the line's
  // 128, counted row by row. negate: turns the sign; slope: what plain scores are multiplied by.
  __device__ __forceinline__ void take_q(bool negate, acc slope) {
    const acc size = kGeneral ? acc(1) : slope;
    const acc factor = negate ? -size : size;
    const int row = lane() / 4 * QTile::kRowBytes;
#pragma unroll 1
    for (int x = 0; x < kFragments * kSteps; ++x) {
      unsigned char* const block =
          Q_ + x / kSteps * 16 * QTile::kRowBytes + x % kSteps * kLineBytes;
      Vec16<acc> q[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          q[h][c] = read(block + row + 8 * h * QTile::kRowBytes + chunk(4 * c + lane() % 4));
        }
      }
      __syncwarp();  // all have read what is written now
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Vec16<acc> pair = {q[0][i / 2].x[i % 2] * factor, q[1][i / 2].x[i % 2] * factor};
        *reinterpret_cast<Vec16<acc>*>(block + operand(i)) = pair;
      }
    }
    __syncwarp();
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) read_q(Q_operands_[k], 0, k);
    }
  }

  // S = Q K^T.
  __device__ __forceinline__ void scores(acc (&S)[kFragments][kKeyTiles][4],
                                         const unsigned char* K_smem) const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[m][n][e] = 0;
      }
    }
    const unsigned char* const row = K_smem + lane() / 4 * KTile::kRowBytes;
    const unsigned char* const keys[2] = {row + chunk(lane() % 4), row + chunk(4 + lane() % 4)};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      acc a[kFragments][8];
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        if constexpr (kQInRegisters) {
#pragma unroll
          for (int i = 0; i < 8; ++i) a[m][i] = Q_operands_[k][i];
        } else {
          read_q(a[m], m, k);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        acc b[4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          take(b, c, read(keys[c] + 8 * n * KTile::kRowBytes + k * kLineBytes));
        }
#pragma unroll
        for (int m = 0; m < kFragments; ++m) multiply<16>(S[m][n], a[m], b);
      }
    }
  }

  // O += P V; seen as for 16-bit elements.
  template <bool all>
  __device__ __forceinline__ void accumulate(acc (&O)[kFragments][kColumnTiles][4],
                                             const acc (&S)[kFragments][kKeyTiles][4],
                                             const unsigned char* V_smem, unsigned seen) const {
    const int r = lane() % 4 * 2;
    const unsigned char* const row = V_smem + r * VTile::kRowBytes;
    const unsigned char* const keys[2] = {
        row + (lane() / 4 ^ swizzle(r)) * kChunkBytes,
        row + VTile::kRowBytes + (lane() / 4 ^ swizzle(r + 1)) * kChunkBytes};
#pragma unroll
    for (int n = 0; n + 1 < kKeyTiles; n += 2) add_products<16, all>(O, S, keys, n, seen);
    if constexpr (kKeyTiles % 2) add_products<8, all>(O, S, keys, kKeyTiles - 1, seen);
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  // Where chunk c of a line of row lane() / 4 lies.
  static __device__ __forceinline__ int chunk(int c) {
    return (c ^ swizzle(lane() / 4)) * kChunkBytes;
  }
  // Where operand numbers 2 i and 2 i + 1 lie in a line of 16 rows.
  static __device__ __forceinline__ int operand(int i) {
    return (lane() / 8 + 4 * i) * QTile::kRowBytes + lane() % 8 * kChunkBytes;
  }
  static __device__ __forceinline__ Vec16<acc> read(const unsigned char* at) {
    return load_vec16(reinterpret_cast<const acc*>(at));
  }
  __device__ __forceinline__ void read_q(acc (&a)[8], int m, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (16 * m + 4 * i) * QTile::kRowBytes + k * kLineBytes;
      take(a, i, read(Q_ + operand(0) + at));
    }
  }
  template <int n>
  static __device__ __forceinline__ void take(acc (&operand)[n], int i, const Vec16<acc>& pair) {
    operand[2 * i] = pair.x[0];
    operand[2 * i + 1] = pair.x[1];
  }

  // O += P V for k keys from 8 n on.
  template <int k, bool all>
  static __device__ __forceinline__ void add_products(acc (&O)[kFragments][kColumnTiles][4],
                                                      const acc (&S)[kFragments][kKeyTiles][4],
                                                      const unsigned char* const (&keys)[2], int n,
                                                      unsigned seen) {
    acc b[kFragments][2][k / 4];
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < k / 4; ++i) b[m][h][i] = S[m][n + i / 2][2 * h + i % 2];
      }
    }
#pragma unroll
    for (int u = 0; u < kHeadDimV / 16; ++u) {
      acc a[k / 2];
#pragma unroll
      for (int i = 0; i < k / 4; ++i) {
        const int at = 8 * (n + i / 2) * VTile::kRowBytes + u * kLineBytes;
        Vec16<acc> v = read(keys[i % 2] + at);
        if (!all && !(seen >> (n + i / 2 + 8 * (i % 2)) & 1)) v = {};
        take(a, i, v);
      }
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) multiply<k>(O[m][2 * u + h], a, b[m][h]);
      }
    }
  }

  unsigned char* Q_;  // this warp's rows
  acc Q_operands_[kQInRegisters ? kSteps : 1][8] = {};
};

using RowSoftmax = DoubleTileSoftmax;
// Rows of half h of a fragment that a lane holds columns of O of, and what belongs to them.
constexpr int kStoredRows = 2;
__device__ __forceinline__ int stored_row(int m, int h, int e) {
  return threadIdx.x / kWarpSize * kWarpRows + 16 * m + 8 * h + threadIdx.x % 4 * 2 + e;
}
__device__ __forceinline__ acc of_stored_row(acc x, int e) { return of_column(x, e); }
__device__ __forceinline__ bool stores_first_column() { return threadIdx.x % kWarpSize < 4; }

// Row stored_row(m, h, e), part being 2 h + e, of O's fragment m, times factor, to where `to`
// points: the `cols` first columns. vectors: they are contiguous and 16-byte aligned.
__device__ __forceinline__ void store_row(const acc (&O)[kHeadDimV / 8][4], int part, acc factor,
                                          bool valid, element* to, int64 col_stride, int cols,
                                          bool vectors) {
  const int h = part / 2;
  const int e = part % 2;
#pragma unroll
  for (int u = 0; u < kHeadDimV / 16; ++u) {
    const int column = 16 * u + threadIdx.x % kWarpSize / 4 * 2;
    const Vec16<acc> x = {O[2 * u + h][e] * factor, O[2 * u + h][2 + e] * factor};
    if (!valid || column >= cols) continue;
    if (vectors && column + 1 < cols) {
      *reinterpret_cast<Vec16<acc>*>(to + column) = x;
    } else {
      to[column * col_stride] = x.x[0];
      if (column + 1 < cols) to[(column + 1) * col_stride] = x.x[1];
    }
  }
}

// The same into contiguous accumulators.
__device__ __forceinline__ void store_partial_row(const acc (&O)[kHeadDimV / 8][4], int part,
                                                  acc factor, bool valid, acc* to, int cols) {
  store_row(O, part, factor, valid, to, 1, cols, false);
}

}  // namespace cupyflash
