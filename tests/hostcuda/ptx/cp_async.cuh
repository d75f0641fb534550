// SPDX-License-Identifier: MIT
// cp_async.cuh: host twin. A copy reads and writes when its schedule lands it, at latest when the
// thread waits for its group.
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

// The copies of one thread, by group.
struct CopyGroups {
  using Group = std::vector<std::shared_ptr<host::Operation>>;
  Group open;
  std::vector<Group> committed;  // oldest first

  static CopyGroups& of_thread() {
    // Threads are numbered from 0, and 0 is no address.
    return host::state_at<CopyGroups>(reinterpret_cast<void*>(uintptr_t(host::thread_index()) + 1));
  }
};

inline void start_copy(unsigned to, const void* from, int size, int bytes, const char* what,
                       host::Place place) {
  void* const target = twin::at_shared_address(to);
  if (bytes < 0 || bytes > size) host::fault(place, "%s: %d of %d bytes", what, bytes, size);
  if (to % size || (bytes && reinterpret_cast<uintptr_t>(from) % size)) {
    host::fault(place, "%s: misaligned address, expected a multiple of %d", what, size);
  }
  if (!host::is_shared(target, size)) host::fault(place, "%s: not to shared memory", what);
  // A read past an array is the fault of the thread that asked for it, whenever the copy lands.
  for (int b = 0; b < bytes; ++b) static_cast<void>(static_cast<const volatile char*>(from)[b]);
  CopyGroups::of_thread().open.push_back(host::issue([=] {
    __builtin_memcpy(target, from, bytes);
    __builtin_memset(static_cast<char*>(target) + bytes, 0, size - bytes);
  }));
}

// cp.async.cg.
inline void cp_async_16(unsigned to, const void* from, int bytes,
                        host::Place place = host::Place::here()) {
  start_copy(to, from, 16, bytes, "cp_async_16", place);
}

// cp.async.cg, all bytes.
inline void cp_async_16(unsigned to, const void* from, host::Place place = host::Place::here()) {
  start_copy(to, from, 16, 16, "cp_async_16", place);
}

// cp.async.ca.
template <int size>
inline void cp_async_small(unsigned to, const void* from, int bytes,
                           host::Place place = host::Place::here()) {
  static_assert(size == 4 || size == 8, "cp.async.ca takes 4, 8 or 16 bytes");
  start_copy(to, from, size, bytes, "cp_async_small", place);
}

// cp.async.commit_group.
inline void cp_async_commit() {
  CopyGroups& groups = CopyGroups::of_thread();
  groups.committed.push_back(std::exchange(groups.open, {}));
}

// cp.async.wait_group.
template <int pending>
inline void cp_async_wait() {
  CopyGroups& groups = CopyGroups::of_thread();
  while (groups.committed.size() > pending) {
    for (const auto& copy : groups.committed.front()) copy->land();
    groups.committed.erase(groups.committed.begin());
  }
}

}  // namespace cupyflash
