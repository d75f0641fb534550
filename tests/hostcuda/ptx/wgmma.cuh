// SPDX-License-Identifier: MIT
// wgmma.cuh: host twin. Products of a warpgroup take effect, in the order of issue, at any time
// between their issue and the wait for their group; only then do they read A, B and D.
#pragma once

#include "ptx/shared_address.cuh"

namespace cupyflash {

enum class MmaType { kF16, kBf16 };
enum class Swizzle : unsigned { k128 = 1, k64 = 2 };

inline unsigned long long wgmma_descriptor(const void* matrix, Swizzle swizzle,
                                           unsigned leading_bytes, unsigned stride_bytes,
                                           host::Place place = host::Place::here()) {
  const unsigned address = shared_address(matrix, place);
  if (address % 16 || leading_bytes % 16 || stride_bytes % 16)
    host::fault(place, "wgmma_descriptor: address and offsets must be multiples of 16 bytes");
  return static_cast<unsigned long long>(swizzle) << 62 |
         static_cast<unsigned long long>(stride_bytes / 16) << 32 |
         static_cast<unsigned long long>(leading_bytes / 16) << 16 | address / 16;
}

}  // namespace cupyflash

namespace cupyflash::twin {

using namespace host;

// A matrix in shared memory, as its descriptor says.
struct WgmmaMatrix {
  unsigned address, leading, stride, row_bytes;

  explicit WgmmaMatrix(unsigned long long d)
      : address(unsigned(d & 0x3fff) * 16),
        leading(unsigned(d >> 16 & 0x3fff) * 16),
        stride(unsigned(d >> 32 & 0x3fff) * 16),
        row_bytes(d >> 62 == 1 ? 128 : 64) {}

  // The 16 bits at (row, column), rows being swizzled lines of row_bytes in groups of 8.
  unsigned short at(unsigned row, unsigned column) const {
    const unsigned per_slab = row_bytes / 2;
    const size_t linear = address + size_t(column / per_slab) * leading + size_t(row / 8) * stride +
                          row % 8 * row_bytes + column % per_slab * 2;
    const size_t swizzled = linear ^ ((linear >> 7) % (row_bytes / 16) << 4);
    unsigned short bits;
    __builtin_memcpy(&bits, at_shared_address(unsigned(swizzled)), 2);
    return bits;
  }
};

template <MmaType type>
float mma_element(unsigned short bits) {
  if constexpr (type == MmaType::kBf16) {
    return bit_cast<float>(unsigned(bits) << 16);
  } else {
    return __half2float(bit_cast<__half>(bits));
  }
}

// To float towards zero, as the tensor cores do.
inline float truncated(double x) {
  const float y = float(x);
  return isfinite(y) && fabs(double(y)) > fabs(x) ? nextafterf(y, 0.0f) : y;
}

struct WgmmaThread {
  std::vector<std::shared_ptr<Operation>> open;
  std::vector<std::vector<std::shared_ptr<Operation>>> groups;
  bool fenced = false;
};

struct WgmmaGroup {
  std::shared_ptr<Operation> last;
};

inline WgmmaThread& wgmma_thread() {
  return state_at<WgmmaThread>(reinterpret_cast<const void*>(size_t(thread_index()) + 1));
}

// One thread's operands: its registers of D and of A (if any), and the descriptors.
struct WgmmaOperands {
  float* d;
  const unsigned* a;
  unsigned long long a_descriptor, b_descriptor;
};

template <int n, MmaType type, bool accumulate, bool transpose_b>
void wgmma_compute(const WgmmaOperands* threads) {
  float A[64][16], B[16][n];
  const WgmmaMatrix b(threads[0].b_descriptor);
  for (int k = 0; k < 16; ++k)
    for (int x = 0; x < n; ++x) B[k][x] = mma_element<type>(transpose_b ? b.at(k, x) : b.at(x, k));
  if (threads[0].a) {
    for (int t = 0; t < 128; ++t)
      for (int r = 0; r < 4; ++r)
        for (int half = 0; half < 2; ++half)
          A[t / 32 * 16 + t % 32 / 4 + r % 2 * 8][t % 4 * 2 + r / 2 * 8 + half] =
              mma_element<type>((unsigned short)(threads[t].a[r] >> 16 * half));
  } else {
    const WgmmaMatrix a(threads[0].a_descriptor);
    for (int i = 0; i < 64; ++i)
      for (int k = 0; k < 16; ++k) A[i][k] = mma_element<type>(a.at(i, k));
  }
  for (int t = 0; t < 128; ++t)
    for (int x = 0; x < n / 2; ++x) {
      const int row = t / 32 * 16 + t % 32 / 4 + x / 2 % 2 * 8;
      const int column = x / 4 * 8 + t % 4 * 2 + x % 2;
      double sum = accumulate ? double(threads[t].d[x]) : 0.0;
      for (int k = 0; k < 16; ++k) sum += double(A[row][k]) * double(B[k][column]);
      threads[t].d[x] = truncated(sum);
    }
}

template <int n, MmaType type, bool accumulate, bool transpose_b>
void wgmma_issue(const WgmmaOperands& operands, Place place) {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256, "n of a wgmma");
  auto& thread = wgmma_thread();
  if (!thread.fenced) fault(place, "wgmma: no wgmma_fence before it");
  // Shared among the threads: one operation.
  auto* const shared = warpgroup_collective<std::shared_ptr<Operation>*>(
      "wgmma", place, operands,
      [place](const WgmmaOperands* all, Members, std::shared_ptr<Operation>** results) {
        struct Copy {
          WgmmaOperands of[128];
        };
        auto copy = std::make_shared<Copy>();
        for (int t = 0; t < 128; ++t) {
          copy->of[t] = all[t];
          if (all[t].b_descriptor != all[0].b_descriptor ||
              all[t].a_descriptor != all[0].a_descriptor)
            fault(place, "wgmma: the threads of a warpgroup have different descriptors");
        }
        auto& group =
            state_at<WgmmaGroup>(reinterpret_cast<const void*>(size_t(thread_index() / 128) + 1));
        auto before = group.last;
        group.last = issue(
            [copy, before] {
              if (before) before->land();
              wgmma_compute<n, type, accumulate, transpose_b>(copy->of);
            },
            /*lingers=*/true);
        for (int t = 0; t < 128; ++t) results[t] = new std::shared_ptr<Operation>(group.last);
      });
  wgmma_thread().open.push_back(*shared);
  delete shared;
}

}  // namespace cupyflash::twin

namespace cupyflash {

inline void wgmma_fence() { twin::wgmma_thread().fenced = true; }

inline void wgmma_commit() {
  auto& thread = twin::wgmma_thread();
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

template <int pending>
void wgmma_wait(host::Place place = host::Place::here()) {
  auto& groups = twin::wgmma_thread().groups;
  while (groups.size() > pending) {
    for (auto& operation : groups.front()) host::land(operation, "wgmma_wait", place);
    groups.erase(groups.begin());
  }
}

template <int n>
void wgmma_use(float (&)[n]) {}

template <MmaType type, bool accumulate, bool transpose_b, int n>
void wgmma(float (&d)[n], unsigned long long a_descriptor, unsigned long long b_descriptor,
           host::Place place = host::Place::here()) {
  twin::wgmma_issue<2 * n, type, accumulate, transpose_b>({d, nullptr, a_descriptor, b_descriptor},
                                                          place);
}

template <MmaType type, bool accumulate, bool transpose_b, int n>
void wgmma(float (&d)[n], const unsigned (&a)[4], unsigned long long b_descriptor,
           host::Place place = host::Place::here()) {
  twin::wgmma_issue<2 * n, type, accumulate, transpose_b>({d, a, 0, b_descriptor}, place);
}

}  // namespace cupyflash
