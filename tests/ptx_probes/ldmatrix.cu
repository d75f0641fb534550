// SPDX-License-Identifier: MIT
// Eight-by-eight matrices whose rows lie in any order, as they are and transposed.
#include "ptx/ldmatrix.cuh"

struct Params {
  const unsigned short* rows;  // (warps, 64, 8)
  const int* order;            // (warps, 32): the row whose address a lane gives
  unsigned* fragments;         // (warps, 2, 32, 4)
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned short* const rows = reinterpret_cast<unsigned short*>(shared_memory) + warp * 64 * 8;
  for (int x = lane; x < 64 * 8; x += 32) rows[x] = params.rows[warp * 64 * 8 + x];
  __syncwarp();
  const unsigned row = shared_address(rows + 8 * params.order[threadIdx.x]);
  unsigned plain[4], transposed[4];
  ldmatrix_x4(plain, row);
  ldmatrix_x4_trans(transposed, row);
  unsigned* const to = params.fragments + (warp * 64 + lane) * 4;
  for (int i = 0; i < 4; ++i) {
    to[i] = plain[i];
    to[32 * 4 + i] = transposed[i];
  }
}
