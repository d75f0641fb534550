// SPDX-License-Identifier: MIT
// store_fragment.cuh: accumulators of a tensor-core product to rows in global memory.
#pragma once

#include "common/fragment_softmax.cuh"

namespace cupyflash {

// Rows row[0] and row[1] of the thread, times scale, columns 0 to 2 n - 1 of the tile. Negative
// rows are not written, nor columns from `cols` on. vectors: rows are 8-byte aligned, their columns
// contiguous.
template <int n>
__device__ __forceinline__ void store_rows(const float (&O)[n], const float (&scale)[kFragmentRows],
                                           element* out, const int64 (&row)[kFragmentRows],
                                           int64 row_stride, int64 col_stride, int cols,
                                           bool vectors) {
  struct alignas(8) Pair {
    unsigned x[2];
  };
  const int t = threadIdx.x % 4;
  const bool odd = t % 2;
#pragma unroll
  for (int r = 0; r < kFragmentRows; ++r) {
    element* const to = out + row[r] * row_stride;
    if (vectors && cols % 16 == 0) {
      // Two neighbours exchange halves of two groups of 8 columns: the even one then has 4 columns
      // of the first, the odd one 4 of the second, and a quad fills a sector of 32 bytes.
      element* const mine = to + 4 * (t / 2) + 8 * odd;
#pragma unroll
      for (int x = 2 * r; x < n; x += 8) {
        const unsigned first = pack2(O[x] * scale[r], O[x + 1] * scale[r]);
        const unsigned second = pack2(O[x + 4] * scale[r], O[x + 5] * scale[r]);
        const unsigned got = __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
        if (row[r] >= 0 && 2 * (x - 2 * r) < cols) {
          *reinterpret_cast<Pair*>(mine + 2 * (x - 2 * r)) =
              odd ? Pair{{got, second}} : Pair{{first, got}};
        }
      }
    } else if (row[r] >= 0) {
#pragma unroll
      for (int x = 2 * r; x < n; x += 4) {
        const int column = 2 * (x - 2 * r) + 2 * t;
        if (column < cols) to[column * col_stride] = from_acc<element>(O[x] * scale[r]);
        if (column + 1 < cols) {
          to[(column + 1) * col_stride] = from_acc<element>(O[x + 1] * scale[r]);
        }
      }
    }
  }
}

}  // namespace cupyflash
