// SPDX-License-Identifier: MIT
// atom.cuh: host twin. Nothing interrupts a fibre; for ThreadSanitizer, what orders memory is said.
#pragma once

namespace cupyflash {

inline unsigned atom_inc_acq_rel(unsigned* count, unsigned last) {
  host::release(count);
  const unsigned old = host::update(count, [last](unsigned n) { return n >= last ? 0u : n + 1; });
  host::acquire(count);
  return old;
}

}  // namespace cupyflash
