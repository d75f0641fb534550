// SPDX-License-Identifier: MIT
// atom.cuh: a read-modify-write that also orders what is around it.
// PTX manual, "Parallel Synchronization and Communication Instructions: atom".
#pragma once

namespace cupyflash {

// atom.acq_rel.gpu.global.inc.u32 old, [count], last; sm_70; "atom". Counts up to `last` and then
// begins at 0 again. What the threads that counted before had written, or had seen behind a barrier
// of their blocks, is seen from here on.
__device__ __forceinline__ unsigned atom_inc_acq_rel(unsigned* count, unsigned last) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(count)), "r"(last)
               : "memory");
  return old;
}

}  // namespace cupyflash
