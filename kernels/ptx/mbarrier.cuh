// SPDX-License-Identifier: MIT
// mbarrier.cuh: barriers in shared memory that count arrivals of threads and bytes of copies.
// PTX manual, "Parallel Synchronization and Communication Instructions: mbarrier".
//
// A phase ends when the pending arrivals and the pending bytes are both zero; the next one begins
// at once with the same number of arrivals. Waiting is for the end of a phase, named by its parity:
// the first phase has parity 0, so that a wait for parity 1 on a new barrier does not block.
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

struct alignas(8) Mbarrier {
  unsigned long long state;
};

// mbarrier.init.shared::cta.b64 [addr], count; sm_80; "mbarrier.init".
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// mbarrier.arrive.shared::cta.b64 state, [addr]; sm_80; "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64 state, [addr], bytes; sm_90; "mbarrier.arrive".
// The phase also waits for `bytes` of copies; the arrival itself is counted after that.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64 done, [addr], parity; sm_90; "mbarrier.try_wait".
// It suspends for a time that the hardware chooses, and is repeated until the phase has ended. The
// loop is in the text, so that the compiler's control flow stays straight, and what is uniform in
// it stays in uniform registers.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace cupyflash
