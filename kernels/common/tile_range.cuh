// SPDX-License-Identifier: MIT
// tile_range.cuh: which key tiles a block of queries visits, and which of them need no mask.
#pragma once

#include "common/mask.cuh"

namespace cupyflash {

// The keys that the queries of one head see by position, all of them together.
struct KeyRange {
  int begin;
  int end;

  __device__ KeyRange(const Problem& problem, const Band& band)
      : begin(static_cast<int>(band.first(0))),
        end(static_cast<int>(band.end(problem.seqlen_q - 1))) {}
};

// Key tiles [begin, end) of Bc keys that some query of [i0, i1) sees something of; both ends only
// grow with i, so that the first and the last query say it. begin >= end: there are none.
struct TileRange {
  int begin;
  int end;

  __device__ TileRange(const Band& band, int i0, int i1, int Bc)
      : begin(static_cast<int>(band.first(i0)) / Bc), end(0) {
    const int64 keys_end = band.end(i1 - 1);
    if (keys_end > band.first(i0)) end = ceil_div(static_cast<int>(keys_end), Bc);
  }
};

// Key tiles [begin, end) of Bc keys that every query of [i0, i1) sees all of.
struct UnmaskedRange {
  int begin;
  int end;

  __device__ UnmaskedRange(const Band& band, int i0, int i1, int Bc)
      : begin(ceil_div(static_cast<int>(band.first(i1 - 1)), Bc)),
        end(band.end(i0) < 0 ? 0 : static_cast<int>(band.end(i0)) / Bc) {}
};

}  // namespace cupyflash
