// SPDX-License-Identifier: MIT
// griddepcontrol.cuh: a launch that begins while the one before it in its stream ends
// (programmatic dependent launch). Both instructions do nothing in a launch that was not asked for
// as such. PTX manual, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace cupyflash {

// sm_90 and newer; elsewhere a launch begins when the one before it has ended.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasGriddepcontrol = true;
#else
constexpr bool kHasGriddepcontrol = false;
#endif

// griddepcontrol.launch_dependents; sm_90; "griddepcontrol". The next launch may begin once all
// blocks of this one have come here or ended. It says nothing of memory.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait; sm_90; "griddepcontrol". Until the launch before has ended and all that it
// wrote can be read.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace cupyflash
