// SPDX-License-Identifier: MIT
// Each block writes its part; the one that counts to the end adds all parts, and leaves a count of
// 0 for the next launch.
#include "ptx/atom.cuh"

struct Params {
  const unsigned* x;  // (blocks, threads)
  unsigned* parts;    // the same
  unsigned* sums;     // (threads)
  unsigned* count;    // 1; 0 at first
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  __shared__ unsigned old;
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  params.parts[at] = 3 * params.x[at];
  __syncthreads();
  if (threadIdx.x == 0) old = atom_inc_acq_rel(params.count, gridDim.x - 1);
  __syncthreads();
  if (old != gridDim.x - 1) return;
  unsigned sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) {
    sum += params.parts[block * blockDim.x + threadIdx.x];
  }
  params.sums[threadIdx.x] = sum;
}
