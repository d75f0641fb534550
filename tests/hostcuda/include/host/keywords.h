// SPDX-License-Identifier: MIT
// keywords.h: what CUDA C++ adds to the language, as far as one thread on a CPU can see it.
// Included before CUDA's own headers, whose host_defines.h leaves alone what is defined already.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __block_size__(...)

// One block runs at a time, so a variable of the block is a static one. The section gathers them:
// the runtime fills it before each block, and -fsanitize-sections gives each variable its redzones.
#define __shared__ static __attribute__((section("hostcuda_shared")))
