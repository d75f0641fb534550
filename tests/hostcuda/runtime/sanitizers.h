// SPDX-License-Identifier: MIT
// sanitizers.h: what AddressSanitizer and ThreadSanitizer must be told; nothing in a build without
// them.
#pragma once

#include <cstddef>

#ifdef HOSTCUDA_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef HOSTCUDA_TSAN
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#endif

#ifdef HOSTCUDA_TSAN
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace host::sanitizers {

// While one lives, what this fibre does is the runtime's work, not the kernel's: allocations and
// copies that ThreadSanitizer would see through its interceptors are no accesses of a CUDA thread.
class Unwatched {
 public:
  Unwatched() {
#ifdef HOSTCUDA_TSAN
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
  ~Unwatched() {
#ifdef HOSTCUDA_TSAN
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// One stack among which the process jumps: a fibre's, or the scheduler's own.
class Stack {
 public:
  // A fibre's stack; without arguments the one that the process began on.
  Stack() {
#ifdef HOSTCUDA_TSAN
    fiber_ = __tsan_get_current_fiber();
#endif
  }
  Stack([[maybe_unused]] void* bottom, [[maybe_unused]] size_t bytes) {
#ifdef HOSTCUDA_ASAN
    bottom_ = bottom;
    bytes_ = bytes;
#endif
#ifdef HOSTCUDA_TSAN
    fiber_ = __tsan_create_fiber(0);
#endif
  }

  // Right before a jump from this stack to `target`.
  void leave_for([[maybe_unused]] const Stack& target) {
#ifdef HOSTCUDA_ASAN
    __sanitizer_start_switch_fiber(&fake_stack_, target.bottom_, target.bytes_);
#endif
#ifdef HOSTCUDA_TSAN
    __tsan_switch_to_fiber(target.fiber_, __tsan_switch_to_fiber_no_sync);
#endif
  }

  // Right after a jump from `source` back to this stack, or onto it for the first time.
  void arrive_from([[maybe_unused]] Stack& source) {
#ifdef HOSTCUDA_ASAN
    __sanitizer_finish_switch_fiber(fake_stack_, &source.bottom_, &source.bytes_);
#endif
  }

 private:
#ifdef HOSTCUDA_ASAN
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
#endif
#ifdef HOSTCUDA_TSAN
  void* fiber_ = nullptr;
#endif
};

inline void acquire([[maybe_unused]] const volatile void* object) {
#ifdef HOSTCUDA_TSAN
  __tsan_acquire(const_cast<void*>(object));
#endif
}

inline void release([[maybe_unused]] const volatile void* object) {
#ifdef HOSTCUDA_TSAN
  __tsan_release(const_cast<void*>(object));
#endif
}

inline void forbid([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#ifdef HOSTCUDA_ASAN
  __asan_poison_memory_region(address, bytes);
#endif
}

inline void permit([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#ifdef HOSTCUDA_ASAN
  __asan_unpoison_memory_region(address, bytes);
#endif
}

}  // namespace host::sanitizers
