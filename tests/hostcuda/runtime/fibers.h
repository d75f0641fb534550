// SPDX-License-Identifier: MIT
// fibers.h: stacks that can be left and resumed, by Boost.Context's fcontext.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "sanitizers.h"

namespace host {

// A fibre runs `work` each time it is started and hands back when that has returned, so that its
// stack frames are always left in the regular way and the sanitizers' view of the stack stays true.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 256 << 10;

  explicit Fiber(void (*work)())
      : memory_(allocate()), work_(work), stack_(memory_ + page(), kStackBytes) {
    context_ = boost::context::detail::make_fcontext(memory_ + page() + kStackBytes, kStackBytes,
                                                     &Fiber::enter);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Called by the scheduler: runs the fibre until it suspends.
  void resume() {
    scheduler_stack().leave_for(stack_);
    context_ = boost::context::detail::jump_fcontext(context_, this).fctx;
    scheduler_stack().arrive_from(stack_);
  }

  // Called on the fibre: back to the scheduler, until resumed.
  void suspend() {
    stack_.leave_for(scheduler_stack());
    scheduler_context_ = boost::context::detail::jump_fcontext(scheduler_context_, nullptr).fctx;
    stack_.arrive_from(scheduler_stack());
  }

 private:
  static size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

  // One page below the stack stays without access: an overflow is a fault, not a silent overwrite.
  static char* allocate() {
    void* memory = mmap(nullptr, page() + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page(), PROT_NONE) != 0) {
      perror("hostcuda: a fibre's stack");
      abort();
    }
    return static_cast<char*>(memory);
  }

  static sanitizers::Stack& scheduler_stack() {
    static sanitizers::Stack stack;
    return stack;
  }

  static void enter(boost::context::detail::transfer_t from) {
    Fiber& self = *static_cast<Fiber*>(from.data);
    self.scheduler_context_ = from.fctx;
    self.stack_.arrive_from(scheduler_stack());
    for (;;) {
      self.work_();
      self.suspend();
    }
  }

  char* memory_;
  void (*work_)();
  sanitizers::Stack stack_;
  boost::context::detail::fcontext_t context_;
  boost::context::detail::fcontext_t scheduler_context_ = nullptr;
};

}  // namespace host
