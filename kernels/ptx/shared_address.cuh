// SPDX-License-Identifier: MIT
// shared_address.cuh: addresses within the shared window, one register each.
#pragma once

namespace cupyflash {

// cvta.to.shared, as an intrinsic; any SM; "Data Movement and Conversion: cvta".
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

}  // namespace cupyflash
