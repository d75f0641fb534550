// SPDX-License-Identifier: MIT
// mbarrier.cuh: host twin. Phases end when all arrivals and all announced bytes are there.
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

struct alignas(8) Mbarrier {
  unsigned long long state;
};

}  // namespace cupyflash

namespace cupyflash::twin {

using namespace host;

// The object behind an mbarrier; its 8 bytes in shared memory stay what they are.
struct MbarrierState {
  unsigned arrivals = 0;  // of a phase; 0: not initialised
  unsigned pending = 0;
  long long bytes = 0;  // announced and not arrived; negative while copies are ahead
  unsigned long phase = 0;
  char ordering = 0;

  void settle() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = arrivals;
    }
  }
};

inline MbarrierState& mbarrier_state(cupyflash::Mbarrier& barrier, const char* what, Place place) {
  cupyflash::shared_address(&barrier, place);
  auto& state = state_at<MbarrierState>(&barrier);
  if (state.arrivals == 0) fault(place, "%s: the mbarrier is not initialised", what);
  return state;
}

inline void mbarrier_count_arrival(cupyflash::Mbarrier& barrier, unsigned bytes, const char* what,
                                   Place place) {
  auto& state = mbarrier_state(barrier, what, place);
  if (state.pending == 0)
    fault(place, "%s: more arrivals than the %u of the phase", what, state.arrivals);
  release(&state.ordering);
  state.bytes += bytes;
  --state.pending;
  state.settle();
}

// Bytes of a copy that have arrived.
inline void mbarrier_complete_tx(cupyflash::Mbarrier& barrier, unsigned bytes) {
  auto& state = state_at<MbarrierState>(&barrier);
  state.bytes -= bytes;
  state.settle();
}

}  // namespace cupyflash::twin

namespace cupyflash {

inline void mbarrier_init(Mbarrier& barrier, unsigned arrivals,
                          host::Place place = host::Place::here()) {
  shared_address(&barrier, place);
  if (arrivals == 0 || arrivals >= 1u << 20)
    host::fault(place, "mbarrier_init: %u arrivals; expected 1 to 2^20 - 1", arrivals);
  auto& state = host::state_at<twin::MbarrierState>(&barrier);
  if (state.arrivals) host::fault(place, "mbarrier_init: the mbarrier is initialised already");
  state.arrivals = state.pending = arrivals;
}

inline void mbarrier_arrive(Mbarrier& barrier, host::Place place = host::Place::here()) {
  twin::mbarrier_count_arrival(barrier, 0, "mbarrier_arrive", place);
}

inline void mbarrier_arrive_expect_tx(Mbarrier& barrier, unsigned bytes,
                                      host::Place place = host::Place::here()) {
  twin::mbarrier_count_arrival(barrier, bytes, "mbarrier_arrive_expect_tx", place);
}

inline void mbarrier_wait(Mbarrier& barrier, unsigned parity,
                          host::Place place = host::Place::here()) {
  auto& state = twin::mbarrier_state(barrier, "mbarrier_wait", place);
  if (parity > 1) host::fault(place, "mbarrier_wait: parity is %u", parity);
  // The phase of that parity has ended if the one that runs has the other.
  host::wait_until([&state, parity] { return state.phase % 2 != parity; }, "mbarrier_wait", place);
  host::acquire(&state.ordering);
}

}  // namespace cupyflash
