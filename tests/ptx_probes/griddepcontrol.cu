// SPDX-License-Identifier: MIT
// A launch that depends on none: neither instruction keeps it waiting, or loses what it does.
#include "ptx/griddepcontrol.cuh"

struct Params {
  const unsigned* x;  // (blocks * threads)
  unsigned* y;        // the same, three times as large
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  static_assert(kHasGriddepcontrol, "a probe of what is there");
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  params.y[at] = 3 * params.x[at];
}
