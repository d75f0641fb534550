// SPDX-License-Identifier: MIT
// fence.cuh: order between a thread's own accesses and those of the asynchronous units.
// PTX manual, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace cupyflash {

// fence.mbarrier_init.release.cluster; sm_90; "fence". After mbarrier.init, before others use it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// fence.proxy.async.shared::cta; sm_90; "fence". Ordinary stores to shared memory become visible
// to the tensor cores and to TMA; each storing thread needs it, before the barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cupyflash
