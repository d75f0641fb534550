// SPDX-License-Identifier: MIT
// named_barrier.cuh: barriers of some of a block's warps. Barrier 0 is __syncthreads's.
// PTX manual, "Parallel Synchronization and Communication Instructions: bar, barrier".
#pragma once

namespace cupyflash {

// bar.sync id, threads; sm_20; "bar". Waits until `threads` threads have arrived, these included.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive id, threads; sm_20; "bar". Counts as arrived and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cupyflash
