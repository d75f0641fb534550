// SPDX-License-Identifier: MIT
// cuda_host.h: included before the first line of every kernel that is compiled for the CPU. NVRTC
// includes nothing of the host's; what is visible here beyond CUDA's own names is in namespace
// host.
#pragma once

#include "host/keywords.h"
//
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "host/atomics.h"
#include "host/math.h"
#include "host/runtime.h"
#include "host/sync.h"

// CUDA takes alignas after __shared__, where C++ takes only a GNU attribute.
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))
