// SPDX-License-Identifier: MIT
// named_barrier.cuh: host twin. Barriers of some of a block's warps.
#pragma once

namespace cupyflash {

// bar.sync id, threads: wait until `threads` threads have arrived, this one included.
inline void named_barrier_sync(int id, int threads, host::Place place = host::Place::here()) {
  host::block_barrier(unsigned(id), unsigned(threads), true, "named_barrier_sync", place);
}

// bar.arrive id, threads: count as arrived and go on.
inline void named_barrier_arrive(int id, int threads, host::Place place = host::Place::here()) {
  host::block_barrier(unsigned(id), unsigned(threads), false, "named_barrier_arrive", place);
}

}  // namespace cupyflash
