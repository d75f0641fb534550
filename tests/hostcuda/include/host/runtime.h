// SPDX-License-Identifier: MIT
// runtime.h: what the twins of CUDA's instructions are built on. Every thread of a block is a
// fibre; only one runs at a time, until it suspends itself in one of the functions below.
//
//   wait_until     suspend until a predicate holds
//   collective     a value from each of up to 128 threads in, a value to each of them out
//   block_barrier  bar.sync and bar.arrive with any id and count
//   issue / land   operations that take effect later than they were issued
//   state_at       the block's object that belongs to an address (an mbarrier's phase, say)
//   acquire / release   what ordered memory between two threads, told to ThreadSanitizer
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <typeindex>
#include <utility>

namespace host {

// Where a call stands in the kernel's text: wrappers take `Place place = Place::here()` as their
// last parameter, so that a report names the caller's line and not the wrapper's.
struct Place {
  const char* file;
  int line;

  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Place& other) const;
};

// Stops the process with a report: what happened, in which block and thread, at which place.
[[noreturn]] void fault(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));

unsigned thread_index();   // linear, threadIdx.x fastest
unsigned block_threads();  // threads of a block
inline unsigned lane_index() { return thread_index() % 32; }

// A predicate without ownership: it lives on the stack of the thread that waits for it.
class Predicate {
 public:
  template <class F>
  explicit Predicate(F& f)
      : object_(&f), call_([](void* object) -> bool { return (*static_cast<F*>(object))(); }) {}
  bool operator()() const { return call_(object_); }

 private:
  void* object_;
  bool (*call_)(void*);
};

void wait(Predicate predicate, const char* what, Place place);

// Suspends the thread until predicate() is true. `what` names the wait in a report of a deadlock.
template <class F>
void wait_until(F predicate, const char* what, Place place = Place::here()) {
  wait(Predicate(predicate), what, place);
}

// Lets the others go first: for polls (`while (!test_wait(...))`). If nothing but polls runs for
// long, that is reported as a deadlock.
void yield(const char* what, Place place = Place::here());

// What a collective computes: values[i] and results[i] belong to member i (a lane, or the thread of
// a warpgroup); bit i of `present` says whether member i takes part.
struct Members {
  uint64_t bits[2];
  bool operator[](unsigned i) const { return bits[i / 64] >> (i % 64) & 1; }
};
using CollectiveBody = void (*)(void* context, const void* values, Members present, void* results);

void join(unsigned first_thread, unsigned size, Members members, const char* what, Place place,
          const void* value, size_t value_bytes, void* result, size_t result_bytes,
          CollectiveBody body, void* context);

// Each member hands in `value`; the last one to arrive runs body(values, present, results) once;
// each member returns with its own results[i]. The members that never arrive because they have
// exited are not waited for, and their values are filled with the poison.
template <class Result, class Value, class F>
Result collective(unsigned first_thread, unsigned size, Members members, const char* what,
                  Place place, const Value& value, F body) {
  static_assert(std::is_trivially_copyable_v<Value> && std::is_trivially_copyable_v<Result>);
  Result result;
  join(
      first_thread, size, members, what, place, &value, sizeof(Value), &result, sizeof(Result),
      [](void* context, const void* values, Members present, void* results) {
        (*static_cast<F*>(context))(static_cast<const Value*>(values), present,
                                    static_cast<Result*>(results));
      },
      &body);
  return result;
}

// Among the lanes of `mask` in the caller's warp.
template <class Result, class Value, class F>
Result warp_collective(unsigned mask, const char* what, Place place, const Value& value, F body) {
  return collective<Result>(thread_index() / 32 * 32, 32, Members{{mask, 0}}, what, place, value,
                            body);
}

// Among the 128 threads of the caller's warpgroup.
template <class Result, class Value, class F>
Result warpgroup_collective(const char* what, Place place, const Value& value, F body) {
  return collective<Result>(thread_index() / 128 * 128, 128, Members{{~0ull, ~0ull}}, what, place,
                            value, body);
}

// bar.sync (wait = true) and bar.arrive (wait = false) on barrier `id` of `threads` threads.
void block_barrier(unsigned id, unsigned threads, bool wait, const char* what, Place place);

// An operation that was started and has not yet taken effect. land() makes it take effect, at
// latest when the program waits for it; the schedule may land it at any earlier time ("eager": at
// once, "random").
class Operation {
 public:
  Operation(std::function<void()> effect, bool lingers)
      : lingers(lingers), effect_(std::move(effect)) {}
  bool landed() const { return !effect_; }
  void land() {
    if (auto effect = std::exchange(effect_, nullptr)) effect();
  }

  // Under "newest": it takes effect only if it is waited for, and after those that don't linger.
  const bool lingers;
  bool waited_for = false;

 private:
  std::function<void()> effect_;
};
std::shared_ptr<Operation> issue(std::function<void()> effect, bool lingers = false);
// What a wait for an operation does: it lands; under "newest", when no thread can go on without it.
void land(const std::shared_ptr<Operation>& operation, const char* what, Place place);

// The object of type T that belongs to this address in the running block; made when first asked
// for.
void* object_at(const void* address, std::type_index type, std::shared_ptr<void> (*make)());
template <class T>
T& state_at(const volatile void* address) {
  const auto make = []() -> std::shared_ptr<void> { return std::make_shared<T>(); };
  return *static_cast<T*>(object_at(const_cast<const void*>(address), typeid(T), make));
}

// Dynamic shared memory of the running block.
void* dynamic_shared_memory(size_t alignment);
size_t dynamic_shared_bytes();
// True if the bytes lie in the block's dynamic or static shared memory.
bool is_shared(const volatile void* address, size_t bytes = 1);

template <class T>
T* dynamic_shared(size_t alignment = alignof(T)) {
  return static_cast<T*>(dynamic_shared_memory(alignment));
}

// Tell ThreadSanitizer that what came before release(x) is ordered before what follows acquire(x).
void acquire(const volatile void* object);
void release(const volatile void* object);

// The entry of a module, called once per thread; `params` points to the parameter struct's bytes.
struct Entry {
  const char* name;
  size_t params_bytes;
  void (*call)(const void* params);
};
extern const Entry entry;

template <class Params>
constexpr size_t params_bytes(void (*)(Params)) {
  return sizeof(Params);
}
template <class Params>
void call(void (*kernel)(Params), const void* params) {
  // A copy of each thread's own, as a by-value parameter is.
  alignas(128) unsigned char copy[sizeof(Params)];
  __builtin_memcpy(copy, params, sizeof copy);
  kernel(*reinterpret_cast<std::remove_const_t<Params>*>(copy));
}

}  // namespace host

#define HOSTCUDA_ENTRY(kernel)                                          \
  const host::Entry host::entry = {#kernel, host::params_bytes(kernel), \
                                   [](const void* params) { host::call(kernel, params); }}
