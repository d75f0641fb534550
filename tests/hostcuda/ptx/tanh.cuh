// SPDX-License-Identifier: MIT
// tanh.cuh: host twin, by libm.
#pragma once

namespace cupyflash {

// tanh.approx.f32.
inline float tanh_approx(float x) { return tanhf(x); }

}  // namespace cupyflash
