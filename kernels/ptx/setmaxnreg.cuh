// SPDX-License-Identifier: MIT
// setmaxnreg.cuh: registers handed from one warpgroup of a block to another.
// PTX manual, "Miscellaneous Instructions: setmaxnreg". sm_90a only.
#pragma once

namespace cupyflash {

// setmaxnreg.dec.sync.aligned.u32 count; sm_90a; "setmaxnreg". All warps of the warpgroup.
template <int count>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a multiple of 8 in 24..256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// setmaxnreg.inc.sync.aligned.u32 count; sm_90a; "setmaxnreg". Blocks until others gave enough.
template <int count>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a multiple of 8 in 24..256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace cupyflash
