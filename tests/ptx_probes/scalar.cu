// SPDX-License-Identifier: MIT
// What a thread does by itself: approximate functions, pinned values, addresses.
#include "ptx/ex2.cuh"
#include "ptx/pin.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tanh.cuh"

struct Params {
  const float* x;  // (blocks, threads)
  float* ex2;      // (blocks, threads), as the others
  float* tanh;
  float* log2;
  float* reciprocal;
  int* pinned;
  unsigned* address;  // of byte 3 t of shared memory, less that of byte 0
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = params.x[at];
  params.ex2[at] = ex2_approx(x);
  params.tanh[at] = tanh_approx(x);
  params.log2[at] = __log2f(x);
  params.reciprocal[at] = __fdividef(1.0f, x);
  params.pinned[at] = pin(__float_as_int(x)) + 1;
  params.address[at] =
      shared_address(shared_memory + 3 * threadIdx.x) - shared_address(shared_memory);
}
