// SPDX-License-Identifier: MIT
// tma.cuh: host twin. A copy lands, and its bytes are counted, at some time after it was issued.
#pragma once

#include "ptx/mbarrier.cuh"

namespace cupyflash {

// What hostcuda/launch.py packs of a record's tensor map, in place of the driver's 128 bytes.
struct alignas(64) TensorMap {
  const char* base;
  unsigned long long sizes[5];
  unsigned long long strides[4];  // bytes, of all but the first axis
  unsigned box[5];
  unsigned itemsize;
  unsigned swizzle;  // bytes of a row: 0, 32, 64 or 128
  unsigned unused[3];
};
static_assert(sizeof(TensorMap) == 128);

inline void tma_prefetch_map(const TensorMap& map, host::Place place = host::Place::here()) {
  if (!map.base) host::fault(place, "tma_prefetch_map: the map is empty");
}

}  // namespace cupyflash

namespace cupyflash::twin {

using namespace host;

// The 16-byte units of a row are permuted by its number among the rows of 128 bytes. `offset` is
// that from an address that the pattern begins at.
inline size_t swizzled(size_t offset, unsigned swizzle) {
  return swizzle ? offset ^ ((offset >> 7) % (swizzle / 16) << 4) : offset;
}

inline void copy_box(char* dst, const cupyflash::TensorMap& map, const int (&at)[5]) {
  const size_t to = cupyflash::shared_address(dst);
  size_t element = 0;
  int x[5];
  for (x[4] = 0; x[4] < int(map.box[4]); ++x[4])
    for (x[3] = 0; x[3] < int(map.box[3]); ++x[3])
      for (x[2] = 0; x[2] < int(map.box[2]); ++x[2])
        for (x[1] = 0; x[1] < int(map.box[1]); ++x[1])
          for (x[0] = 0; x[0] < int(map.box[0]); ++x[0], element += map.itemsize) {
            bool inside = true;
            size_t from = 0;
            for (int axis = 0; axis < 5; ++axis) {
              const long long index = (long long)at[axis] + x[axis];
              inside = inside && index >= 0 && index < (long long)map.sizes[axis];
              from += size_t(index) * (axis ? map.strides[axis - 1] : map.itemsize);
            }
            char* const byte = at_shared_address(unsigned(swizzled(to + element, map.swizzle)));
            for (unsigned b = 0; b < map.itemsize; ++b) byte[b] = inside ? map.base[from + b] : 0;
          }
}

}  // namespace cupyflash::twin

namespace cupyflash {

inline void tma_load_5d(void* dst, const TensorMap& map, Mbarrier& barrier, const int (&at)[5],
                        host::Place place = host::Place::here()) {
  size_t bytes = map.itemsize;
  for (unsigned n : map.box) bytes *= n;
  const unsigned alignment = map.swizzle ? 8 * map.swizzle : 128;
  if (!host::is_shared(dst, bytes) || shared_address(dst, place) % 128)
    host::fault(place, "tma_load_5d: the box does not lie in shared memory, aligned to 128 bytes");
  if (shared_address(dst, place) % alignment)
    host::fault(place, "tma_load_5d: the box is not aligned to its swizzle's %u bytes", alignment);
  if (map.swizzle && map.box[0] * map.itemsize != map.swizzle)
    host::fault(place, "tma_load_5d: rows of %u bytes with a swizzle of %u",
                map.box[0] * map.itemsize, map.swizzle);
  // The PTX manual does not say so; an H200 stops with an illegal instruction.
  if (at[0] * int(map.itemsize) % 16)
    host::fault(place, "tma_load_5d: column %d does not begin at a multiple of 16 bytes", at[0]);
  twin::mbarrier_state(barrier, "tma_load_5d", place);
  struct Copy {
    char* dst;
    TensorMap map;
    Mbarrier* barrier;
    int at[5];
    unsigned bytes;
  } copy{
      static_cast<char*>(dst), map, &barrier, {at[0], at[1], at[2], at[3], at[4]}, unsigned(bytes)};
  host::issue([copy] {
    twin::copy_box(copy.dst, copy.map, copy.at);
    twin::mbarrier_complete_tx(*copy.barrier, copy.bytes);
  });
}

}  // namespace cupyflash
