// SPDX-License-Identifier: MIT
// scheduler.h: the threads of the running block, and which of them goes on next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <typeindex>
#include <vector>

#include "fibers.h"
#include "host/runtime.h"
#include "launch.h"

namespace host {

struct Thread {
  enum class State { kReady, kRunning, kWaiting, kPolling, kYielded, kExited };

  Thread(unsigned index, void (*work)()) : index(index), fiber(work) {}

  unsigned index;
  Fiber fiber;
  State state = State::kExited;
  const char* what = "";                 // what it waits for, if it does
  Place place{"", 0};                    // and where
  const Predicate* predicate = nullptr;  // kPolling: goes on when this holds
};

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;
  unsigned long phase = 0;
  const char* what = "";
  Place place{"", 0};
  std::vector<unsigned> waiting;
  int nonzero = 0;  // __syncthreads_count and its kin: predicates that held, of those who arrived
  int result = 0;   // and the sum at the last completion
  // For ThreadSanitizer: in turn, or an early arrival of the next phase would order this one.
  char ordering[2];

  const void* object() const { return &ordering[phase % 2]; }
};

// A collective that some members have reached.
struct Collective {
  unsigned first_thread, size;
  Members members;
  const char* what;
  Place place;
  size_t value_bytes, result_bytes;
  CollectiveBody body;
  struct Arrival {
    unsigned thread;
    const void* value;
    void* result;
    void* context;
    Place place;
  };
  std::vector<Arrival> arrivals;
  unsigned ordering;
};

class Scheduler {
 public:
  explicit Scheduler(const Launch& launch);
  void run_block(unsigned x, unsigned y, unsigned z);

  Thread& current() { return *current_; }
  bool running() const { return current_ != nullptr; }
  void suspend(Thread::State state, const char* what, Place place);
  void make_ready(unsigned thread);
  void new_order();  // of the threads, at the start and at each barrier of a random schedule
  void complete_if_all_there(size_t collective);
  [[noreturn]] void report_deadlock(const char* reason);

  Launch launch;
  unsigned threads_total;
  std::mt19937_64 random;
  char* smem = nullptr;
  Barrier barriers[16];
  std::vector<std::unique_ptr<Collective>> collectives;
  std::vector<std::shared_ptr<Operation>> operations;
  std::map<std::pair<const void*, std::type_index>, std::shared_ptr<void>> state;
  char warp_ordering
      [32][64];  // ThreadSanitizer: one object per collective in flight, reused only much later
  unsigned collective_count = 0;
  char start_ordering = 0,
       end_ordering = 0;  // two, or the end of one thread would precede the next one's start

 private:
  Thread* next();
  void poll();
  bool land_one();
  void allocate_shared_memory();

  Thread* current_ = nullptr;
  std::vector<unsigned> rank_to_thread_, thread_to_rank_;
  uint64_t ready_[16];  // bit r: the thread of rank r is ready
  std::vector<Thread*> polling_, yielded_;
  unsigned idle_yields_ = 0;
  bool uniform_ = false;
};

extern Scheduler* scheduler;  // null outside a launch

}  // namespace host
