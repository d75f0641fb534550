// SPDX-License-Identifier: MIT
// divided_work.cuh: what each thread block of a launch works on: which part of the keys, which
// columns of V, which head and which queries.
#pragma once

#include "common/config.cuh"
#include "common/params.cuh"

namespace cupyflash {

// What one thread block does. Works that share keys are neighbours in time, so that K and V come
// from the L2 cache: heads are walked in bunches whose K and V fit there, the last queries of all
// heads of a bunch first, since with a causal mask they have most keys to visit.
struct Work {
  int split;
  int slice;
  int64 head;  // among all
  int64 tile;  // of queries

  // pack: query heads that are rows of one tile.
  template <class Params>
  __device__ Work(const Params& p, int64 pack, unsigned at) {
    const int64 tiles = ceil_div(p.problem.seqlen_q * pack, static_cast<int64>(kBr));
    split = at % static_cast<unsigned>(p.splits);
    at /= static_cast<unsigned>(p.splits);
    slice = at % static_cast<unsigned>(p.slices);
    at /= static_cast<unsigned>(p.slices);
    const unsigned bunch = static_cast<unsigned>(p.bunch);
    const unsigned first = at / (bunch * static_cast<unsigned>(tiles)) * bunch;
    const unsigned left = static_cast<unsigned>(p.heads) - first;
    const unsigned here = left < bunch ? left : bunch;
    const unsigned rest = at - first * static_cast<unsigned>(tiles);
    tile = tiles - 1 - rest / here;
    head = p.first_head + first + rest % here;
  }
};

}  // namespace cupyflash
