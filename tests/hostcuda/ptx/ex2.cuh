// SPDX-License-Identifier: MIT
// ex2.cuh: host twin. libm's results, flushed to zero as the instruction does.
#pragma once

namespace cupyflash {

// ex2.approx.ftz.f32.
inline float ex2_approx(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

}  // namespace cupyflash
