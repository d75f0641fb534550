// SPDX-License-Identifier: MIT
// score_tile.cuh: a warp's rows of a tile of the bias or the mask, copied to shared memory while
// products are computed, so that nobody waits for a load when the scores are there.
//
// Only the warp that owns the rows touches them. They lie kBc elements to a row, the 16-byte chunks
// of a row permuted so that what the lanes of a warp read of 8 rows meets no bank twice:
//
//   element  a row of 64 keys   8 rows, the same chunk of each       lies at
//   1 byte    4 chunks          two rows fill a line of 128 bytes    chunk ^ (row / 2 % 4)
//   2 bytes   8                 a row each                           chunk ^ (row % 8)
//   4 bytes  16                 four lanes read two chunks           chunk ^ (2 row % 8)
#pragma once

#include "common/tile.cuh"

namespace cupyflash {

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T x[2];
};

template <class T>
struct ScoreTile {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kBc * kSize;
  static constexpr int kCopyBytes = kRowBytes < kChunkBytes ? kRowBytes : kChunkBytes;
  static constexpr int kChunks = kRowBytes / kCopyBytes;
  static constexpr int kBytes = kWarpRows * kRowBytes;  // of a warp
  static constexpr int kLineRows = kRowBytes < 128 ? 128 / kRowBytes : 1;
  static constexpr int kQuadChunks = kSize > 2 ? 8 * kSize / kChunkBytes : 1;
  static constexpr int kPassRows = kWarpSize / kChunks;
  static_assert(!kGeneral || ((kBc & (kBc - 1)) == 0 && kChunks <= kWarpSize), "of whole rows");

  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int turned = chunk ^ (row / kLineRows * kQuadChunks & 7 & (kChunks - 1));
    return row * kRowBytes + turned * kCopyBytes;
  }

  // Where the lane finds its key 2 t of a row, and from there its keys 8 n + 2 t and the next; in
  // rows 8 further down chunks are permuted alike.
  static __device__ __forceinline__ int lane_first(int row) {
    const int at = threadIdx.x % 4 * 2 * kSize;
    return offset(row, at / kCopyBytes) + at % kCopyBytes;
  }
  static __device__ __forceinline__ Pair<T> read(const unsigned char* tile, int first, int n) {
    return *reinterpret_cast<const Pair<T>*>(tile + (first ^ 8 * n * kSize));
  }

  // Starts to copy the tile; from: its first element. Rows from `rows` and keys from `keys` on are
  // not there and become 0. Where the array is broadcast over rows, one row stands for all.
  // vectors: a row is contiguous, all of them 16-byte aligned.
  static __device__ __forceinline__ void start(unsigned char* tile, const T* from, int64 row_stride,
                                               int64 col_stride, int rows, int keys, bool vectors) {
    // Found out anew each time: registers have no room for what is the same in all steps.
    const int lane = pin(threadIdx.x % kWarpSize);
    const int all_rows = pin(kWarpRows);
    const int height = row_stride == 0 ? 1 : all_rows;
    if (vectors) {
      const int chunk = lane % kChunks;
      const int bytes = within(int64(keys) * kSize - chunk * kCopyBytes, kCopyBytes);
      const T* next = from + lane / kChunks * row_stride + chunk * (kCopyBytes / kSize);
#pragma unroll
      for (int r0 = 0; r0 < kWarpRows; r0 += kPassRows) {
        const int r = r0 + lane / kChunks;
        if (r >= height) break;
        copy(shared_address(tile + offset(r, chunk)), next, r < rows ? bytes : 0);
        next += kPassRows * row_stride;
      }
    } else {
#pragma unroll 4
      for (int x = lane; x < height * kBc; x += kWarpSize) {
        const int r = x / kBc;
        const int c = x % kBc;
        const int at = offset(r, c * kSize / kCopyBytes) + c * kSize % kCopyBytes;
        T* const to = reinterpret_cast<T*>(tile + at);
        *to = r < rows && c < keys ? from[r * row_stride + c * col_stride] : T();
      }
    }
  }

 private:
  static __device__ __forceinline__ void copy(unsigned to, const T* from, int bytes) {
    if constexpr (kCopyBytes == kChunkBytes) {
      cp_async_16(to, from, bytes);
    } else {
      cp_async_small<kCopyBytes>(to, from, bytes);
    }
  }
};

}  // namespace cupyflash
