// SPDX-License-Identifier: MIT
// server.cpp: reads launches from file descriptor argv[1], answers on argv[2]. All integers are
// little-endian.
//
//   request   Launch | u64 arrays | u64 pointers
//             | per array: u64 offset (of its first byte, modulo kAlignment), u64 bytes
//             | per pointer: u64 offset in the params, u64 array, u64 offset of what it points to
//             | params | bytes of each array
//   answer    u64 1 | bytes of each array
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "host/runtime.h"
#include "launch.h"
#include "sanitizers.h"

namespace {

constexpr size_t kAlignment = 512;  // of an allocation on a GPU, as cupy.cuda.alloc gives it
constexpr unsigned char kGuard = 0xff;

int input, output;

void read_all(void* to, size_t bytes) {
  for (char* at = static_cast<char*>(to); bytes;) {
    const ssize_t got = read(input, at, bytes);
    if (got == 0) _exit(0);  // the driver has gone
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) _exit(1);
    at += got;
    bytes -= size_t(got);
  }
}

void write_all(const void* from, size_t bytes) {
  for (const char* at = static_cast<const char*>(from); bytes;) {
    const ssize_t put = write(output, at, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) _exit(1);
    at += put;
    bytes -= size_t(put);
  }
}

// An argument's bytes with nothing accessible before and after. What AddressSanitizer cannot forbid
// (the bytes that share a granule of 8 with the first one) is filled and compared afterwards.
class Guarded {
 public:
  Guarded(size_t offset, size_t bytes) : offset_(offset), bytes_(bytes) {
    if (posix_memalign(reinterpret_cast<void**>(&memory_), kAlignment, offset + bytes)) abort();
    for (size_t b = 0; b < offset_; ++b) memory_[b] = kGuard;
    host::sanitizers::forbid(memory_, offset_ / 8 * 8);
  }
  Guarded(Guarded&& other)
      : memory_(std::exchange(other.memory_, nullptr)),
        offset_(other.offset_),
        bytes_(other.bytes_) {}
  ~Guarded() {
    if (!memory_) return;
    host::sanitizers::permit(memory_, offset_);
    free(memory_);
  }

  unsigned char* data() { return memory_ + offset_; }
  size_t bytes() const { return bytes_; }

  bool intact() const {
    for (size_t b = offset_ / 8 * 8; b < offset_; ++b)
      if (memory_[b] != kGuard) return false;
    return true;
  }

 private:
  unsigned char* memory_ = nullptr;
  size_t offset_, bytes_;
};

void serve() {
  host::Launch launch;
  read_all(&launch, sizeof launch);
  uint64_t counts[2];
  read_all(counts, sizeof counts);
  struct Array {
    uint64_t offset, bytes;
  };
  struct Pointer {
    uint64_t params_offset, array, first;
  };
  std::vector<Array> arrays(counts[0]);
  std::vector<Pointer> pointers(counts[1]);
  read_all(arrays.data(), arrays.size() * sizeof(Array));
  read_all(pointers.data(), pointers.size() * sizeof(Pointer));
  std::vector<char> params(launch.params_bytes);
  read_all(params.data(), params.size());
  std::vector<Guarded> blocks;
  for (const Array& array : arrays) {
    blocks.emplace_back(array.offset, array.bytes);
    read_all(blocks.back().data(), array.bytes);
  }
  if (launch.params_bytes != host::entry.params_bytes)
    host::fault({host::entry.name, 0},
                "the record's params have %u bytes, the kernel's parameter has %zu",
                launch.params_bytes, host::entry.params_bytes);
  for (const Pointer& pointer : pointers) {
    const unsigned char* const address = blocks[pointer.array].data() + pointer.first;
    memcpy(&params[pointer.params_offset], &address, sizeof address);
  }
  host::run(launch, params.data());
  fflush(nullptr);
  for (size_t i = 0; i < blocks.size(); ++i)
    if (!blocks[i].intact())
      host::fault({host::entry.name, 0}, "bytes right before array %zu were overwritten", i);
  const uint64_t done = 1;
  write_all(&done, sizeof done);
  for (Guarded& block : blocks) write_all(block.data(), block.bytes());
}

}  // namespace

#ifdef HOSTCUDA_ASAN
// UndefinedBehaviorSanitizer calls this for each report, in place of the death callback.
extern "C" void __ubsan_on_report() { host::print_position(); }
#endif

int main(int, char** argv) {
  input = atoi(argv[1]);
  output = atoi(argv[2]);
#if defined(HOSTCUDA_ASAN) || defined(HOSTCUDA_TSAN)
  __sanitizer_set_death_callback(host::print_position);
#endif
  const host::sanitizers::Unwatched unwatched;
  for (;;) serve();
}
