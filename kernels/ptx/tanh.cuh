// SPDX-License-Identifier: MIT
// tanh.cuh: the hyperbolic tangent of the special-function unit.
#pragma once

namespace cupyflash {

// tanh.approx.f32; sm_75; "Floating Point Instructions: tanh". Relative error at most 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cupyflash
