// SPDX-License-Identifier: MIT
// merge_parts.cuh: the parts of a query tile whose keys were divided, merged by the thread block
// that was done last, of plain calls of few 16-bit queries whose parts fit its shared memory.
// combine.cu merges all others; _sm80.py says which is which.
//
// Which block that is differs from run to run; what it does, and in which order, does not.
#pragma once

#include "common/part_weights.cuh"
#include "common/tile_scores.cuh"
#include "ptx/cp_async.cuh"

namespace cupyflash {

// The parts of a tile's rows, and where these rows go.
struct TileParts {
  const acc* O;     // (splits, part_rows, cols) from the tile's row 0 on
  const acc* lse;   // (splits, part_rows)
  int64 part_rows;  // of a part: (heads of the batch, seqlen_q)
  int64 seqlen_q;
  int splits;
  int cols;      // a multiple of kVecParts
  element* o;    // of row 0
  acc* row_lse;  // of row 0; may be null
};

constexpr int kVecParts = 16 / static_cast<int>(sizeof(acc));  // columns that a lane has at a time

// All of them are on their way at once, to `memory`: O (splits, rows, cols), then lse (rows,
// splits), in whose place the weights come. Then a warp has every kWarps-th row to itself.
__device__ __forceinline__ void merge_parts(const TileParts& parts, const QueryRows& rows,
                                            const Problem& problem, bool o_vectors,
                                            unsigned char* memory) {
  const int warp = threadIdx.x / kWarpSize;
  const int column = threadIdx.x % kWarpSize * kVecParts;
  constexpr int kStep = kWarpSize * kVecParts;
  const int splits = parts.splits;
  const int cols = parts.cols;
  const int tile = rows.rows * cols;  // of a part
  acc* const O_smem = reinterpret_cast<acc*>(memory);
  acc* const weights = O_smem + splits * tile;
  for (int r = 0; r < rows.rows; ++r) {
    const int64 row = rows.head(r) * parts.seqlen_q + rows.query(r);
    for (int c = column; c < cols; c += kStep) {
      const acc* from = parts.O + (warp * parts.part_rows + row) * cols + c;
      unsigned to = shared_address(O_smem + warp * tile + r * cols + c);
#pragma unroll 4
      for (int s = warp; s < splits; s += kWarps) {
        cp_async_16(to, from);
        from += kWarps * parts.part_rows * cols;
        to += kWarps * tile * static_cast<int>(sizeof(acc));
      }
    }
    for (int s = threadIdx.x; s < splits; s += kThreads) {
      cp_async_small<sizeof(acc)>(shared_address(weights + r * splits + s),
                                  parts.lse + s * parts.part_rows + row, sizeof(acc));
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // everybody's copies are there

  for (int r = warp; r < rows.rows; r += kWarps) {
    const int i = rows.query(r);
    const int head = rows.head(r);
    acc* const row_weights = weights + r * splits;
    const acc lse = weigh_parts(
        splits, [&](int s) { return row_weights[s]; },
        [&](int s, acc weight) { row_weights[s] = weight; });
    __syncwarp();  // lanes read each other's weights
    if (parts.row_lse && threadIdx.x % kWarpSize == 0) {
      parts.row_lse[i * problem.lse.row + head * problem.lse.head] = lse;
    }
    for (int c = column; c < cols; c += kStep) {
      acc sum[kVecParts] = {};
#pragma unroll 4
      for (int s = 0; s < splits; ++s) {
        const acc weight = row_weights[s];
        const Vec16<acc> part = load_vec16(O_smem + s * tile + r * cols + c);
#pragma unroll
        for (int x = 0; x < kVecParts; ++x) {
          sum[x] += weight == acc(0) ? acc(0) : weight * part.x[x];
        }
      }
      struct alignas(kVecParts * sizeof(element)) Elements {
        element x[kVecParts];
      } merged;
#pragma unroll
      for (int x = 0; x < kVecParts; ++x) merged.x[x] = from_acc<element>(sum[x]);
      element* const to = parts.o + i * problem.o.row + head * problem.o.head + c * problem.o.col;
      if (o_vectors) {
        *reinterpret_cast<Elements*>(to) = merged;
      } else {
#pragma unroll
        for (int x = 0; x < kVecParts; ++x) to[x * problem.o.col] = merged.x[x];
      }
    }
  }
}

}  // namespace cupyflash
