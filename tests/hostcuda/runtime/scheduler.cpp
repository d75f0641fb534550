// SPDX-License-Identifier: MIT
#include "scheduler.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>

// The kernel's built-in variables; updated whenever another thread goes on.
struct Index3 {
  unsigned x, y, z;
};
Index3 threadIdx, blockIdx, blockDim, gridDim;

// Static shared memory; absent where the kernel has none.
extern "C" char __start_hostcuda_shared[] __attribute__((weak));
extern "C" char __stop_hostcuda_shared[] __attribute__((weak));

namespace host {

Scheduler* scheduler = nullptr;

namespace {

const void* params_of_launch = nullptr;

// Fibres are kept for the life of the process: one per thread of the largest block so far.
std::vector<std::unique_ptr<Thread>>& threads() {
  static std::vector<std::unique_ptr<Thread>> pool;
  return pool;
}

void thread_body() {
  sanitizers::acquire(&scheduler->start_ordering);
  entry.call(params_of_launch);
  sanitizers::release(&scheduler->end_ordering);
  scheduler->current().state = Thread::State::kExited;
}

// Not memset: that is intercepted, and the redzones between static arrays are overwritten on
// purpose.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void fill(char* begin, char* end,
                                                                        unsigned two_bytes) {
  for (volatile char* at = begin; at != end; ++at)
    *at = char(two_bytes >> reinterpret_cast<uintptr_t>(at) % 2 * 8);
}

}  // namespace

Scheduler::Scheduler(const Launch& launch)
    : launch(launch),
      threads_total(launch.block[0] * launch.block[1] * launch.block[2]),
      random(launch.seed) {
  for (unsigned i = unsigned(threads().size()); i < threads_total; ++i)
    threads().push_back(std::make_unique<Thread>(i, &thread_body));
  rank_to_thread_.resize(threads_total);
  thread_to_rank_.resize(threads_total);
  uniform_ = launch.order == Order::kRandom && launch.seed % 2 == 0;
}

// Forward and reverse: the first ready thread of the order always goes on, so that one warp runs as
// far as it can before the next begins. Random with an odd seed does the same in an order drawn
// anew at each barrier, with an even seed every ready thread is as likely as any other at each
// step.
void Scheduler::new_order() {
  std::iota(rank_to_thread_.begin(), rank_to_thread_.end(), 0u);
  if (launch.order == Order::kReverse) std::reverse(rank_to_thread_.begin(), rank_to_thread_.end());
  if (launch.order == Order::kRandom)
    std::shuffle(rank_to_thread_.begin(), rank_to_thread_.end(), random);
  for (unsigned r = 0; r < threads_total; ++r) thread_to_rank_[rank_to_thread_[r]] = r;
  memset(ready_, 0, sizeof ready_);
  for (unsigned t = 0; t < threads_total; ++t)
    if (threads()[t]->state == Thread::State::kReady) make_ready(t);
}

void Scheduler::make_ready(unsigned thread) {
  threads()[thread]->state = Thread::State::kReady;
  const unsigned rank = thread_to_rank_[thread];
  ready_[rank / 64] |= 1ull << rank % 64;
}

Thread* Scheduler::next() {
  unsigned count = 0;
  for (uint64_t word : ready_) count += unsigned(__builtin_popcountll(word));
  if (count == 0) return nullptr;
  unsigned skip = uniform_ ? unsigned(random() % count) : 0;
  for (unsigned w = 0; w < 16; ++w) {
    uint64_t word = ready_[w];
    const unsigned here = unsigned(__builtin_popcountll(word));
    if (skip >= here) {
      skip -= here;
      continue;
    }
    for (; skip; --skip) word &= word - 1;
    const unsigned bit = unsigned(__builtin_ctzll(word));
    ready_[w] &= ~(1ull << bit);
    return threads()[rank_to_thread_[w * 64 + bit]].get();
  }
  return nullptr;
}

void Scheduler::poll() {
  for (size_t i = 0; i < polling_.size();) {
    Thread* thread = polling_[i];
    if ((*thread->predicate)()) {
      polling_[i] = polling_.back();
      polling_.pop_back();
      make_ready(thread->index);
    } else {
      ++i;
    }
  }
}

// Operations that nobody has waited for yet may land at any time; when every thread waits, the
// oldest does. Under "newest" a copy overtakes all that was started before it, and a product is as
// late as can be: who lets a copy begin before the products that read its target are complete is
// found.
bool Scheduler::land_one() {
  if (operations.empty()) return false;
  if (launch.landing == Landing::kNewest) {
    const auto copy = std::find_if(operations.rbegin(), operations.rend(),
                                   [](const auto& o) { return !o->landed() && !o->lingers; });
    if (copy != operations.rend()) return (*copy)->land(), true;
    const auto product = std::find_if(operations.begin(), operations.end(),
                                      [](const auto& o) { return !o->landed() && o->waited_for; });
    if (product != operations.end()) return (*product)->land(), true;
  }
  const size_t which =
      launch.landing == Landing::kRandom ? size_t(random() % operations.size()) : 0;
  const auto operation = operations[which];
  operations.erase(operations.begin() + long(which));
  operation->land();
  return true;
}

void Scheduler::suspend(Thread::State state, const char* what, Place place) {
  Thread& thread = current();
  thread.state = state;
  thread.what = what;
  thread.place = place;
  if (state == Thread::State::kReady) make_ready(thread.index);
  if (state == Thread::State::kPolling) polling_.push_back(&thread);
  if (state == Thread::State::kYielded) yielded_.push_back(&thread);
  thread.fiber.suspend();
}

void Scheduler::allocate_shared_memory() {
  free(smem);
  // The end is exact to the byte; an allocation of nothing has no valid byte at all.
  if (posix_memalign(reinterpret_cast<void**>(&smem), 1024, launch.smem_bytes)) abort();
  fill(smem, smem + launch.smem_bytes, launch.poison);
  if (__start_hostcuda_shared) fill(__start_hostcuda_shared, __stop_hostcuda_shared, launch.poison);
}

void Scheduler::run_block(unsigned x, unsigned y, unsigned z) {
  blockIdx = {x, y, z};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  allocate_shared_memory();
  for (Barrier& barrier : barriers) barrier.arrived = 0;
  state.clear();
  for (unsigned t = 0; t < threads_total; ++t) threads()[t]->state = Thread::State::kReady;
  new_order();
  sanitizers::release(&start_ordering);

  unsigned running = threads_total;
  while (running) {
    poll();
    if (launch.landing == Landing::kRandom && !operations.empty() && random() % 4 == 0) land_one();
    Thread* thread = next();
    if (!thread) {
      if (!yielded_.empty() && ++idle_yields_ < 10000) {
        for (Thread* yielded : yielded_) make_ready(yielded->index);
        yielded_.clear();
        land_one();
        continue;
      }
      if (land_one()) continue;
      report_deadlock("no thread can continue");
    }
    current_ = thread;
    thread->state = Thread::State::kRunning;
    const unsigned i = thread->index;
    threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    thread->fiber.resume();
    if (thread->state != Thread::State::kYielded) idle_yields_ = 0;
    if (thread->state == Thread::State::kExited) {
      --running;
      for (size_t c = collectives.size(); c-- > 0;) complete_if_all_there(c);
    }
  }
  current_ = nullptr;
  sanitizers::acquire(&end_ordering);
  while (land_one()) {
  }
}

// ---- what threads wait for
// ------------------------------------------------------------------------------------

void wait(Predicate predicate, const char* what, Place place) {
  const sanitizers::Unwatched unwatched;
  if (predicate()) return;
  scheduler->current().predicate = &predicate;
  scheduler->suspend(Thread::State::kPolling, what, place);
}

void yield(const char* what, Place place) {
  const sanitizers::Unwatched unwatched;
  scheduler->suspend(Thread::State::kYielded, what, place);
}

static void arrive(unsigned id, unsigned count, bool wait, int predicate, const char* what,
                   Place place) {
  const sanitizers::Unwatched unwatched;
  if (id >= 16) fault(place, "%s: barrier id is %u; a block has barriers 0 to 15", what, id);
  if (count == 0 || count > 1024 || (count % 32 && count != scheduler->threads_total))
    fault(place, "%s: barrier %u for %u threads; expected a multiple of 32", what, id, count);
  Barrier& barrier = scheduler->barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = count;
    barrier.what = what;
    barrier.place = place;
    barrier.nonzero = 0;
  }
  if (barrier.expected != count)
    fault(place, "%s: barrier %u joined for %u threads; others joined it for %u at %s:%d", what, id,
          count, barrier.expected, barrier.place.file, barrier.place.line);
  // CUDA allows __syncthreads in a branch only if the whole block takes it.
  if (id == 0 && count == scheduler->threads_total && !(barrier.place == place))
    fault(place, "divergent barrier: this thread is in %s here, others of its block in %s at %s:%d",
          what, barrier.what, barrier.place.file, barrier.place.line);
  const void* const ordering = barrier.object();
  sanitizers::release(ordering);
  barrier.nonzero += predicate != 0;
  if (++barrier.arrived == barrier.expected) {
    barrier.result = barrier.nonzero;
    barrier.arrived = 0;
    ++barrier.phase;
    for (unsigned thread : barrier.waiting) scheduler->make_ready(thread);
    barrier.waiting.clear();
    if (scheduler->launch.order == Order::kRandom) {
      scheduler->new_order();
      if (wait) scheduler->suspend(Thread::State::kReady, what, place);
    }
  } else if (wait) {
    barrier.waiting.push_back(scheduler->current().index);
    scheduler->suspend(Thread::State::kWaiting, what, place);
  }
  if (wait) sanitizers::acquire(ordering);
}

void block_barrier(unsigned id, unsigned count, bool wait, const char* what, Place place) {
  arrive(id, count, wait, 0, what, place);
}

int reduce_over_block(int predicate, Place place, const char* what, int (*result)(int, int)) {
  arrive(0, scheduler->threads_total, true, predicate, what, place);
  // Stays as it is until every thread of the block has arrived again.
  return result(scheduler->barriers[0].result, int(scheduler->threads_total));
}

void Scheduler::complete_if_all_there(size_t index) {
  Collective& collective = *collectives[index];
  size_t missing = 0;
  for (unsigned m = 0; m < collective.size; ++m) {
    const unsigned thread = collective.first_thread + m;
    if (collective.members[m] && thread < threads_total &&
        threads()[thread]->state != Thread::State::kExited)
      ++missing;
  }
  if (collective.arrivals.size() < missing) return;
  std::vector<char> values(collective.size * collective.value_bytes);
  std::vector<char> results(collective.size * collective.result_bytes);
  fill(values.data(), values.data() + values.size(), launch.poison);
  fill(results.data(), results.data() + results.size(), launch.poison);
  Members present{{0, 0}};
  // Byte by byte, since memcpy is intercepted: this exchange is not an access of the kernel's.
  const auto copy = [](void* to, const void* from, size_t bytes) {
    for (size_t b = 0; b < bytes; ++b)
      static_cast<volatile char*>(to)[b] = static_cast<const char*>(from)[b];
  };
  for (const Collective::Arrival& arrival : collective.arrivals) {
    const unsigned m = arrival.thread - collective.first_thread;
    present.bits[m / 64] |= 1ull << m % 64;
    copy(&values[m * collective.value_bytes], arrival.value, collective.value_bytes);
  }
  collective.body(collective.arrivals.back().context, values.data(), present, results.data());
  for (const Collective::Arrival& arrival : collective.arrivals) {
    const unsigned m = arrival.thread - collective.first_thread;
    copy(arrival.result, &results[m * collective.result_bytes], collective.result_bytes);
    if (&*threads()[arrival.thread] != current_) make_ready(arrival.thread);
  }
  collectives.erase(collectives.begin() + long(index));
}

static void join(unsigned first_thread, unsigned size, Members members, const char* what,
                 Place place, const void* value, size_t value_bytes, void* result,
                 size_t result_bytes, CollectiveBody body, void* context, bool orders) {
  const sanitizers::Unwatched unwatched;
  const unsigned self = scheduler->current().index;
  if (self < first_thread || self >= first_thread + size || !members[self - first_thread])
    fault(place, "%s: the calling thread is not in the mask (0x%llx)", what,
          (unsigned long long)members.bits[0]);
  auto& all = scheduler->collectives;
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& c) {
    return c->first_thread == first_thread && c->size == size &&
           c->members.bits[0] == members.bits[0] && c->members.bits[1] == members.bits[1] &&
           strcmp(c->what, what) == 0;
  });
  const size_t index = size_t(found - all.begin());
  if (found == all.end()) {
    const unsigned slot = scheduler->collective_count++ % 64;
    all.push_back(std::make_unique<Collective>(Collective{
        first_thread, size, members, what, place, value_bytes, result_bytes, body, {}, slot}));
  }
  Collective& collective = *all[index];
  if (collective.value_bytes != value_bytes || collective.result_bytes != result_bytes)
    fault(place, "%s: joined with another type than at %s:%d", what, collective.place.file,
          collective.place.line);
  const void* const ordering =
      &scheduler->warp_ordering[first_thread / 32 % 32][collective.ordering];
  if (orders) sanitizers::release(ordering);
  collective.arrivals.push_back({self, value, result, context, place});
  const size_t before = all.size();
  scheduler->complete_if_all_there(index);
  if (all.size() == before) scheduler->suspend(Thread::State::kWaiting, what, place);
  if (orders) sanitizers::acquire(ordering);
}

void join(unsigned first_thread, unsigned size, Members members, const char* what, Place place,
          const void* value, size_t value_bytes, void* result, size_t result_bytes,
          CollectiveBody body, void* context) {
  // A shuffle or a vote exchanges registers and orders no memory.
  join(first_thread, size, members, what, place, value, value_bytes, result, result_bytes, body,
       context, false);
}

// ---- asynchronous operations and the block's state
// ----------------------------------------------------------------

std::shared_ptr<Operation> issue(std::function<void()> effect, bool lingers) {
  const sanitizers::Unwatched unwatched;
  auto operation = std::make_shared<Operation>(std::move(effect), lingers);
  auto& operations = scheduler->operations;
  operations.erase(std::remove_if(operations.begin(), operations.end(),
                                  [](const auto& o) { return o->landed(); }),
                   operations.end());
  if (scheduler->launch.landing == Landing::kEager)
    operation->land();
  else
    operations.push_back(operation);
  return operation;
}

void land(const std::shared_ptr<Operation>& operation, const char* what, Place place) {
  operation->waited_for = true;
  if (scheduler->launch.landing == Landing::kNewest)
    wait_until([&operation] { return operation->landed(); }, what, place);
  else
    operation->land();
}

void* object_at(const void* address, std::type_index type, std::shared_ptr<void> (*make)()) {
  const sanitizers::Unwatched unwatched;
  auto& object = scheduler->state[{address, type}];
  if (!object) object = make();
  return object.get();
}

unsigned thread_index() { return scheduler->current().index; }
unsigned block_threads() { return scheduler->threads_total; }
size_t dynamic_shared_bytes() { return scheduler->launch.smem_bytes; }
void acquire(const volatile void* object) { sanitizers::acquire(object); }
void release(const volatile void* object) { sanitizers::release(object); }

void* dynamic_shared_memory(size_t alignment) {
  if (alignment > 1024)
    fault(Place::here(), "dynamic shared memory aligned to %zu; at most 1024 is given", alignment);
  return scheduler->smem;
}

bool is_shared(const volatile void* address, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto within = [&](const char* begin, const char* end) {
    return begin && at >= reinterpret_cast<uintptr_t>(begin) &&
           at + bytes <= reinterpret_cast<uintptr_t>(end);
  };
  return within(scheduler->smem, scheduler->smem + scheduler->launch.smem_bytes) ||
         within(__start_hostcuda_shared, __stop_hostcuda_shared);
}

bool Place::operator==(const Place& other) const {
  return line == other.line && strcmp(file, other.file) == 0;
}

// ---- reports

void print_position() {
  if (!scheduler || !entry.name) return;
  fprintf(stderr, "hostcuda: kernel %s, block (%u, %u, %u)", entry.name, blockIdx.x, blockIdx.y,
          blockIdx.z);
  if (scheduler->running())
    fprintf(stderr, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
  fprintf(stderr, "\n");
}

void fault(Place place, const char* format, ...) {
  fprintf(stderr, "hostcuda: ");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n  at %s:%d\n", place.file, place.line);
  print_position();
  fflush(nullptr);
  _exit(kFaultStatus);
}

void Scheduler::report_deadlock(const char* reason) {
  current_ = nullptr;
  fprintf(stderr, "hostcuda: deadlock, %s\n", reason);
  const auto alike = [](const Thread& a, const Thread& b) {
    if (a.state != b.state) return false;
    return a.state == Thread::State::kExited || (strcmp(a.what, b.what) == 0 && a.place == b.place);
  };
  for (unsigned begin = 0; begin < threads_total;) {
    const Thread& first = *threads()[begin];
    unsigned end = begin + 1;
    while (end < threads_total && alike(first, *threads()[end])) ++end;
    fprintf(stderr, "  threads %u-%u: ", begin, end - 1);
    if (first.state == Thread::State::kExited)
      fprintf(stderr, "exited\n");
    else
      fprintf(stderr, "%s %s at %s:%d\n",
              first.state == Thread::State::kYielded ? "poll" : "wait in", first.what,
              first.place.file, first.place.line);
    begin = end;
  }
  for (unsigned id = 0; id < 16; ++id)
    if (barriers[id].arrived)
      fprintf(stderr, "  barrier %u: %u of %u threads have arrived\n", id, barriers[id].arrived,
              barriers[id].expected);
  for (const auto& c : collectives)
    fprintf(stderr, "  %s of threads %u-%u, mask 0x%llx: %zu have arrived\n", c->what,
            c->first_thread, c->first_thread + c->size - 1, (unsigned long long)c->members.bits[0],
            c->arrivals.size());
  print_position();
  fflush(nullptr);
  _exit(kFaultStatus);
}

// ---- the grid
// -------------------------------------------------------------------------------------------------

void run(const Launch& launch, const void* params) {
  Scheduler of_this_launch(launch);
  scheduler = &of_this_launch;
  params_of_launch = params;
  const uint64_t blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  // Random: start anywhere and step by a number coprime to the count, so that no list of blocks is
  // needed.
  uint64_t start = 0, step = 1;
  if (launch.order == Order::kReverse) start = blocks - 1, step = blocks - 1;
  if (launch.order == Order::kRandom) {
    start = of_this_launch.random() % blocks;
    do step = 1 + of_this_launch.random() % blocks;
    while (std::gcd(step, blocks) != 1);
  }
  uint64_t b = start;
  for (uint64_t n = 0; n < blocks; ++n) {
    of_this_launch.run_block(unsigned(b % launch.grid[0]),
                             unsigned(b / launch.grid[0] % launch.grid[1]),
                             unsigned(b / launch.grid[0] / launch.grid[1]));
    b = uint64_t((unsigned __int128)(b + step) % blocks);
  }
  free(of_this_launch.smem);
  scheduler = nullptr;
}

}  // namespace host

void __syncwarp(unsigned mask, host::Place place) {
  const char nothing = 0;
  char result;
  host::join(
      host::thread_index() / 32 * 32, 32, host::Members{{mask, 0}}, "__syncwarp", place, &nothing,
      1, &result, 1, [](void*, const void*, host::Members, void*) {}, nullptr, true);
}
