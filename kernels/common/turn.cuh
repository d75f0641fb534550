// SPDX-License-Identifier: MIT
// turn.cuh: rings of buffers.
#pragma once

namespace cupyflash {

// Of the n-th use of a ring of buffers: which buffer, and the parity of its mbarriers' phases.
template <int stages>
struct Turn {
  int stage;
  unsigned parity;

  explicit __device__ __forceinline__ Turn(unsigned n)
      : stage(n % stages), parity(n / stages % 2) {}
};

}  // namespace cupyflash
