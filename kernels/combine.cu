// SPDX-License-Identifier: MIT
// combine.cu: merges the partial results of a forward pass whose keys were split.
// Computes   lse = log(sum_s e^lse_s), O = sum_s e^(lse_s - lse) O_s over the parts s of each row:
//            the merge of online_softmax.py, for all parts at once. Parts that saw no key have
//            lse_s = -inf and weigh nothing; a row of only such parts is 0, its lse -inf.
// Shapes     O_s (splits, rows, dv) and lse_s (splits, rows) of acc, rows = (batch, heads_q,
//            seqlen_q); o and lse are the problem's, any strides.
// Grid       a warp a row; blocks walk on where the grid is at its limit.
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

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kCombineThreads)
    combine(const __grid_constant__ cupyflash::CombineParams params) {
  using namespace cupyflash;
  const Problem& problem = params.problem;
  const int splits = static_cast<int>(params.splits);
  constexpr int kWarpsOfBlock = kCombineThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int64 step = static_cast<int64>(gridDim.x) * kWarpsOfBlock;
  for (int64 row = static_cast<int64>(blockIdx.x) * kWarpsOfBlock + threadIdx.x / kWarpSize;
       row < params.rows; row += step) {
    acc top = kMinusInfinity;
#pragma unroll 1
    for (int s = lane; s < splits; s += kWarpSize) {
      const acc x = params.lse[s * params.rows + row];
      top = x > top || x != x ? x : top;
    }
    top = warp_max(top);
    const acc base = exponent_base(top);
    acc sum = 0;
#pragma unroll 1
    for (int s = lane; s < splits; s += kWarpSize) {
      sum += exp_nat(params.lse[s * params.rows + row] - base);
    }
    sum = warp_sum(sum);
    const acc total = sum == acc(0) ? kMinusInfinity : base + log(sum);

    const HeadIndex at(problem, row / problem.seqlen_q);
    const int64 i = row % problem.seqlen_q;
    element* const o =
        static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q) + i * problem.o.row;
    for (int64 c = lane; c < problem.head_dim_v; c += kWarpSize) {
      acc value = 0;
#pragma unroll 1
      for (int s = 0; s < splits; ++s) {
        const acc weight = exp_nat(params.lse[s * params.rows + row] - exponent_base(total));
        const acc part = params.O[(s * params.rows + row) * problem.head_dim_v + c];
        value += weight == acc(0) ? acc(0) : weight * part;
      }
      o[c * problem.o.col] = from_acc<element>(value);
    }
    if (lane == 0 && problem.lse.data) {
      static_cast<acc*>(problem.lse.data)[at.offset(problem.lse, at.head_q) + i * problem.lse.row] =
          total;
    }
  }
}
