// SPDX-License-Identifier: MIT
// own_scores.cuh: softcap, ALiBi, bias and mask on the scores of a thread, each of whose bias and
// mask it reads from global memory itself.
#pragma once

#include "common/tile_scores.cuh"

namespace cupyflash {

class OwnScores {
 public:
  // rows: of the work, whose head is `at`. pairs: entries of an array lie side by side, every
  // second one at a multiple of their size.
  __device__ __forceinline__ OwnScores(const Problem& problem, const HeadIndex& at,
                                       const QueryRows& rows, int diagonal, bool bias_pairs,
                                       bool mask_pairs)
      : bias_(static_cast<const acc*>(problem.bias.data)),
        mask_(static_cast<const uint8*>(problem.mask.data)),
        bias_pairs_(bias_pairs),
        mask_pairs_(mask_pairs),
        rows_(rows),
        diagonal_(diagonal),
        slope_(0) {
    if (bias_) bias_ += at.offset(problem.bias, at.head_q) + rows.i0 * problem.bias.row;
    if (mask_) mask_ += at.offset(problem.mask, at.head_q) + rows.i0 * problem.mask.row;
    if (problem.alibi_slopes.data) {
      slope_ = static_cast<const acc*>(
          problem.alibi_slopes.data)[at.offset(problem.alibi_slopes, at.head_q)];
    }
  }

  // Of the thread's scores of a tile.
  struct Entries {
    acc bias[kFragments][kKeyTiles][4];
    unsigned shown[kFragments];  // bit 4 n + x: score [n][x]
  };

  // Of the tile that begins with key j0. Where a key is not one, or a row not one of the work's, it
  // reads a neighbour's. What there is none of becomes 0: ptxas would keep what was there before.
  __device__ __forceinline__ void load(Entries& entries, const Problem& problem, int j0) const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) entries.shown[m] = 0;
    if (mask_) {
      uint8 mask[kFragments][kKeyTiles][4];
      gather(mask, mask_, problem, problem.mask, mask_pairs_, j0);
      each(mask,
           [&](int m, int n, int x, uint8 one) { entries.shown[m] |= (one != 0) << (4 * n + x); });
    }
    if (bias_) {
      gather(entries.bias, bias_, problem, problem.bias, bias_pairs_, j0);
    } else {
      each(entries.bias, [](int, int, int, acc& b) { b = acc(0); });
    }
  }

  // Turns products of that tile into scores in nats.
  __device__ __forceinline__ void apply(acc (&S)[kFragments][kKeyTiles][4], const Entries& entries,
                                        const Problem& problem, int j0) const {
    const acc scale = static_cast<acc>(problem.softmax_scale);
    const acc cap = static_cast<acc>(problem.softcap);
    acc least = 0;
    each(entries.bias, [&](int, int, int, acc b) { least = min(least, b); });
    if (cap != acc(0)) {
      const acc to_cap = static_cast<acc>(1 / problem.softcap);
      each(S, [&](int, int, int, acc& s) { s = cap * tanhf(s * scale * to_cap); });
      each(S, [&](int m, int n, int x, acc& s) { s += entries.bias[m][n][x]; });
    } else {
      each(S, [&](int m, int n, int x, acc& s) { s = fused(s, scale, entries.bias[m][n][x]); });
    }
    if (slope_ != acc(0)) {
      each(S, [&](int m, int n, int x, acc& s) {
        const int from_diagonal = diagonal_ + lane_row(m, x / 2) - j0 - lane_key(n) - x % 2;
        s -= slope_ * static_cast<acc>(abs(from_diagonal));
      });
    }
    if (least == kMinusInfinity) {  // NaN or +inf must not bring back what that hides
      each(S, [&](int m, int n, int x, acc& s) {
        if (entries.bias[m][n][x] == kMinusInfinity) s = kMinusInfinity;
      });
    }
    if (mask_) {
      each(S, [&](int m, int n, int x, acc& s) {
        if (!(entries.shown[m] >> (4 * n + x) & 1)) s = kMinusInfinity;
      });
    }
  }

  // Whether some row sees key j.
  __device__ __forceinline__ bool shown(const Problem& problem, const TileBand& band, int j) const {
    bool some = false;
#pragma unroll 1
    for (int r = 0; r < rows_.rows && !some; ++r) {
      const int i = rows_.i0 + r;
      some = j >= band.first(i) && j < band.end(i) &&
             (!mask_ || mask_[r * problem.mask.row + j * problem.mask.col]) &&
             (!bias_ || bias_[r * problem.bias.row + j * problem.bias.col] != kMinusInfinity);
    }
    return some;
  }

 private:
  template <class T, class Change>
  static __device__ __forceinline__ void each(T (&entries)[kFragments][kKeyTiles][4],
                                              const Change& change) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) change(m, n, x, entries[m][n][x]);
      }
    }
  }
  // Entries of the thread's rows and keys; where those end, the last one again.
  template <class T>
  __device__ __forceinline__ void gather(T (&entries)[kFragments][kKeyTiles][4], const T* array,
                                         const Problem& problem, const TensorView& view, bool pairs,
                                         int j0) const {
    const int last = static_cast<int>(problem.seqlen_k) - 1 - j0;
    const bool whole = pairs && last >= kBc - 1;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h == 1 && view.row == 0) {  // one row for all queries
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            entries[m][n][2] = entries[m][n][0];
            entries[m][n][3] = entries[m][n][1];
          }
          continue;
        }
        const T* const row = array + row_of(lane_row(m, h)) * view.row + j0 * view.col;
        if (whole) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(row + lane_key(n));
            entries[m][n][2 * h] = pair.x[0];
            entries[m][n][2 * h + 1] = pair.x[1];
          }
        } else {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              entries[m][n][2 * h + e] = row[min(lane_key(n) + e, last) * view.col];
            }
          }
        }
      }
    }
  }
  __device__ __forceinline__ int64 row_of(int r) const { return min(r, rows_.rows - 1); }

  const acc* bias_;
  const uint8* mask_;
  bool bias_pairs_;
  bool mask_pairs_;
  QueryRows rows_;
  int diagonal_;  // key on the diagonal of row 0
  acc slope_;
};

}  // namespace cupyflash
