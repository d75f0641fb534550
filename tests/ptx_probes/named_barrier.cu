// SPDX-License-Identifier: MIT
// One half of a block writes, the other reads, in turn: each waits for the other's barrier.
#include "ptx/named_barrier.cuh"

struct Params {
  const unsigned* x;  // (rounds, threads / 2)
  unsigned* y;        // the same, each round in reverse
  long long rounds;
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  enum { kWritten = 1, kRead = 2 };
  extern __shared__ __align__(16) unsigned shared_memory[];
  const int threads = blockDim.x, half = threads / 2, t = threadIdx.x % half;
  for (int round = 0; round < params.rounds; ++round) {
    if (threadIdx.x < half) {
      if (round > 0) named_barrier_sync(kRead, threads);
      shared_memory[t] = params.x[round * half + t];
      named_barrier_arrive(kWritten, threads);
    } else {
      named_barrier_sync(kWritten, threads);
      params.y[round * half + t] = shared_memory[half - 1 - t];
      if (round + 1 < params.rounds) named_barrier_arrive(kRead, threads);
    }
  }
}
