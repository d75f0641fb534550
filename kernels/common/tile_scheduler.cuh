// SPDX-License-Identifier: MIT
// tile_scheduler.cuh: which (head, block of queries) a persistent thread block works on, and when.
//
// Works are numbered so that neighbours in time share K and V in the L2 cache: heads in bunches
// whose K and V fit there, and within a bunch the last queries first, since with a causal mask they
// have most keys to visit; within one block of queries head by head, so that the query heads of one
// key head stand together. Thread blocks take works in this order: with a counter, whoever is free
// takes the next one; without, thread block b takes b, b + gridDim, ..., which is as good where all
// works take the same time. They nearly do: a head's last block of queries may be a short one.
// Where every bunch is worked on at once by whole rounds of the grid, the same thread blocks would
// have all of the short ones, and so each round begins with another block of queries.
#pragma once

#include "common/params.cuh"

namespace cupyflash {

struct Schedule {
  int64 bunch;   // heads that are walked together
  int64 blocks;  // Tr, blocks of queries of a head
  int64 heads;   // all heads of the batch; heads times blocks stays below 2^31
  int* counter;  // of works taken beyond the first of each thread block, 0 at first; may be null
};

// What one thread takes for its thread block.
class Works {
 public:
  __device__ explicit Works(const Schedule& schedule) : schedule_(schedule), work_(blockIdx.x) {}

  __device__ bool valid() const {
    return work_ < static_cast<unsigned>(schedule_.heads * schedule_.blocks);
  }

  __device__ void next() {
    work_ = schedule_.counter ? gridDim.x + atomicAdd(schedule_.counter, 1) : work_ + gridDim.x;
  }

  struct Position {
    unsigned head;   // among all heads of the batch
    unsigned block;  // of queries, in the head
  };

  __device__ Position position() const {
    const unsigned blocks = static_cast<unsigned>(schedule_.blocks);
    const unsigned heads = static_cast<unsigned>(schedule_.heads);
    const unsigned bunch = static_cast<unsigned>(schedule_.bunch);
    const unsigned first = work_ / (bunch * blocks) * bunch;
    const unsigned here = heads - first < bunch ? heads - first : bunch;
    const unsigned within = work_ - first * blocks;
    unsigned block = within / here;
    const bool whole_rounds = !schedule_.counter && gridDim.x % (bunch * blocks) == 0;
    if (whole_rounds) block = (block + work_ / gridDim.x) % blocks;
    return {first + within % here, blocks - 1 - block};
  }

 private:
  const Schedule& schedule_;
  unsigned work_;
};

}  // namespace cupyflash
