// SPDX-License-Identifier: MIT
// pin.cuh: no instruction at all, but a place that a value is computed at.
#pragma once

namespace cupyflash {

// An empty asm statement through which x passes: what depends on x is computed behind it, and not
// ahead of a loop that seldom needs it, where it would occupy registers.
__device__ __forceinline__ int pin(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace cupyflash
