// SPDX-License-Identifier: MIT
// bf16_parts.cuh: float32 numbers as sums of three bfloat16, and tiles of them for wgmma.
//
// x = x0 + x1 + x2, each part being the upper 16 bits of what the parts before leave: 8 + 8 + 8
// bits, so that the sum is exact (but for numbers below 2^-110, whose last part is subnormal). Of
// the nine products of two such sums six matter; the other three are below 2^-24 of x y:
//
//   part of x  part of y   size       tensor cores cut off what an addition has no room for, so
//   2          0           2^-16      the smallest products come first, while the sum is small, and
//   1          1           2^-16      no sum runs on in an accumulator for more than one tile: it
//   0          2           2^-16      is added, rounded, to one that no tensor core touches.
//   1          0           2^-8
//   0          1           2^-8
//   0          0           1
//
// Six products of bfloat16 take as long as three of TF32, and wgmma takes a transposed V of 16-bit
// elements only.
#pragma once

#include "common/swizzled_tile.cuh"
#include "common/tile.cuh"

namespace cupyflash {

constexpr int kParts = 3;
constexpr int kPairs = 6;  // of parts, whose products are added
__device__ constexpr int left_part(int pair) {
  return pair == 0 ? 2 : pair == 1 || pair == 3 ? 1 : 0;
}
__device__ constexpr int right_part(int pair) {
  return pair == 2 ? 2 : pair == 1 || pair == 4 ? 1 : 0;
}

// The parts of x in the lower halves, of y in the upper ones. Of NaN and Inf the first part is
// that, and the others are NaN, which every sum that they get into shows.
__device__ __forceinline__ void split(float x, float y, unsigned (&parts)[kParts]) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const unsigned lower = __float_as_uint(x), upper = __float_as_uint(y);
    parts[p] = __byte_perm(lower, upper, 0x7632);
    x -= __uint_as_float(lower & 0xffff0000u);
    y -= __uint_as_float(upper & 0xffff0000u);
  }
}

// Three tiles, one for each part, of rows that one warpgroup loads, splits and stores: a thread has
// kUnit columns of every kPassRows-th row, in batches of kBatch rows.
constexpr int kUnit = 8;  // columns: 16 bytes of each part
constexpr int kMaxBatch = 4;
using Batch = float[kMaxBatch][kUnit];

template <class T>  // a SwizzledTile
class PartTiles {
 public:
  static constexpr int kCols = T::kSlabs * T::kSlabCols;
  static constexpr int kBytes = kParts * T::kBytes;
  static constexpr int kLanes = power_of_two_from(kCols / kUnit);
  static constexpr int kPassRows = 128 / kLanes;
  static constexpr int kPasses = T::kRows / kPassRows;
  static constexpr int kBatch = kPasses < kMaxBatch ? kPasses : kMaxBatch;
  static constexpr int kBatches = kPasses / kBatch;
  static_assert(kPasses % kBatch == 0, "rows are loaded in whole batches");

  // thread: of the warpgroup. cols: that the array has from its first on. vectors: they are
  // contiguous, and rows 16-byte aligned.
  __device__ __forceinline__ PartTiles(int thread, int cols, int64 col_stride, bool vectors)
      : row_(thread / kLanes),
        column_(thread % kLanes * kUnit),
        left_(cols - column_),
        col_stride_(col_stride),
        vectors_(vectors) {}

  // Starts to load a batch: of the rows begin <= r < end, which are at row_at(r). The others, and
  // columns that are not there, become 0.
  template <class RowAt>
  __device__ __forceinline__ void load(Batch& x, int batch, int begin, int end,
                                       const RowAt& row_at) const {
    if (kLanes * kUnit > kCols && column_ >= kCols) return;
    const int r0 = row_of(batch, 0);
    if (vectors_ && left_ >= kUnit && r0 >= begin && row_of(batch, kBatch - 1) < end) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) load_all(x[b], row_at(row_of(batch, b)) + column_);
    } else {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int r = row_of(batch, b);
        load_there(x[b], row_at(r) + column_ * col_stride_, r >= begin && r < end ? left_ : 0);
      }
    }
  }

  // A row that keep(r) says no to becomes 0 where it has NaN or Inf. True if the thread has met
  // those and kept them.
  template <class Keep>
  __device__ __forceinline__ bool mend(Batch& x, int batch, const Keep& keep) const {
    if (kLanes * kUnit > kCols && column_ >= kCols) return false;
    unsigned strange = 0;  // which have NaN or Inf
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float check = 0.0f;
#pragma unroll
      for (int u = 0; u < kUnit; ++u) check = fmaf(x[b][u], 0.0f, check);
      strange |= (check != 0.0f) << b;
    }
    if (!strange) return false;
    unsigned kept = 0;
#pragma unroll 1
    for (int b = 0; b < kBatch; ++b) {
      if (strange >> b & 1) kept |= keep(row_of(batch, b)) << b;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        // A NaN whose upper half alone would be Inf.
        if (x[b][u] != x[b][u]) x[b][u] = __uint_as_float(0x7fffffffu);
        if (strange >> b & ~kept >> b & 1) x[b][u] = 0.0f;
      }
    }
    return kept != 0;
  }

  // Splits the batch, times sign, and stores the parts.
  __device__ __forceinline__ void store(unsigned char* tiles, const Batch& x, int batch,
                                        float sign) const {
    if (kLanes * kUnit > kCols && column_ >= kCols) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) store_unit(tiles, row_of(batch, b), x[b], sign);
  }

 private:
  __device__ __forceinline__ int row_of(int batch, int b) const {
    return row_ + (batch * kBatch + b) * kPassRows;
  }

  static __device__ __forceinline__ void load_four(float* x, const float* from) {
    const Vec16<float> four = load_vec16(from);
#pragma unroll
    for (int u = 0; u < 4; ++u) x[u] = four.x[u];
  }
  static __device__ __forceinline__ void load_all(float (&x)[kUnit], const float* from) {
#pragma unroll
    for (int v = 0; v < kUnit; v += 4) load_four(x + v, from + v);
  }
  // The first `there` columns; the others become 0.
  __device__ __forceinline__ void load_there(float (&x)[kUnit], const float* from,
                                             int there) const {
#pragma unroll
    for (int v = 0; v < kUnit; v += 4) {
      if (vectors_ && v + 4 <= there) {
        load_four(x + v, from + v);
      } else {
#pragma unroll
        for (int u = v; u < v + 4; ++u) x[u] = u < there ? from[u * col_stride_] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void store_unit(unsigned char* tiles, int r, const float (&x)[kUnit],
                                             float sign) const {
    struct alignas(16) Unit {
      unsigned pairs[kUnit / 2];
    } unit[kParts];
#pragma unroll
    for (int u = 0; u < kUnit; u += 2) {
      unsigned parts[kParts];
      split(x[u] * sign, x[u + 1] * sign, parts);
#pragma unroll
      for (int p = 0; p < kParts; ++p) unit[p].pairs[u / 2] = parts[p];
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      *reinterpret_cast<Unit*>(tiles + p * T::kBytes + T::byte_of(r, column_ / kUnit)) = unit[p];
    }
  }

  int row_;     // of each pass
  int column_;  // first of the thread's
  int left_;    // columns that there are from there on
  int64 col_stride_;
  bool vectors_;
};

}  // namespace cupyflash
