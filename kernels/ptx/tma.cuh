// SPDX-License-Identifier: MIT
// tma.cuh: copies of boxes between tensors in global memory and shared memory, made by the tensor
// memory accelerator. PTX manual, "Data Movement and Conversion Instructions: Tensor copy".
#pragma once

#include "ptx/mbarrier.cuh"

namespace cupyflash {

// What cuTensorMapEncodeTiled wrote, passed to the kernel by value (__grid_constant__).
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// prefetch.tensormap [map]; sm_90; "prefetch, prefetchu".
__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes [dst], [map, {...}],
// [mbarrier]; sm_90, PTX 8.6 for shared::cta, so shared::cluster here; "cp.async.bulk.tensor".
// Elements outside the tensor arrive as zeros, and their bytes count too. Column at[0] begins at a
// multiple of 16 bytes: another one is an illegal instruction on an H200, whatever the swizzle.
__device__ __forceinline__ void tma_load_5d(void* dst, const TensorMap& map, Mbarrier& barrier,
                                            const int (&at)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(dst)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "r"(at[4])
      : "memory");
}

}  // namespace cupyflash
