// SPDX-License-Identifier: MIT
// shared_address.cuh: host twin. Dynamic shared memory begins at address 0 of the window.
#pragma once

namespace cupyflash {

inline unsigned shared_address(const void* p, host::Place place = host::Place::here()) {
  if (!host::is_shared(p)) host::fault(place, "%p is not in shared memory", p);
  return unsigned(static_cast<const char*>(p) -
                  static_cast<const char*>(host::dynamic_shared_memory(1)));
}

}  // namespace cupyflash

namespace cupyflash::twin {

using namespace host;

// The byte of dynamic shared memory at an address of the window.
inline char* at_shared_address(unsigned address) {
  return static_cast<char*>(dynamic_shared_memory(1)) + address;
}

}  // namespace cupyflash::twin
