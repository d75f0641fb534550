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
    const unsigned tiles =
        static_cast<unsigned>(ceil_div(p.problem.seqlen_q * pack, static_cast<int64>(kBr)));
    const Division<unsigned> by_split(at, static_cast<unsigned>(p.splits));
    const Division<unsigned> by_slice(by_split.quotient, static_cast<unsigned>(p.slices));
    split = static_cast<int>(by_split.rest);
    slice = static_cast<int>(by_slice.rest);
    const unsigned bunch = static_cast<unsigned>(p.bunch);
    const Division<unsigned> by_bunch(by_slice.quotient, bunch * tiles);
    const unsigned first = by_bunch.quotient * bunch;
    const unsigned left = static_cast<unsigned>(p.heads) - first;
    const Division<unsigned> by_head(by_bunch.rest, left < bunch ? left : bunch);
    tile = tiles - 1 - by_head.quotient;
    head = p.first_head + first + by_head.rest;
  }
};

}  // namespace cupyflash
