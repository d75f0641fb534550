// SPDX-License-Identifier: MIT
// warp_scores.cuh: S = Q K^T once more, by one warp and by mma, for the few tiles whose scores are
// asked for again after their accumulators have become weights: wgmma takes a whole warpgroup.
#pragma once

#include "common/sm90_layout.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

class WarpScores {
 public:
  // Of the 16 queries from row0 on in a tile of Q, and a tile of K.
  __device__ __forceinline__ WarpScores(const unsigned char* Q, int row0, const unsigned char* K) {
    // Lane l names row l % 8 of matrix l / 8: of Q, those of rows 0, 8, 0, 8 and columns 0, 0, 8,
    // 8; of K, those of columns 0, 8, 16, 24.
    const int lane = pin(threadIdx.x) % kWarpSize;  // few tiles come here
    Q_row_ = shared_address(Q) + (row0 + lane % 16) * QTile::kRowBytes;
    K_row_ = shared_address(K) + lane % 8 * KTile::kRowBytes;
  }

  // Scores of the 8 keys from key0 on, a multiple of 8, in the layout of wgmma's accumulators.
  __device__ __forceinline__ void make(float (&S)[4], int key0) const {
    const int lane = pin(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int x = 0; x < 4; ++x) S[x] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < kHeadDim; k += 32) {
      unsigned keys[4], q[4];
      // A row and those 8 or 16 below it have their units in the same order.
      ldmatrix_x4(
          keys, K_row_ + key0 * KTile::kRowBytes + KTile::unit_offset(lane % 8, k / 8 + lane / 8));
      ldmatrix_x4(q, Q_row_ + QTile::unit_offset(lane % 8, k / 8 + lane / 16));
      multiply(S, q, {keys[0], keys[1]});
      ldmatrix_x4(q, Q_row_ + QTile::unit_offset(lane % 8, k / 8 + 2 + lane / 16));
      multiply(S, q, {keys[2], keys[3]});
    }
  }

 private:
  static __device__ __forceinline__ void multiply(float (&S)[4], const unsigned (&q)[4],
                                                  const unsigned (&keys)[2]) {
    if constexpr (kElementIsBfloat16) {
      mma_m16n8k16_bf16(S, q, keys);
    } else {
      mma_m16n8k16_f16(S, q, keys);
    }
  }

  unsigned Q_row_, K_row_;  // this lane's first row
};

}  // namespace cupyflash
