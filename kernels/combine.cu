// SPDX-License-Identifier: MIT
// combine.cu: merges the partial results of a forward pass whose keys were split.
// Source     Dao et al. 2022, arXiv:2205.14135, section 3.1: softmax of blocks, put together.
// Computes   lse = log(sum_s e^lse_s), O = sum_s e^lse_s O_s / sum_s e^lse_s over a row's parts s:
//            the merge of online_softmax.py, for all parts at once. Parts that saw no key have
//            lse_s = -inf and weigh nothing; a row of only such parts is 0, its lse -inf.
// Shapes     O_s (splits, rows, dv) and lse_s (splits, rows) of acc, rows = (batch, heads_q,
//            seqlen_q); o and lse are the problem's, any strides.
// Grid       kWarps / team rows a block, each of a team of warps; blocks walk on where the grid is
//            at its limit.
// Owners     warp w of a team sums the parts w, w + team, ... of its row, whose weights it finds
//            itself; a lane has the columns lane, lane + 32, ... of them. Then each thread of the
//            team adds the sums of all its warps for some columns, always in the same order.
// SRAM       the weights of the parts, and the sums of the warps.
// Pipeline   What takes time is waiting: for the forward pass, for lse, for O. So the launch begins
//            while the forward pass ends, where the GPU can do that, and where its rows lie is
//            known by then; a team is as large as its row's parts need for one round of loads; and
//            the first round of O is on its way while the weights are found.
// Limits     up to kMaxSplits parts.
#include "common/config.cuh"
#include "common/params.cuh"
#include "common/part_weights.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cupyflash {

struct CombineParams {
  Problem problem;
  const acc* O;
  const acc* lse;
  int64 rows;
  int64 splits;
  int64 team;  // warps of a row: a power of two up to kWarps
};

constexpr int kWarps = 8;
constexpr int kMaxSplits = 128;
constexpr int kRound = 4;        // parts that a warp loads at a time
constexpr int kLaneColumns = 4;  // of each of them
constexpr int kPassColumns = kLaneColumns * kWarpSize;

// Parts s, s + team, ... of the columns from c0 on; what is not there is left as it was.
__device__ __forceinline__ void load_round(acc (&parts)[kRound][kLaneColumns],
                                           const CombineParams& p, int64 row, int s, int64 c0) {
  const int team = static_cast<int>(p.team);
  const int64 dv = p.problem.head_dim_v;
#pragma unroll
  for (int r = 0; r < kRound; ++r) {
    const int64 part = s + r * team;
#pragma unroll
    for (int x = 0; x < kLaneColumns; ++x) {
      const int64 c = c0 + x * kWarpSize + threadIdx.x % kWarpSize;
      if (part < p.splits && c < dv) parts[r][x] = p.O[(part * p.rows + row) * dv + c];
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kWarps* cupyflash::kWarpSize, 2)
    combine(const __grid_constant__ cupyflash::CombineParams params) {
  using namespace cupyflash;
  __shared__ acc all_weights[kMaxSplits];
  __shared__ acc sums[kWarps][kPassColumns];
  const Problem& problem = params.problem;
  const int splits = static_cast<int>(params.splits);
  const int team = static_cast<int>(params.team);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int mine = warp % team;  // this warp's first part
  const int block_rows = kWarps / team;
  acc* const weights = all_weights + warp / team * splits;

  for (int64 first = static_cast<int64>(blockIdx.x) * block_rows; first < params.rows;
       first += static_cast<int64>(gridDim.x) * block_rows) {
    const int64 row = first + warp / team;
    const bool valid = row < params.rows;  // if not, it only comes to the barriers
    const HeadIndex at(problem, row / problem.seqlen_q);
    const int64 i = row % problem.seqlen_q;
    element* const o =
        static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q) + i * problem.o.row;
    acc* const lse = static_cast<acc*>(problem.lse.data) + at.offset(problem.lse, at.head_q) +
                     i * problem.lse.row;
    if constexpr (kHasGriddepcontrol) griddepcontrol_wait();

    acc parts[kRound][kLaneColumns] = {};
    if (valid) {
      load_round(parts, params, row, mine, 0);
      const acc* const row_lse = params.lse + row;
      __syncwarp();  // the weights of the row before are no longer read
      const acc merged = weigh_parts(
          splits, [&](int s) { return row_lse[s * params.rows]; },
          [&](int s, acc weight) {
            if (s % team == mine) weights[s] = weight;
          });
      __syncwarp();
      if (mine == 0 && lane == 0 && problem.lse.data) *lse = merged;
    }

    for (int64 c0 = 0; c0 < problem.head_dim_v; c0 += kPassColumns) {
      if (valid) {
        acc values[kLaneColumns] = {};
        for (int s = mine; s < splits; s += kRound * team) {
          if (c0 > 0 || s > mine) load_round(parts, params, row, s, c0);
#pragma unroll
          for (int r = 0; r < kRound; ++r) {
            const int part = s + r * team;
            const acc weight = part < splits ? weights[part] : acc(0);
#pragma unroll
            for (int x = 0; x < kLaneColumns; ++x) {
              values[x] += weight == acc(0) ? acc(0) : weight * parts[r][x];
            }
          }
        }
#pragma unroll
        for (int x = 0; x < kLaneColumns; ++x) sums[warp][x * kWarpSize + lane] = values[x];
      }
      __syncthreads();  // all warps of a team have written their sums
      if (valid) {
        for (int c = mine * kWarpSize + lane; c < kPassColumns; c += team * kWarpSize) {
          acc value = 0;
          for (int w = 0; w < team; ++w) value += sums[warp - mine + w][c];
          if (c0 + c < problem.head_dim_v) o[(c0 + c) * problem.o.col] = from_acc<element>(value);
        }
      }
      __syncthreads();  // before they write the next ones
    }
  }
}
