// SPDX-License-Identifier: MIT
// tile_config.cuh: the tile of forward_sm80 and forward_sm90_float32, whose warps own rows of it,
// from config.cuh's constants.
#pragma once

#include "common/config.cuh"

namespace cupyflash {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kBr / kWarps;     // queries of a warp
constexpr int kFragments = kWarpRows / 16;  // row fragments of 16, the m of every product
constexpr int kKeyTiles = kBc / 8;          // column fragments of 8, the n of every product

static_assert(kBr == kWarps * kFragments * 16, "a warp owns whole fragments of 16 queries");
static_assert(kBc % 8 == 0 && kBc <= 128, "a tile of keys is made of fragments of 8");

}  // namespace cupyflash
