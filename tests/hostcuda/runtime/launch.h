// SPDX-License-Identifier: MIT
// launch.h: one launch, as the server hands it to the scheduler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace host {

enum class Order : uint32_t { kForward, kReverse, kRandom };        // of threads and of blocks
enum class Landing : uint32_t { kLate, kEager, kRandom, kNewest };  // of asynchronous operations

// The exit status of a process that has reported a fault.
constexpr int kFaultStatus = 66;

struct Launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t smem_bytes;
  Order order;
  Landing landing;
  uint64_t seed;
  uint32_t poison;  // two bytes, all over shared memory and the results of members not there
  uint32_t params_bytes;
};

// Runs every block of the grid; returns when all have finished. A fault ends the process.
void run(const Launch& launch, const void* params);

// One line that says which thread of which block runs, empty outside a launch.
void print_position();

}  // namespace host
