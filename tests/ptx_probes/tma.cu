// SPDX-License-Identifier: MIT
// Boxes of a tensor, one after the other, into two buffers of shared memory; their bytes as they
// lie there.
#include "ptx/fence.cuh"
#include "ptx/tma.cuh"

struct Params {
  cupyflash::TensorMap map;
  const int* at;      // (boxes, 5)
  unsigned char* to;  // (boxes, bytes)
  long long boxes;
  long long bytes;  // of a box; a multiple of 1024
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  constexpr int kStages = 2;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const int bytes = static_cast<int>(params.bytes);
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared_memory + kStages * bytes);
  if (threadIdx.x == 0) {
    tma_prefetch_map(params.map);
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full[stage], 1);
    fence_mbarrier_init();
  }
  for (int box = 0; box < params.boxes; ++box) {
    const int stage = box % kStages;
    unsigned char* const buffer = shared_memory + stage * bytes;
    // What the box overwrites: an ordinary store, and so before the copy only by the fence.
    for (int b = threadIdx.x; b < bytes; b += blockDim.x) buffer[b] = 0xa5;
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      int at[5];
      for (int axis = 0; axis < 5; ++axis) at[axis] = params.at[5 * box + axis];
      mbarrier_arrive_expect_tx(full[stage], bytes);
      tma_load_5d(buffer, params.map, full[stage], at);
    }
    mbarrier_wait(full[stage], box / kStages % 2);
    for (int b = threadIdx.x; b < bytes; b += blockDim.x) {
      params.to[box * params.bytes + b] = buffer[b];
    }
  }
}
