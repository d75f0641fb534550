// SPDX-License-Identifier: MIT
// ldmatrix.cuh: host twin. Lane l hands in row l % 8 of matrix l / 8.
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

struct MatrixRow {
  uint16_t x[8];
};
struct MatrixParts {
  unsigned d[4];
};

inline void load_matrices(unsigned (&d)[4], unsigned row, bool transpose, const char* what,
                          host::Place place) {
  const void* const address = twin::at_shared_address(row);
  if (row % 16) host::fault(place, "%s: misaligned address, expected a multiple of 16", what);
  if (!host::is_shared(address, 16)) host::fault(place, "%s: not from shared memory", what);
  MatrixRow mine;
  __builtin_memcpy(&mine, address, sizeof mine);
  const auto parts = host::warp_collective<MatrixParts>(
      0xffffffffu, what, place, mine,
      [transpose](const MatrixRow* rows, host::Members, MatrixParts* results) {
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = lane % 4;
          for (int i = 0; i < 4; ++i) {
            const uint16_t low = transpose ? rows[8 * i + 2 * t].x[g] : rows[8 * i + g].x[2 * t];
            const uint16_t high =
                transpose ? rows[8 * i + 2 * t + 1].x[g] : rows[8 * i + g].x[2 * t + 1];
            results[lane].d[i] = unsigned(high) << 16 | low;
          }
        }
      });
  for (int i = 0; i < 4; ++i) d[i] = parts.d[i];
}

// ldmatrix.x4.
inline void ldmatrix_x4(unsigned (&d)[4], unsigned row, host::Place place = host::Place::here()) {
  load_matrices(d, row, false, "ldmatrix_x4", place);
}

// ldmatrix.x4.trans.
inline void ldmatrix_x4_trans(unsigned (&d)[4], unsigned row,
                              host::Place place = host::Place::here()) {
  load_matrices(d, row, true, "ldmatrix_x4_trans", place);
}

}  // namespace cupyflash
