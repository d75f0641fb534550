// SPDX-License-Identifier: MIT
// tile.cuh: tiles in shared memory for mma.sync, and how they are loaded behind the computation.
//
// A row is padded to whole lines of 128 bytes, and its 16-byte chunks are permuted within each line
// (swizzled): chunk c of row r lies at c ^ swizzle(r). Then these reads meet no bank twice:
//   8 rows, one chunk                      (ldmatrix)
//   rows r and r + 1, four chunks each     (the k of a product, 16 bytes a lane)
//   rows r, r + 2, r + 4, r + 6, two chunks (every second row being a k of P V)
#pragma once

#include "common/params.cuh"
#include "common/tile_config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

constexpr int kChunkBytes = 16;
constexpr int kVec = kChunkBytes / static_cast<int>(sizeof(element));

__device__ __forceinline__ int swizzle(int row) { return (row & 7) ^ ((row & 1) << 2); }

template <int rows, int cols>
struct Tile {
  static constexpr int kRows = rows;
  static constexpr int kCols = cols;
  static constexpr int kChunks = cols / kVec;
  static constexpr int kRowBytes = round_up(cols * static_cast<int>(sizeof(element)), 128);
  static constexpr int kBytes = rows * kRowBytes;
  static_assert(cols % kVec == 0, "a row is made of whole chunks");

  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ swizzle(row)) * kChunkBytes;
  }
};

// x held within 0 .. limit.
__device__ __forceinline__ int within(int64 x, int limit) {
  return static_cast<int>(x < 0 ? 0 : x > limit ? limit : x);
}

constexpr int power_of_two_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Turns the sign of the elements, of 32 bits at most, that lie in this warp's rows of a tile, once
// they are there.
template <class T>
__device__ __forceinline__ void negate_rows(unsigned char* tile) {
  constexpr int kWords = kWarpRows * T::kRowBytes / 4;
  constexpr unsigned kSigns = sizeof(element) == 2 ? 0x80008000u : 0x80000000u;
  unsigned* const words = reinterpret_cast<unsigned*>(tile) + threadIdx.x / kWarpSize * kWords;
#pragma unroll 1
  for (int w = threadIdx.x % kWarpSize; w < kWords; w += kWarpSize) {
    words[w] ^= kSigns;
  }
  __syncwarp();  // lanes read each other's words from now on
}

// What a thread copies of every tile of T, 16 bytes at a time: chunks chunk, chunk + kLanes, ... of
// every kPassRows-th row from r0 on.
template <class T>
struct ThreadCopies {
  static constexpr int kRowLanes = power_of_two_from(T::kChunks);
  static constexpr int kLanes = kRowLanes < kThreads ? kRowLanes : kThreads;
  static constexpr int kGroups = kRowLanes / kLanes;
  static constexpr int kPassRows = kThreads / kLanes;
  static constexpr int kPasses = ceil_div(T::kRows, kPassRows);
  static_assert(kLanes >= 8 || kGroups == 1, "chunks that are kLanes apart are permuted alike");

  int chunk;
  int r0;
  int cols;

  // cols: columns that there are, which are contiguous; the tile's others become 0.
  __device__ __forceinline__ ThreadCopies(int thread, int cols_)
      : chunk(thread % kLanes), r0(thread / kLanes), cols(cols_) {}

  // Starts the copies: copy(r, group, to, from) for each. row_at(pass) is where row
  // r0 + pass kPassRows begins, from chunk on.
  template <class RowAt, class Copy>
  __device__ __forceinline__ void each(const unsigned char* tile, RowAt row_at,
                                       const Copy& copy) const {
    if (T::kChunks < kLanes && chunk >= T::kChunks) return;
    const unsigned to = shared_address(tile) + T::offset(r0, chunk);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = r0 + pass * kPassRows;
      if (T::kRows % kPassRows && r >= T::kRows) break;
      // Eight rows further down the chunks are permuted alike.
      const unsigned row = kPassRows % 8 == 0 ? to + pass * kPassRows * T::kRowBytes
                                              : shared_address(tile) + T::offset(r, chunk);
      const element* const from = row_at(pass);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (T::kChunks < kRowLanes && chunk + group * kLanes >= T::kChunks) break;
        copy(r, group, row + group * kLanes * kChunkBytes, from + group * kLanes * kVec);
      }
    }
  }
  // Rows outside [begin, end) and columns that are not there become 0 and are not read.
  template <class RowAt>
  __device__ __forceinline__ void start(const unsigned char* tile, int begin, int end,
                                        const RowAt& row_at) const {
    const unsigned rows = end > begin ? end - begin : 0;
    each(tile, row_at, [&](int r, int group, unsigned to, const element* from) {
      const int left = (cols - (chunk + group * kLanes) * kVec) * static_cast<int>(sizeof(element));
      const int bytes = max(min(left, kChunkBytes), 0);
      cp_async_16(to, from, static_cast<unsigned>(r - begin) < rows ? bytes : 0);
    });
  }
};

// The same, an element at a time, for any stride and alignment. 16-bit elements are too small for
// an asynchronous copy and are there at the next barrier.
template <class T, class RowAt>
__device__ __forceinline__ void load_elements(unsigned char* tile, const RowAt& row_at,
                                              int64 col_stride, int begin, int end, int cols) {
#pragma unroll 1
  for (int x = threadIdx.x; x < T::kRows * T::kCols; x += kThreads) {
    const int r = x / T::kCols;
    const int c = x % T::kCols;
    const bool inside = r >= begin && r < end && c < cols;
    unsigned char* const to = tile + T::offset(r, c / kVec) + c % kVec * sizeof(element);
    const element* const from = row_at(r) + c * col_stride;
    if constexpr (sizeof(element) >= 4) {
      cp_async_small<sizeof(element)>(shared_address(to), from, inside ? sizeof(element) : 0);
    } else {
      *reinterpret_cast<element*>(to) = inside ? *from : from_acc<element>(acc(0));
    }
  }
}

// Loads one tile of keys after the other.
template <class T>
class KeyLoader {
 public:
  // first: row 0 of the first tile. thread: this one.
  __device__ __forceinline__ KeyLoader(const TensorView& view, const element* first, int cols,
                                       bool vectors, int thread)
      : view_(view), first_(first), cols_(cols), vectors_(vectors) {
    const ThreadCopies<T> copies(thread, cols);
    if (vectors) first_ += copies.r0 * view.row + copies.chunk * kVec;
  }

  // Whether next_whole() will do for tiles that lie within the keys.
  __device__ __forceinline__ bool whole() const { return vectors_ && cols_ >= T::kCols; }

  // Starts to load the next tile.
  __device__ __forceinline__ void next_whole(unsigned char* tile, int thread) {
    const ThreadCopies<T> copies(thread, T::kCols);
    copies.each(tile, steps(),
                [](int, int, unsigned to, const element* from) { cp_async_16(to, from); });
    first_ += T::kRows * view_.row;
  }
  // The same where only rows [begin, end) of it are keys.
  __device__ __forceinline__ void next(unsigned char* tile, int begin, int end) {
    if (vectors_) {
      const ThreadCopies<T> copies(pin(threadIdx.x), cols_);  // few tiles come here
      copies.start(tile, begin, end, steps());
    } else {
      const auto row_at = [&](int r) { return first_ + r * view_.row; };
      load_elements<T>(tile, row_at, view_.col, begin, end, cols_);
    }
    first_ += T::kRows * view_.row;
  }
  // Whichever of these does.
  __device__ __forceinline__ void load(unsigned char* tile, int begin, int end, int thread) {
    if (whole() && begin <= 0 && end >= T::kRows) {
      next_whole(tile, thread);
    } else {
      next(tile, begin, end);
    }
  }

 private:
  // One row after the other.
  __device__ __forceinline__ auto steps() const {
    const element* next = first_;
    const int64 step = ThreadCopies<T>::kPassRows * view_.row;
    return [next, step](int) mutable {
      const element* const at = next;
      next += step;
      return at;
    };
  }

  const TensorView& view_;
  const element* first_;
  int cols_;
  bool vectors_;
};

}  // namespace cupyflash
