// SPDX-License-Identifier: MIT
// swizzled_tile.cuh: tiles in shared memory as TMA lays them down and wgmma reads them.
//
// A tile of rows x cols 16-bit elements is cut into slabs of 64 columns, or of 32 where 64 does not
// divide cols; slab after slab lies rows x slab, and within each 8 rows the 16-byte units of a row
// are permuted (swizzled), so that 8 rows of one unit, and 8 units of one row, meet no bank twice.
//
//   slab 0              slab 1
//   row 0  0 1 2 .. 7   row 0  0 1 2 .. 7     128-byte swizzle: unit u of row r is at u ^ (r % 8)
//   row 1  1 0 3 .. 6   row 1  1 0 3 .. 6      64-byte swizzle: at u ^ (r / 2 % 4)
//   ...
#pragma once

#include "ptx/wgmma.cuh"

namespace cupyflash {

template <int rows, int cols>
struct SwizzledTile {
  static constexpr int kRows = rows;
  static constexpr int kSlabCols = cols % 64 == 0 ? 64 : 32;
  static constexpr Swizzle kSwizzle = kSlabCols == 64 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlabs = cols / kSlabCols;
  static constexpr int kRowBytes = 2 * kSlabCols;
  static constexpr int kSlabBytes = rows * kRowBytes;
  static constexpr int kBytes = kSlabs * kSlabBytes;
  static_assert(cols % 32 == 0, "a tile is made of whole slabs");
  static_assert(rows % 8 == 0 && kSlabBytes % 1024 == 0, "slabs begin where a swizzle does");

  // Descriptor of the tile's first 16 columns, as an operand whose columns are summed over.
  static __device__ __forceinline__ unsigned long long by_columns(const void* tile) {
    return wgmma_descriptor(tile, kSwizzle, 16, 8 * kRowBytes);
  }
  // What leads from there to columns 16 k to 16 k + 15.
  static constexpr __device__ unsigned columns_step(int k) {
    return (k * 16 / kSlabCols * kSlabBytes + k * 16 % kSlabCols * 2) / 16;
  }

  // Descriptor of the tile's first 16 rows, as a transposed operand whose rows are summed over.
  static __device__ __forceinline__ unsigned long long by_rows(const void* tile) {
    return wgmma_descriptor(tile, kSwizzle, kSlabBytes, 8 * kRowBytes);
  }
  // What leads from there to rows 16 k to 16 k + 15.
  static constexpr __device__ unsigned rows_step(int k) { return k * 16 * kRowBytes / 16; }

  // From the begin of a row to its columns 8 unit to 8 unit + 7.
  static __device__ __forceinline__ unsigned unit_offset(int row, int unit) {
    constexpr int kUnits = kRowBytes / 16;
    const int permuted = unit % kUnits ^ (kUnits == 8 ? row % 8 : row / 2 % 4);
    return unit / kUnits * kSlabBytes + permuted * 16;
  }
  // The same from the begin of the tile.
  static __device__ __forceinline__ unsigned byte_of(int row, int unit) {
    return row * kRowBytes + unit_offset(row, unit);
  }
};

}  // namespace cupyflash
