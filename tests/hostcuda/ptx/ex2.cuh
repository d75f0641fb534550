// SPDX-License-Identifier: MIT
// ex2.cuh: host twin, by libm; its rounding is not that of the special-function unit.
#pragma once

namespace cupyflash {

inline float ex2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // ftz
}

}  // namespace cupyflash
