// SPDX-License-Identifier: MIT
// products_half.cuh: Q K^T and P V of 16-bit elements: m16n8k16, operands through ldmatrix.
//
// A lane (g = lane / 4, t = lane % 4) holds of S and O: row 16 m + 8 h + g, column 8 n + 2 t + e at
// [m][n][2 h + e]. That is at once how P is wanted as the left operand of P V.
#pragma once

#include "common/tile.cuh"
#include "common/tile_scores.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cupyflash {

__device__ __forceinline__ void mma_half(float (&d)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  if constexpr (kElementIsBfloat16) {
    mma_m16n8k16_bf16(d, a, b);
  } else {
    mma_m16n8k16_f16(d, a, b);
  }
}

// Where a lane reads in a tile: row `row` and every 8th from there, of two chunks the first or the
// second (high).
template <class T>
struct LaneRow {
  unsigned offset;

  __device__ LaneRow(int row, int high) : offset(T::offset(row, high)) {}

  // Chunk 2 pair (+ 1 for high lanes), `rows` (a multiple of 8) further down. Tiles and rows begin
  // at whole lines, so that the chunk within the line can be exchanged by itself.
  __device__ __forceinline__ unsigned at(unsigned tile, int pair, int rows) const {
    const int column = 2 * pair * kChunkBytes;
    return ((tile + offset) ^ (column % 128)) + column / 128 * 128 + rows * T::kRowBytes;
  }
};

class Products {
 public:
  using QTile = Tile<kBr, kHeadDim>;
  using KTile = Tile<kBc, kHeadDim>;
  using VTile = Tile<kBc, kHeadDimV>;
  // Where Q takes no more registers than this it stays there, and its shared memory is read once.
  static constexpr bool kQInRegisters = kFragments * kHeadDim <= 128;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kColumnTiles = kHeadDimV / 8;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 32 == 0, "of whole steps and stores");
  static_assert(kBc % 16 == 0, "keys are summed over in steps of 16");

  __device__ explicit Products(unsigned char* Q_smem)
      : Q_smem_(Q_smem),
        Q_lane_(threadIdx.x / kWarpSize * kWarpRows + threadIdx.x % 16, threadIdx.x / 16 % 2),
        K_lane_(threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8, threadIdx.x / 8 % 2),
        V_lane_(threadIdx.x % 16, threadIdx.x / 16 % 2) {}

  // After Q's tile has landed. negate: turns the sign of this warp's rows.
  __device__ __forceinline__ void take_q(bool negate, acc) {
    if (negate) negate_rows<QTile>(Q_smem_);
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) read_q(Q_[k], k);
    }
  }

  // S = Q K^T.
  __device__ __forceinline__ void scores(float (&S)[kFragments][kKeyTiles][4],
                                         const unsigned char* K_smem) {
    const unsigned K = shared_address(K_smem);
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned q[kFragments][4];
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) q[m][e] = Q_[k][m][e];
        }
      } else {
        read_q(q, k);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        unsigned b[4];
        ldmatrix_x4(b, K_lane_.at(K, k, 8 * n));
        const unsigned b0[2] = {b[0], b[1]};
        const unsigned b1[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          mma_half(S[m][n], q[m], b0);
          mma_half(S[m][n + 1], q[m], b1);
        }
      }
    }
  }

  // O += P V, P being in S. seen: the lane's keys that some row of the warp sees; unless all are,
  // V's row counts as 0 where none does (it may be NaN, and 0 * NaN is NaN).
  template <bool all>
  __device__ __forceinline__ void accumulate(float (&O)[kFragments][kColumnTiles][4],
                                             const float (&S)[kFragments][kKeyTiles][4],
                                             const unsigned char* V_smem, unsigned seen) {
    const unsigned V = shared_address(V_smem);
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      unsigned p[kFragments][4];
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* const s = S[m][2 * k + e / 2] + e % 2 * 2;
          p[m][e] = pack2(s[0], s[1]);
        }
      }
      unsigned keep[2];
      if constexpr (!all) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned bits = seen >> (2 * k + half);
          keep[half] = (bits & 1u ? 0x0000ffffu : 0u) | (bits & 0x100u ? 0xffff0000u : 0u);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; n += 2) {
        unsigned b[4];
        ldmatrix_x4_trans(b, V_lane_.at(V, n / 2, 16 * k));
        if constexpr (!all) {
#pragma unroll
          for (int e = 0; e < 4; ++e) b[e] &= keep[e % 2];
        }
        const unsigned b0[2] = {b[0], b[1]};
        const unsigned b1[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          mma_half(O[m][n], p[m], b0);
          mma_half(O[m][n + 1], p[m], b1);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void read_q(unsigned (&q)[kFragments][4], int k) const {
    const unsigned Q = shared_address(Q_smem_);
#pragma unroll
    for (int m = 0; m < kFragments; ++m) ldmatrix_x4(q[m], Q_lane_.at(Q, k, 16 * m));
  }

  unsigned char* Q_smem_;
  LaneRow<QTile> Q_lane_;
  LaneRow<KTile> K_lane_;
  LaneRow<VTile> V_lane_;
  unsigned Q_[kQInRegisters ? kSteps : 1][kFragments][4];
};

// Lane t of four holds in w[n] two columns of column fragment n. Afterwards it holds all eight of
// fragment t: each exchange swaps half of the registers with the lane that differs in one bit.
__device__ __forceinline__ void exchange_columns(unsigned (&w)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool odd = threadIdx.x & bit;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const unsigned got = __shfl_xor_sync(kFullWarp, odd ? w[n] : w[n + bit], bit);
      w[n] = odd ? got : w[n];
      w[n + bit] = odd ? w[n + bit] : got;
    }
  }
}

using RowSoftmax = TileSoftmax;
// Rows of half h of a fragment that a lane holds columns of O of: the one that it has scores of.
constexpr int kStoredRows = 1;
__device__ __forceinline__ int stored_row(int m, int h, int) { return lane_row(m, h); }
__device__ __forceinline__ acc of_stored_row(acc x, int) { return x; }
__device__ __forceinline__ bool stores_first_column() { return threadIdx.x % 4 == 0; }

// Row h of O's fragment m, times factor, to where `to` points: the `cols` first columns.
// vectors: they are contiguous and 16-byte aligned.
__device__ __forceinline__ void store_row(const float (&O)[kHeadDimV / 8][4], int h, float factor,
                                          bool valid, element* to, int64 col_stride, int cols,
                                          bool vectors) {
#pragma unroll
  for (int block = 0; block < kHeadDimV / 32; ++block) {
    unsigned w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float* const x = O[4 * block + k] + 2 * h;
      w[k] = pack2(x[0] * factor, x[1] * factor);
    }
    exchange_columns(w);
    const int column = 32 * block + threadIdx.x % 4 * 8;
    if (!valid || column >= cols) continue;
    if (vectors && column + 8 <= cols) {
      *reinterpret_cast<Vec16<unsigned>*>(to + column) = {w[0], w[1], w[2], w[3]};
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const auto bits = static_cast<unsigned short>(w[e / 2] >> (e % 2 * 16));
        if (column + e < cols) to[(column + e) * col_stride] = __builtin_bit_cast(element, bits);
      }
    }
  }
}

// The same into contiguous accumulators.
__device__ __forceinline__ void store_partial_row(const float (&O)[kHeadDimV / 8][4], int h,
                                                  float factor, bool valid, float* to, int cols) {
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * n + threadIdx.x % 4 * 2 + e;
      if (valid && column < cols) to[column] = O[n][2 * h + e] * factor;
    }
  }
}

}  // namespace cupyflash
