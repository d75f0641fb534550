// SPDX-License-Identifier: MIT
// combine.cu: merges the partial results of a forward pass whose keys were split.
// Computes   lse = log(sum_s e^lse_s), O = sum_s e^lse_s O_s / sum_s e^lse_s over a row's parts s:
//            the merge of online_softmax.py, for all parts at once. Parts that saw no key have
//            lse_s = -inf and weigh nothing; a row of only such parts is 0, its lse -inf.
// Shapes     O_s (splits, rows, dv) and lse_s (splits, rows) of acc, rows = (batch, heads_q,
//            seqlen_q); o and lse are the problem's, any strides.
// Grid       a block a row; blocks walk on where the grid is at its limit.
// Owners     each warp finds the weights of all parts, warp 0 keeps them; a thread owns columns c,
//            c + 128, ... of its row.
// SRAM       the weights of at most kMaxSplits parts.
// What takes time is waiting for memory, so the parts of a column are read several at a time.
#include "common/config.cuh"
#include "common/online_softmax.cuh"
#include "common/params.cuh"

namespace cupyflash {

struct CombineParams {
  Problem problem;
  const acc* O;
  const acc* lse;
  int64 rows;
  int64 splits;
};

constexpr int kCombineThreads = 128;
constexpr int kMaxSplits = 128;

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kCombineThreads)
    combine(const __grid_constant__ cupyflash::CombineParams params) {
  using namespace cupyflash;
  __shared__ acc weights[kMaxSplits];
  const Problem& problem = params.problem;
  const int splits = static_cast<int>(params.splits);
  const int lane = threadIdx.x % kWarpSize;
  for (int64 row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const acc* const row_lse = params.lse + row;
    acc top = kMinusInfinity;
    for (int s = lane; s < splits; s += kWarpSize) {
      const acc x = row_lse[s * params.rows];
      top = x > top || x != x ? x : top;
    }
    top = warp_max(top);
    const acc base = exponent_base(top);
    acc sum = 0;
    for (int s = lane; s < splits; s += kWarpSize) sum += exp_nat(row_lse[s * params.rows] - base);
    sum = warp_sum(sum);
    __syncthreads();  // the weights of the row before are no longer read
    if (threadIdx.x < kWarpSize) {
      // From the same numbers as their sum: e^(lse_s - lse) would take over the rounding of lse.
      for (int s = lane; s < splits; s += kWarpSize) {
        weights[s] = sum == acc(0) ? acc(0) : exp_nat(row_lse[s * params.rows] - base) / sum;
      }
    }
    __syncthreads();

    const HeadIndex at(problem, row / problem.seqlen_q);
    const int64 i = row % problem.seqlen_q;
    element* const o =
        static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q) + i * problem.o.row;
    for (int64 c = threadIdx.x; c < problem.head_dim_v; c += kCombineThreads) {
      const acc* const parts = params.O + row * problem.head_dim_v + c;
      acc value = 0;
#pragma unroll 8
      for (int s = 0; s < splits; ++s) {
        const acc part = parts[s * params.rows * problem.head_dim_v];
        value += weights[s] == acc(0) ? acc(0) : weights[s] * part;
      }
      o[c * problem.o.col] = from_acc<element>(value);
    }
    if (threadIdx.x == 0 && problem.lse.data) {
      static_cast<acc*>(problem.lse.data)[at.offset(problem.lse, at.head_q) + i * problem.lse.row] =
          sum == acc(0) ? kMinusInfinity : base + log(sum);
    }
  }
}
