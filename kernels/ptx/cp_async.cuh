// SPDX-License-Identifier: MIT
// cp_async.cuh: copies from global to shared memory that go on behind the thread's back.
// PTX manual: "Data Movement and Conversion: Non-bulk asynchronous copy".
#pragma once

#if __CUDA_ARCH__ < 800
#error "cp.async exists from sm_80 on"
#endif

#include "ptx/shared_address.cuh"

namespace cupyflash {

// cp.async.cg.shared.global.L2::128B [to], [from], 16, bytes; sm_80. Bytes past `bytes` become 0.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// cp.async.cg.shared.global.L2::128B [to], [from], 16; sm_80. All 16 bytes are there.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from)
               : "memory");
}

// cp.async.ca.shared.global [to], [from], size, bytes; sm_80. size is 4 or 8; as above.
template <int size>
__device__ __forceinline__ void cp_async_small(unsigned to, const void* from, int bytes) {
  static_assert(size == 4 || size == 8, "cp.async.ca takes 4, 8 or 16 bytes");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(size),
               "r"(bytes)
               : "memory");
}

// cp.async.commit_group; sm_80. Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// cp.async.wait_group pending; sm_80. All of this thread's groups but the last `pending` landed.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

}  // namespace cupyflash
