// SPDX-License-Identifier: MIT
// ex2.cuh: powers of two on the special-function unit.
// PTX manual, "Floating Point Instructions: ex2".
#pragma once

namespace cupyflash {

// ex2.approx.ftz.f32 d, a; sm_20; "ex2". Relative error at most 2^-22.5; denormals become 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cupyflash
