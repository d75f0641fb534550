// SPDX-License-Identifier: MIT
// Registers go from one warpgroup to two others, which then hold many numbers at a time.
#include "ptx/setmaxnreg.cuh"

struct Params {
  const unsigned* x;  // (96, 384)
  unsigned* y;        // (384)
};

extern "C" __global__ void __launch_bounds__(384, 1) probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    params.y[threadIdx.x] = 3 * params.x[threadIdx.x];
  } else {
    setmaxnreg_inc<232>();
    unsigned held[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = params.x[i * 384 + threadIdx.x];
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 96; ++i) sum = (sum ^ held[i]) * (2 * held[95 - i] + 1);
    params.y[threadIdx.x] = sum;
  }
}
