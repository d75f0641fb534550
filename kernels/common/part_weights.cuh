// SPDX-License-Identifier: MIT
// part_weights.cuh: what the parts of a row weigh whose keys were divided.
// Source: Dao et al. 2022, arXiv:2205.14135, section 3.1: softmax of blocks, put together.
#pragma once

#include "common/online_softmax.cuh"

namespace cupyflash {

// By a warp: set(s, weight) for each part s of a row, by one of its lanes, from lse_at(s). Weights
// are e^lse_s / sum e^lse_s, 0 where no part has seen a key. Returns the row's lse.
template <class LseAt, class Set>
__device__ __forceinline__ acc weigh_parts(int splits, const LseAt& lse_at, const Set& set) {
  const int lane = threadIdx.x % kWarpSize;
  acc top = kMinusInfinity;
  for (int s = lane; s < splits; s += kWarpSize) {
    const acc x = lse_at(s);
    top = x > top || x != x ? x : top;
  }
  top = warp_max(top);
  const acc base = exponent_base(top);
  acc sum = 0;
  for (int s = lane; s < splits; s += kWarpSize) sum += exp_nat(lse_at(s) - base);
  sum = warp_sum(sum);
  // From the same numbers as their sum: e^(lse_s - lse) would take over the rounding of lse.
  for (int s = lane; s < splits; s += kWarpSize) {
    set(s, sum == acc(0) ? acc(0) : exp_nat(lse_at(s) - base) / sum);
  }
  return sum == acc(0) ? kMinusInfinity : base + log(sum);
}

}  // namespace cupyflash
