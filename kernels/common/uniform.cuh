// SPDX-License-Identifier: MIT
// uniform.cuh: numbers that are the same in all lanes, in the registers of the warp.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

// The same number in all lanes, and the compiler knows it.
__device__ __forceinline__ int warp_uniform(int x) { return __reduce_max_sync(kFullWarp, x); }

// A descriptor `step` further on: addresses are in its lower half, and never carry. It is made in
// uniform registers, where wgmma wants it, and not moved there between one wgmma and the next,
// which cost a fifth of the speed at head_dim 256.
__device__ __forceinline__ unsigned long long advanced(unsigned long long descriptor,
                                                       unsigned step) {
  const unsigned low = warp_uniform(static_cast<unsigned>(descriptor) + step);
  return (descriptor & 0xffffffff00000000ull) | low;
}

}  // namespace cupyflash
