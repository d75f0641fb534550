// SPDX-License-Identifier: MIT
// One wgmma of each form and n: D = A B + C, or D = A B, of a step of 16 along k.
// -DPROBE_TYPE=kF16 or kBf16.
#include "common/swizzled_tile.cuh"
#include "ptx/fence.cuh"
#include "ptx/wgmma.cuh"

struct Params {
  const unsigned short* A;          // (64, 128)
  const unsigned short* B_columns;  // (256, 128): B^T, k contiguous
  const unsigned short* B_rows;     // (64, 256): B, n contiguous
  const float* C;                   // (64, 256)
  float* D;                         // (6 forms, 14 n, 64, 256)
};

namespace {

using namespace cupyflash;

constexpr MmaType kType = MmaType::PROBE_TYPE;
// A from shared memory or registers; B by columns or by rows; added to C or not.
enum Form { kColumns, kColumnsFresh, kRows, kRowsFresh, kRowsShared, kColumnsRegisters };

// The forms that no kernel uses are tried with a few n only: each is seconds of building.
constexpr bool few_forms(int n) { return n == 32 || n == 64 || n == 96; }

// Of an n among those that there are: 64, 80, ... 256, and 32.
constexpr int place(int n) { return n == 32 ? 13 : n / 16 - 4; }

// Tiles with rows of 128 bytes, and others with rows of 64.
constexpr int depth(int n) { return n % 32 == 0 ? 128 : 96; }

template <int rows, int cols>
__device__ __forceinline__ void fill(unsigned char* tile, const unsigned short* from, int ld) {
  using T = SwizzledTile<rows, cols>;
  for (int x = threadIdx.x; x < rows * cols; x += 128) {
    const int row = x / cols, col = x % cols;
    const int unit = col % T::kSlabCols / 8;
    const int place = T::kSwizzle == Swizzle::k128 ? unit ^ row % 8 : unit ^ row / 2 % 4;
    unsigned char* const at =
        tile + col / T::kSlabCols * T::kSlabBytes + row * T::kRowBytes + place * 16 + col % 8 * 2;
    *reinterpret_cast<unsigned short*>(at) = from[row * ld + col];
  }
}

__device__ __forceinline__ void load_a(unsigned (&a)[4], const unsigned short* A, int k) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int col = 16 * k + threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const unsigned short* const from = A + (row + r % 2 * 8) * 128 + col + r / 2 * 8;
    a[r] = from[0] | static_cast<unsigned>(from[1]) << 16;
  }
}

template <int n, Form form>
__device__ __forceinline__ void multiply(const Params& params, unsigned char* A_smem) {
  constexpr bool by_rows = form == kRows || form == kRowsFresh || form == kRowsShared;
  constexpr bool a_in_registers = form == kRows || form == kRowsFresh || form == kColumnsRegisters;
  constexpr bool accumulate = form != kColumnsFresh && form != kRowsFresh;
  constexpr int kDepth = by_rows ? 64 : depth(n);
  using ATile = SwizzledTile<64, kDepth>;
  unsigned char* const B_smem = A_smem + 64 * 128 * 2;
  const int k = (n / 16 + form) % (kDepth / 16);
  float* const D = params.D + (form * 14 + place(n)) * 64 * 256;
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int col = threadIdx.x % 4 * 2;

  fill<64, kDepth>(A_smem, params.A, 128);
  const unsigned long long A = wgmma_descriptor(A_smem, ATile::kSwizzle, 16, 8 * ATile::kRowBytes);
  unsigned long long b;
  if constexpr (by_rows) {
    using BTile = SwizzledTile<64, n>;
    fill<64, n>(B_smem, params.B_rows, 256);
    b = BTile::by_rows(B_smem) + BTile::rows_step(k);
  } else {
    using BTile = SwizzledTile<n, kDepth>;
    fill<n, kDepth>(B_smem, params.B_columns, 128);
    b = BTile::by_columns(B_smem) + BTile::columns_step(k);
  }
  fence_proxy_async_shared();
  __syncthreads();

  float d[n / 2];
#pragma unroll
  for (int x = 0; x < n / 2; ++x) {
    d[x] = params.C[(row + x / 2 % 2 * 8) * 256 + x / 4 * 8 + col + x % 2];
  }
  unsigned a[4] = {};  // lives until the wait
  if constexpr (a_in_registers) load_a(a, params.A, k);
  wgmma_fence();
  if constexpr (a_in_registers) {
    wgmma<kType, accumulate, by_rows>(d, a, b);
  } else {
    wgmma<kType, accumulate, by_rows>(d, A + ATile::columns_step(k), b);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_use(d);
#pragma unroll
  for (int x = 0; x < n / 2; ++x) {
    D[(row + x / 2 % 2 * 8) * 256 + x / 4 * 8 + col + x % 2] = d[x];
  }
}

template <int n>
__device__ __forceinline__ void for_n(const Params& params, unsigned char* shared_memory) {
  if (blockIdx.x == place(n)) {
    if (blockIdx.y == kColumns) multiply<n, kColumns>(params, shared_memory);
    if (blockIdx.y == kColumnsFresh) multiply<n, kColumnsFresh>(params, shared_memory);
    if constexpr (n % 32 == 0) {  // whole slabs
      if (blockIdx.y == kRows) multiply<n, kRows>(params, shared_memory);
    }
    if constexpr (few_forms(n)) {
      if (blockIdx.y == kRowsFresh) multiply<n, kRowsFresh>(params, shared_memory);
      if (blockIdx.y == kRowsShared) multiply<n, kRowsShared>(params, shared_memory);
      if (blockIdx.y == kColumnsRegisters) multiply<n, kColumnsRegisters>(params, shared_memory);
    }
  } else if constexpr (n < 256) {
    for_n<n == 32 ? 64 : n + 16>(params, shared_memory);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) probe(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  for_n<32>(params, shared_memory);
}
