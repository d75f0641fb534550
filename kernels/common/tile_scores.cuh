// SPDX-License-Identifier: MIT
// tile_scores.cuh: the rows of a query tile, and what hides or changes the scores of one tile.
//
// Scores lie in a warp's registers as products leave them: lane (g = lane / 4, t = lane % 4) has
// row 16 m + 8 h + g of the warp and key 8 n + 2 t + e at S[m][n][2 h + e].
#pragma once

#include "common/mask.cuh"
#include "common/tile.cuh"
#include "ptx/pin.cuh"
#include "ptx/tanh.cuh"

namespace cupyflash {

// Rows of a query tile are (query, head) pairs, query first: `pack` query heads that share a key
// head are side by side, so that few queries still fill a tile. pack is 1 or all of the group.
struct QueryRows {
  int i0;  // query of row 0
  int h0;  // head of row 0 in its group
  int pack;
  int rows;  // that there are; a tile may have more

  __device__ QueryRows(const Problem& problem, int64 pack_, int64 tile)
      : i0(static_cast<int>(tile * kBr / pack_)),
        h0(static_cast<int>(tile * kBr % pack_)),
        pack(static_cast<int>(pack_)),
        rows(within(problem.seqlen_q * pack_ - tile * kBr, kBr)) {}

  __device__ __forceinline__ int query(int r) const { return pack == 1 ? r : (h0 + r) / pack; }
  __device__ __forceinline__ int head(int r) const { return pack == 1 ? 0 : (h0 + r) % pack; }
  __device__ int first() const { return i0; }
  __device__ int last() const { return i0 + query(rows - 1); }
};

// A Band in few registers. Lengths are below 2^30, and so is what a limit can be.
struct TileBand {
  int low;     // first key that query 0 sees, if it is one
  int high;    // one behind its last
  int length;  // keys in use
  int offset;  // key on its diagonal

  __device__ explicit TileBand(const Band& band)
      : low(band.left < 0 ? -kFar : static_cast<int>(band.offset - band.left)),
        high(band.right < 0 ? kFar : static_cast<int>(band.offset + band.right + 1)),
        length(static_cast<int>(band.seqlen_k)),
        offset(static_cast<int>(band.offset)) {}

  __device__ int first(int i) const { return max(i + low, 0); }
  __device__ int end(int i) const { return min(i + high, length); }

 private:
  static constexpr int kFar = 1 << 30;
};

// Row of the tile that a lane holds at [m][.][2 h + .].
__device__ __forceinline__ int lane_row(int m, int h) {
  return threadIdx.x / kWarpSize * kWarpRows + 16 * m + 8 * h + threadIdx.x % kWarpSize / 4;
}
__device__ __forceinline__ int lane_key(int n) { return 8 * n + threadIdx.x % 4 * 2; }

constexpr unsigned kAllSeen = 0xffffffffu;
constexpr unsigned kLaneKeys = kKeyTiles == 16 ? kAllSeen : (1u << 2 * kKeyTiles) - 1u;

// Hides by position: keys j0 ... of a tile that some row does not see all of.
__device__ __forceinline__ void hide_by_position(acc (&S)[kFragments][kKeyTiles][4],
                                                 const QueryRows& at, const TileBand& band,
                                                 int j0) {
  QueryRows here = at;
  here.pack = pin(at.pack);  // few tiles come here
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = here.i0 + here.query(lane_row(m, h));
      const int first = min(band.first(i) - j0, kBc) - lane_key(0);
      const int end = min(band.end(i) - j0, kBc) - lane_key(0);
      const unsigned count = end > first ? end - first : 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool seen = static_cast<unsigned>(8 * n + e - first) < count;
          S[m][n][2 * h + e] = seen ? S[m][n][2 * h + e] : kMinusInfinity;
        }
      }
    }
  }
}

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T x[2];
};

__device__ __forceinline__ float cap(float x) {
  return sizeof(element) == 2 ? tanh_approx(x) : tanhf(x);
}
__device__ __forceinline__ double cap(double x) { return tanh(x); }

// Softcap, bias, ALiBi and masks of one (batch entry, group of heads).
class ScoreChanges {
 public:
  // pairs: rows of bias and mask are contiguous and may be read two keys at a time.
  __device__ ScoreChanges(const Problem& problem, const HeadIndex& head, bool pairs)
      : problem_(problem),
        scale_(static_cast<acc>(problem.softmax_scale)),
        softcap_(static_cast<acc>(problem.softcap)),
        softcap_inverse_(problem.softcap == 0 ? acc(0) : acc(1 / problem.softcap)),
        mask_(head.offset(problem.mask, head.head_q)),
        bias_(head.offset(problem.bias, head.head_q)),
        slopes_(head.offset(problem.alibi_slopes, head.head_q)),
        pairs_(pairs) {}

  // Turns products into scores of nats, hidden ones into -inf. Bit 2 n + e of the result: some row
  // of the warp sees the lane's key 8 n + 2 t + e.
  __device__ __forceinline__ unsigned apply(acc (&S)[kFragments][kKeyTiles][4], const QueryRows& at,
                                            const TileBand& band, int j0) const {
    scale(S);
    unsigned seen = 0;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane_row(m, h);
        const int i = at.i0 + at.query(r);
        const int head = at.head(r);
        unsigned bits = r < at.rows ? by_position(band, i, j0) : 0;
        if (problem_.mask.data) bits &= by_mask(bits, head, i, j0);
        if (problem_.bias.data) bits &= add_bias(S[m], h, bits, head, i, j0);
        if (problem_.alibi_slopes.data) {
          add_alibi(S[m], h, head, static_cast<acc>(i + band.offset - j0 - lane_key(0)));
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            acc& s = S[m][n][2 * h + e];
            s = bits & 1u << (2 * n + e) ? s : kMinusInfinity;
          }
        }
        seen |= bits;
      }
    }
#pragma unroll
    for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
      seen |= __shfl_xor_sync(kFullWarp, seen, lanes);
    }
    return seen;
  }

 private:
  __device__ __forceinline__ void scale(acc (&S)[kFragments][kKeyTiles][4]) const {
    const auto each = [&](const auto& change) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) S[m][n][e] = change(S[m][n][e]);
        }
      }
    };
    each([&](acc s) { return s * scale_; });
    if (softcap_ != acc(0)) each([&](acc s) { return softcap_ * cap(s * softcap_inverse_); });
  }

  static __device__ __forceinline__ unsigned by_position(const TileBand& band, int i, int j0) {
    const int first = min(band.first(i) - j0, kBc) - lane_key(0);
    const int end = min(band.end(i) - j0, kBc) - lane_key(0);
    return keys_below(end) & ~keys_below(first);
  }

  // The lane's keys 8 n + e < end, from its first one on.
  static __device__ __forceinline__ unsigned keys_below(int end) {
    // 2 for each whole fragment, and what there is of the next.
    const int rest = end < 0 ? 0 : end % 8;
    const int count = end < 0 ? 0 : end / 8 * 2 + (rest < 2 ? rest : 2);
    return count < 32 ? (1u << count) - 1u : kAllSeen;
  }

  __device__ __forceinline__ unsigned by_mask(unsigned wanted, int head, int64 i, int j0) const {
    const TensorView& view = problem_.mask;
    const uint8* row = static_cast<const uint8*>(view.data) + mask_ + head * view.head +
                       i * view.row + (j0 + lane_key(0)) * view.col;
    unsigned bits = 0;
#pragma unroll 4
    for (int n = 0; n < kKeyTiles; ++n) {
      const unsigned both = wanted >> 2 * n & 3;
      if (pairs_ && both == 3) {
        const Pair<uint8> x = *reinterpret_cast<const Pair<uint8>*>(row);
        bits |= ((x.x[0] ? 1u : 0u) | (x.x[1] ? 2u : 0u)) << 2 * n;
      } else {
        if (both & 1 && row[0]) bits |= 1u << 2 * n;
        if (both & 2 && row[view.col]) bits |= 2u << 2 * n;
      }
      row += 8 * view.col;
    }
    return bits;
  }

  // Returns the keys that it does not hide.
  __device__ __forceinline__ unsigned add_bias(acc (&S)[kKeyTiles][4], int h, unsigned wanted,
                                               int head, int64 i, int j0) const {
    const TensorView& view = problem_.bias;
    const int64 at = bias_ + head * view.head + i * view.row + (j0 + lane_key(0)) * view.col;
    if (problem_.bias_is_float) {
      return add_row(S, h, wanted, static_cast<const float*>(view.data) + at, view.col);
    }
    return add_row(S, h, wanted, static_cast<const element*>(view.data) + at, view.col);
  }

  template <class T>
  __device__ __forceinline__ unsigned add_row(acc (&S)[kKeyTiles][4], int h, unsigned wanted,
                                              const T* row, int64 col) const {
    unsigned hidden = 0;
    const auto add = [&](int n, int e, T x) {
      const acc b = static_cast<acc>(to_acc(x));
      // A score of NaN or +inf must not bring back what -inf hides.
      if (b == kMinusInfinity) hidden |= 1u << (2 * n + e);
      S[n][2 * h + e] += b;
    };
    if (pairs_ && wanted == kLaneKeys) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const Pair<T> x = *reinterpret_cast<const Pair<T>*>(row + 8 * n);
        add(n, 0, x.x[0]);
        add(n, 1, x.x[1]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        if (wanted & 1u << 2 * n) add(n, 0, row[8 * n * col]);
        if (wanted & 2u << 2 * n) add(n, 1, row[(8 * n + 1) * col]);
      }
    }
    return ~hidden;
  }

  // diagonal: from the lane's first key to the key on the row's diagonal.
  __device__ __forceinline__ void add_alibi(acc (&S)[kKeyTiles][4], int h, int head,
                                            acc diagonal) const {
    const acc slope = static_cast<const acc*>(
        problem_.alibi_slopes.data)[slopes_ + head * problem_.alibi_slopes.head];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const acc distance = diagonal - acc(8 * n + e);
        S[n][2 * h + e] -= slope * (distance < acc(0) ? -distance : distance);
      }
    }
  }

  const Problem& problem_;
  acc scale_;
  acc softcap_;
  acc softcap_inverse_;
  int64 mask_;
  int64 bias_;
  int64 slopes_;
  bool pairs_;
};

}  // namespace cupyflash
