// SPDX-License-Identifier: MIT
// simt_chunks.cuh: how chunks of Q, K and V come to SRAM, by way of registers: they are loaded
// during one step and stored at its end.
#pragma once

#include "common/simt_layout.cuh"

namespace cupyflash {

// kVec neighbours of a row, as they lie in global memory.
struct alignas(kVec * sizeof(element)) Elements {
  element x[kVec];
};

// The same on their way. As 16-bit numbers they would be taken apart, and so be waited for, right
// behind the load.
struct alignas(kVec * sizeof(element)) Piece {
  unsigned words[kVec * sizeof(element) / 4];
};

// What a thread carries of each rows x cols part of a chunk from global memory to SRAM: the same
// columns of every kPassRows-th row.
template <int rows, int cols>
struct Carried {
  static constexpr int kRowPieces = cols / kVec;
  static constexpr int kPassRows = kThreads / kRowPieces;
  static constexpr int kPieces = ceil_div(rows, kPassRows);
  static_assert(kThreads % kRowPieces == 0, "a thread keeps to its columns");

  // Of the part that begins at (row0, col0), rows [begin, end) and the first `there` columns are
  // there; all others become 0 and are not read.
  static __device__ __forceinline__ void load(Piece* pieces, const void* data, const Source& source,
                                              int row0, int col0, int begin, int end, int there) {
    const unsigned thread = pin(threadIdx.x);  // or all addresses would be kept in registers
    const int r0 = thread / kRowPieces;
    const int c = thread % kRowPieces * kVec;
    const element* const first = static_cast<const element*>(data) + source.offset;
    if (source.vectors && there % kVec == 0) {
      const element* const from =
          first + static_cast<int64>(row0 + r0) * source.near_row + (col0 + c);
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const int r = r0 + n * kPassRows;
        const int64 further = static_cast<int64>(n * kPassRows) * source.near_row;
        const bool inside = r >= begin && r < end && c < there;
        pieces[n] = inside ? *reinterpret_cast<const Piece*>(from + further) : Piece();
      }
    } else {
      const element* const from = first + row0 * source.row + col0 * source.col;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const int r = r0 + n * kPassRows;
        const int left = r >= begin && r < end ? there - c : 0;
        const element* next = from + r * source.row + c * source.col;
        Elements elements;
#pragma unroll
        for (int e = 0; e < kVec; ++e, next += source.col) {
          elements.x[e] = e < left ? *next : from_acc<element>(acc(0));
        }
        pieces[n] = __builtin_bit_cast(Piece, elements);
      }
    }
  }

  static __device__ __forceinline__ void store(const Piece* pieces, acc* tile, int ld) {
    const unsigned thread = pin(threadIdx.x);
    const int r0 = thread / kRowPieces;
    acc* const to = tile + r0 * ld + thread % kRowPieces * kVec;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      if (rows % kPassRows && r0 + n * kPassRows >= rows) break;
      const Elements elements = __builtin_bit_cast(Elements, pieces[n]);
      Vec16<acc> values;
#pragma unroll
      for (int e = 0; e < kVec; ++e) values.x[e] = to_acc(elements.x[e]);
      *reinterpret_cast<Vec16<acc>*>(to + n * kPassRows * ld) = values;
    }
  }
};

using CarriedQ = Carried<kBr, kHeadDim>;
using CarriedK = Carried<kBc, kHeadDim>;
using CarriedV = Carried<kKeys, kGroup>;
constexpr int kScorePieces = CarriedQ::kPieces + CarriedK::kPieces;
constexpr int kPieces = kScorePieces > CarriedV::kPieces ? kScorePieces : CarriedV::kPieces;

}  // namespace cupyflash
