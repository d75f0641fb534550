// SPDX-License-Identifier: MIT
// sync.h: barriers of the block, and what the lanes of a warp do together.
#pragma once

#include "host/runtime.h"

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- __syncthreads and its reductions
// -------------------------------------------------------------------------

inline void __syncthreads(host::Place place = host::Place::here()) {
  host::block_barrier(0, host::block_threads(), true, "__syncthreads", place);
}

namespace host {
int reduce_over_block(int predicate, Place place, const char* what,
                      int (*result)(int nonzero, int threads));
}

inline int __syncthreads_count(int predicate, host::Place place = host::Place::here()) {
  return host::reduce_over_block(predicate, place, "__syncthreads_count",
                                 [](int nonzero, int) { return nonzero; });
}
inline int __syncthreads_or(int predicate, host::Place place = host::Place::here()) {
  return host::reduce_over_block(predicate, place, "__syncthreads_or",
                                 [](int nonzero, int) { return int(nonzero > 0); });
}
inline int __syncthreads_and(int predicate, host::Place place = host::Place::here()) {
  return host::reduce_over_block(predicate, place, "__syncthreads_and",
                                 [](int nonzero, int threads) { return int(nonzero == threads); });
}

void __syncwarp(unsigned mask = 0xffffffffu, host::Place place = host::Place::here());

// One thread at a time, in program order: nothing to fence.
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

// ---- shuffles
// -------------------------------------------------------------------------------------------------

namespace host {

// source(lane, width) is the lane that `lane` reads, already clamped to itself where it leaves its
// segment.
template <class T, class F>
T shuffle(unsigned mask, const T& value, int width, const char* what, Place place, F source) {
  if (width <= 0 || width > 32 || (width & (width - 1)))
    fault(place, "%s: width is %d; expected a power of two, at most 32", what, width);
  struct In {
    T value;
    int source;
  };
  const In in{value, source(int(lane_index()), width)};
  return warp_collective<T>(mask, what, place, in, [](const In* values, Members, T* results) {
    for (int lane = 0; lane < 32; ++lane) {
      const int from = values[lane].source;
      if (from >= 0 && from < 32) results[lane] = values[from].value;
    }
  });
}

}  // namespace host

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32,
              host::Place place = host::Place::here()) {
  return host::shuffle(mask, value, width, "__shfl_sync", place,
                       [=](int lane, int w) { return (lane & ~(w - 1)) | (from & (w - 1)); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  host::Place place = host::Place::here()) {
  // A segment may read from itself or an earlier one, not from a later one.
  return host::shuffle(mask, value, width, "__shfl_xor_sync", place, [=](int lane, int w) {
    const int from = lane ^ lane_mask;
    return from <= (lane | (w - 1)) ? from : lane;
  });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 host::Place place = host::Place::here()) {
  return host::shuffle(mask, value, width, "__shfl_up_sync", place, [=](int lane, int w) {
    return (lane & (w - 1)) >= int(delta) ? lane - int(delta) : lane;
  });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   host::Place place = host::Place::here()) {
  return host::shuffle(mask, value, width, "__shfl_down_sync", place, [=](int lane, int w) {
    return (lane & (w - 1)) + int(delta) < w ? lane + int(delta) : lane;
  });
}

// ---- votes and integer reductions
// -----------------------------------------------------------------------------

namespace host {

template <class T, class F>
T fold_warp(unsigned mask, T value, const char* what, Place place, F fold) {
  return warp_collective<T>(mask, what, place, value,
                            [fold](const T* values, Members present, T* results) {
                              T total{};
                              bool first = true;
                              for (int lane = 0; lane < 32; ++lane) {
                                if (!present[lane]) continue;
                                total = first ? values[lane] : fold(total, values[lane]);
                                first = false;
                              }
                              for (int lane = 0; lane < 32; ++lane) results[lane] = total;
                            });
}

}  // namespace host

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              host::Place place = host::Place::here()) {
  const unsigned bit = predicate ? 1u << host::lane_index() : 0u;
  return host::fold_warp(mask, bit, "__ballot_sync", place,
                         [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate, host::Place place = host::Place::here()) {
  return host::fold_warp(mask, int(predicate != 0), "__any_sync", place,
                         [](int a, int b) { return a | b; });
}
inline int __all_sync(unsigned mask, int predicate, host::Place place = host::Place::here()) {
  return host::fold_warp(mask, int(predicate != 0), "__all_sync", place,
                         [](int a, int b) { return a & b; });
}

#define HOSTCUDA_REDUCE(name, type, expression)                                          \
  inline type name(unsigned mask, type value, host::Place place = host::Place::here()) { \
    return host::fold_warp(mask, value, #name, place,                                    \
                           [](type a, type b) -> type { return expression; });           \
  }
HOSTCUDA_REDUCE(__reduce_add_sync, unsigned, a + b)
HOSTCUDA_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
HOSTCUDA_REDUCE(__reduce_max_sync, unsigned, a < b ? b : a)
HOSTCUDA_REDUCE(__reduce_and_sync, unsigned, a& b)
HOSTCUDA_REDUCE(__reduce_or_sync, unsigned, a | b)
HOSTCUDA_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
HOSTCUDA_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
HOSTCUDA_REDUCE(__reduce_min_sync, int, a < b ? a : b)
HOSTCUDA_REDUCE(__reduce_max_sync, int, a < b ? b : a)
#undef HOSTCUDA_REDUCE
