// SPDX-License-Identifier: MIT
// ldmatrix.cuh: four 8 x 8 matrices of 16-bit elements from shared memory into a warp's registers.
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned).
// PTX manual: "Warp Level Matrix Load Instruction: ldmatrix".
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

// ldmatrix.sync.aligned.m8n8.x4.shared.b16; sm_75. Lane l gets elements 2(l % 4) and the next of
// row l / 4 of matrix i in d[i].
__device__ __forceinline__ void ldmatrix_x4(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16; sm_75. The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

}  // namespace cupyflash
