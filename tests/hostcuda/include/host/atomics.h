// SPDX-License-Identifier: MIT
// atomics.h: read-modify-write of one location. Nothing interrupts a fibre, so that a
// compare-exchange loop runs once; it is there to tell ThreadSanitizer that the access is atomic.
#pragma once

#include "host/runtime.h"

namespace host {

template <class T>
struct Bits {
  using type = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
};

template <class T, class F>
T update(T* address, F f) {
  using B = typename Bits<T>::type;
  static_assert(sizeof(B) == sizeof(T));
  B* bits = reinterpret_cast<B*>(address);
  B old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED), new_bits;
  T old;
  do {
    __builtin_memcpy(&old, &old_bits, sizeof old);
    const T updated = f(old);
    __builtin_memcpy(&new_bits, &updated, sizeof updated);
  } while (!__atomic_compare_exchange_n(bits, &old_bits, new_bits, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return old;
}

}  // namespace host

#define HOSTCUDA_ATOMIC(name, type, expression)                                     \
  inline type name(type* address, type value) {                                     \
    return host::update(address, [value](type old) -> type { return expression; }); \
  }
#define HOSTCUDA_INTEGER_ATOMICS(type, unsigned_type)                                         \
  HOSTCUDA_ATOMIC(                                                                            \
      atomicAdd, type,                                                                        \
      static_cast<type>(static_cast<unsigned_type>(old) + static_cast<unsigned_type>(value))) \
  HOSTCUDA_ATOMIC(atomicMax, type, old < value ? value : old)                                 \
  HOSTCUDA_ATOMIC(atomicMin, type, value < old ? value : old)                                 \
  HOSTCUDA_ATOMIC(atomicAnd, type, old& value)                                                \
  HOSTCUDA_ATOMIC(atomicOr, type, old | value)                                                \
  HOSTCUDA_ATOMIC(atomicXor, type, old ^ value)                                               \
  HOSTCUDA_ATOMIC(atomicExch, type, (void(old), value))                                       \
  inline type atomicCAS(type* address, type compare, type value) {                            \
    return host::update(address, [=](type old) { return old == compare ? value : old; });     \
  }

HOSTCUDA_INTEGER_ATOMICS(int, unsigned)
HOSTCUDA_INTEGER_ATOMICS(unsigned, unsigned)
HOSTCUDA_INTEGER_ATOMICS(unsigned long long, unsigned long long)
HOSTCUDA_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
HOSTCUDA_ATOMIC(atomicSub, unsigned, old - value)
HOSTCUDA_ATOMIC(atomicAdd, float, old + value)
HOSTCUDA_ATOMIC(atomicAdd, double, old + value)
HOSTCUDA_ATOMIC(atomicExch, float, (void(old), value))
#undef HOSTCUDA_INTEGER_ATOMICS
#undef HOSTCUDA_ATOMIC
