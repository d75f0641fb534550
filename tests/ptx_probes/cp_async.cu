// SPDX-License-Identifier: MIT
// Two groups of copies of every size; what shared memory holds after each wait.
#include "ptx/cp_async.cuh"

struct Params {
  const unsigned char* from;  // (threads, 96)
  const int* bytes;           // (threads, 6), at most the size of the copy
  unsigned char* to;          // (threads, 96)
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  constexpr int kGroup = 48;
  const int t = threadIdx.x;
  const unsigned char* from = params.from + t * 2 * kGroup;
  const int* bytes = params.bytes + 6 * t;
  for (int group = 0; group < 2; ++group) {
    const unsigned to = shared_address(shared_memory + (2 * t + group) * kGroup);
    cp_async_16(to, from, bytes[0]);
    cp_async_16(to + 16, from + 16);
    cp_async_small<8>(to + 32, from + 32, bytes[1]);
    cp_async_small<4>(to + 40, from + 40, bytes[2]);
    cp_async_small<4>(to + 44, from + 44, 4);
    cp_async_commit();
    from += kGroup;
    bytes += 3;
  }
  const auto write_out = [&](int group) {
    for (int b = 0; b < kGroup; ++b) {
      const int at = (2 * t + group) * kGroup + b;
      params.to[at] = shared_memory[at];
    }
  };
  cp_async_wait<1>();
  write_out(0);
  cp_async_wait<0>();
  write_out(1);
}
