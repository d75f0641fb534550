// SPDX-License-Identifier: MIT
// A ring of two buffers between one warp that writes and three that read: every phase of both kinds
// of barrier comes and goes several times.
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

struct Params {
  const unsigned* x;  // (rounds, 32)
  unsigned* y;        // (rounds, 96)
  long long rounds;
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  constexpr int kStages = 2;
  struct Shared {
    unsigned buffer[kStages][32];
    Mbarrier full[kStages], empty[kStages];
  };
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared.full[stage], 32);
      mbarrier_init(shared.empty[stage], 3);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int round = 0; round < params.rounds; ++round) {
    const int stage = round % kStages;
    const unsigned parity = round / kStages % 2;
    unsigned* const buffer = shared.buffer[stage];
    if (warp == 0) {
      mbarrier_wait(shared.empty[stage], parity ^ 1);
      buffer[lane] = params.x[round * 32 + lane];
      if (lane % 2) {
        mbarrier_arrive(shared.full[stage]);
      } else {
        mbarrier_arrive_expect_tx(shared.full[stage], 0);
      }
      __syncwarp();
    } else {
      mbarrier_wait(shared.full[stage], parity);
      params.y[round * 96 + threadIdx.x - 32] = buffer[lane ^ warp] + round;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.empty[stage]);
    }
  }
}
