// SPDX-License-Identifier: MIT
// D = C + A B, one product a block, of matrices that lie row by row in memory. The operand layout
// is that of the head of mma.cuh.
#include "ptx/mma.cuh"

struct Params {
  const void* A;  // (blocks, rows, k), as bits
  const void* B;  // (blocks, k, 8)
  const void* C;  // (blocks, rows, 8)
  void* D;
  long long which;  // 0 f16, 1 bf16, 2 tf32, 3 f64 of m8n8k4, 4 f64 of m16n8k8, 5 of m16n8k16
};

namespace {

using namespace cupyflash;

// Rows 16; a 32-bit register holds `pack` neighbours of k.
template <class Bits, int k, class Multiply>
__device__ void multiply_float(const Params& params, const Multiply& multiply) {
  constexpr int pack = 4 / sizeof(Bits);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const Bits* const A = static_cast<const Bits*>(params.A) + blockIdx.x * 16 * k;
  const Bits* const B = static_cast<const Bits*>(params.B) + blockIdx.x * k * 8;
  const float* const C = static_cast<const float*>(params.C) + blockIdx.x * 16 * 8;
  float* const D = static_cast<float*>(params.D) + blockIdx.x * 16 * 8;
  unsigned a[4] = {}, b[2] = {};
  float d[4];
  for (int p = 0; p < pack; ++p) {
    const int shift = 8 * static_cast<int>(sizeof(Bits)) * p;
    for (int i = 0; i < 4; ++i) {
      a[i] |= static_cast<unsigned>(A[(g + i % 2 * 8) * k + i / 2 * k / 2 + t * pack + p]) << shift;
    }
    for (int i = 0; i < 2; ++i) {
      b[i] |= static_cast<unsigned>(B[(i * k / 2 + t * pack + p) * 8 + g]) << shift;
    }
  }
  for (int e = 0; e < 4; ++e) d[e] = C[(g + e / 2 * 8) * 8 + 2 * t + e % 2];
  multiply(d, a, b);
  for (int e = 0; e < 4; ++e) D[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = d[e];
}

// Rows 16.
template <int k, class Multiply>
__device__ void multiply_double(const Params& params, const Multiply& multiply) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const double* const A = static_cast<const double*>(params.A) + blockIdx.x * 16 * k;
  const double* const B = static_cast<const double*>(params.B) + blockIdx.x * k * 8;
  const double* const C = static_cast<const double*>(params.C) + blockIdx.x * 16 * 8;
  double* const D = static_cast<double*>(params.D) + blockIdx.x * 16 * 8;
  double d[4], a[k / 2], b[k / 4];
  for (int i = 0; i < k / 2; ++i) a[i] = A[(g + i % 2 * 8) * k + i / 2 * 4 + t];
  for (int i = 0; i < k / 4; ++i) b[i] = B[(i * 4 + t) * 8 + g];
  for (int e = 0; e < 4; ++e) d[e] = C[(g + e / 2 * 8) * 8 + 2 * t + e % 2];
  multiply(d, a, b);
  for (int e = 0; e < 4; ++e) D[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = d[e];
}

}  // namespace

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  if (params.which == 0) {
    multiply_float<unsigned short, 16>(
        params, [](auto& d, const auto& a, const auto& b) { mma_m16n8k16_f16(d, a, b); });
  } else if (params.which == 1) {
    multiply_float<unsigned short, 16>(
        params, [](auto& d, const auto& a, const auto& b) { mma_m16n8k16_bf16(d, a, b); });
  } else if (params.which == 2) {
    multiply_float<unsigned, 8>(
        params, [](auto& d, const auto& a, const auto& b) { mma_m16n8k8_tf32(d, a, b); });
  } else if (params.which == 3) {
    const double a = static_cast<const double*>(params.A)[(blockIdx.x * 8 + g) * 4 + t];
    const double b = static_cast<const double*>(params.B)[(blockIdx.x * 4 + t) * 8 + g];
    const int at = (blockIdx.x * 8 + g) * 8 + 2 * t;
    double d[2];
    for (int e = 0; e < 2; ++e) d[e] = static_cast<const double*>(params.C)[at + e];
    mma_m8n8k4_f64(d[0], d[1], a, b);
    for (int e = 0; e < 2; ++e) static_cast<double*>(params.D)[at + e] = d[e];
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  } else if (params.which == 4) {
    multiply_double<8>(params,
                       [](auto& d, const auto& a, const auto& b) { mma_m16n8k8_f64(d, a, b); });
  } else {
    multiply_double<16>(params,
                        [](auto& d, const auto& a, const auto& b) { mma_m16n8k16_f64(d, a, b); });
#endif
  }
}
