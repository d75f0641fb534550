// SPDX-License-Identifier: MIT
// shared_address.cuh: host twin. An address is an integer on both sides, so that offsets add up.
#pragma once

namespace cupyflash {

using SharedAddress = uintptr_t;

// cvta.to.shared.
inline SharedAddress shared_address(const void* p) { return reinterpret_cast<SharedAddress>(p); }

}  // namespace cupyflash
