// SPDX-License-Identifier: MIT
// tile_scores.cuh: the rows of a query tile, and what hides or changes the scores of one tile.
//
// Scores lie in a warp's registers as products leave them: lane (g = lane / 4, t = lane % 4) has
// row 16 m + 8 h + g of the warp and key 8 n + 2 t + e at S[m][n][2 h + e].
#pragma once

#include "common/mask.cuh"
#include "common/score_tile.cuh"
#include "common/tile_softmax.cuh"
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

  QueryRows() = default;
  __device__ QueryRows(const Problem& problem, int64 pack_, int64 tile)
      : pack(static_cast<int>(pack_)), rows(within(problem.seqlen_q * pack_ - tile * kBr, kBr)) {
    const Division<unsigned> first(static_cast<unsigned>(tile) * kBr, pack);
    i0 = static_cast<int>(first.quotient);
    h0 = static_cast<int>(first.rest);
  }

  __device__ __forceinline__ int query(int r) const {
    return static_cast<int>(Division<unsigned>(h0 + r, pack).quotient);
  }
  __device__ __forceinline__ int head(int r) const {
    return static_cast<int>(Division<unsigned>(h0 + r, pack).rest);
  }
  __device__ int first() const { return i0; }
  __device__ int last() const { return i0 + query(rows - 1); }
};

// A Band in few registers. Lengths are below 2^30, and so is what a limit can be.
struct TileBand {
  int low;     // first key that query 0 sees, if it is one
  int high;    // one behind its last
  int length;  // keys in use
  int offset;  // key on its diagonal

  TileBand() = default;
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

// The keys of a work, and the tiles of kBc keys that it visits.
struct KeyBounds {
  int keys_begin;  // keys that some row sees by position
  int keys_end;
  int plain_begin;  // keys that every row sees
  int plain_end;
  int begin;  // tiles, of a part of the keys if there are several
  int end;

  KeyBounds() = default;
  __device__ KeyBounds(const QueryRows& rows, const TileBand& band, int split, int splits)
      : keys_begin(band.first(rows.first())),
        keys_end(band.end(rows.last())),
        plain_begin(band.first(rows.last())),
        plain_end(band.end(rows.first())),
        begin(keys_begin / kBc),
        end(keys_end > keys_begin ? ceil_div(keys_end, kBc) : begin) {
    if (splits > 1) {
      const int part = ceil_div(end - begin, splits);
      begin += split * part;
      end = begin + part < end ? begin + part : end;
    }
  }

  // Of the tile that begins with key j0: all of it is keys, or is seen by every row.
  __device__ __forceinline__ bool whole(int j0) const {
    return j0 >= keys_begin && j0 + kBc <= keys_end;
  }
  __device__ __forceinline__ bool plain(int j0) const {
    return j0 >= plain_begin && j0 + kBc <= plain_end;
  }
};

// Row of the tile that a lane holds at [m][.][2 h + .].
__device__ __forceinline__ int lane_row(int m, int h) {
  return threadIdx.x / kWarpSize * kWarpRows + 16 * m + 8 * h + threadIdx.x % kWarpSize / 4;
}
__device__ __forceinline__ int lane_key(int n) { return 8 * n + threadIdx.x % 4 * 2; }

// The keys of a lane as a set: 8 n + 2 t + e is bit key_bit(n, e). Of general variants, which may
// keep the sets of two rows in one word.
__device__ constexpr int key_bit(int n, int e) { return n + 8 * e; }
constexpr unsigned kLaneKeys = ((1u << kKeyTiles % 32) - 1) * 0x101u;
static_assert(!kGeneral || kKeyTiles <= 8, "a set of keys has 16 bits");

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

__device__ __forceinline__ float cap(float x) {
  return sizeof(element) == 2 ? tanh_approx(x) : tanhf(x);
}
__device__ __forceinline__ double cap(double x) { return tanh(x); }

// The smaller of two neighbours each, numbers before NaN.
__device__ __forceinline__ Pair<float> lower(Pair<float> a, Pair<float> b) {
  return {{fminf(a.x[0], b.x[0]), fminf(a.x[1], b.x[1])}};
}
__device__ __forceinline__ Pair<double> lower(Pair<double> a, Pair<double> b) {
  return {{fmin(a.x[0], b.x[0]), fmin(a.x[1], b.x[1])}};
}
#if CUPYFLASH_HEADER == CUPYFLASH_HEADER_float16 || CUPYFLASH_HEADER == CUPYFLASH_HEADER_bfloat16
__device__ __forceinline__ Pair<element> lower(Pair<element> a, Pair<element> b) {
  const element2 least =
      __hmin2(reinterpret_cast<const element2&>(a), reinterpret_cast<const element2&>(b));
  return reinterpret_cast<const Pair<element>&>(least);
}
#endif

// Each byte that is not 0 becomes 1: numpy makes no others, but a view may have any.
__device__ __forceinline__ unsigned ones(unsigned bytes) {
#pragma unroll
  for (int bits = 4; bits > 0; bits /= 2) bytes |= bytes >> bits;
  return bytes & 0x0101u;
}

// Softcap, bias, ALiBi and mask of one (batch entry, group of heads), for the rows of this warp.
//
// Bias and mask of a tile are loaded one tile ahead, each into a buffer of its own, which is free
// again as soon as it was read: the bias after the product Q K^T of its tile, the mask before that
// of the tile before, since a tile that the mask hides from the whole block is not loaded at all.
// What the mask shows of a tile is kept until its scores are there as a set of keys for each row.
class ScoreChanges {
 public:
  // A set for each row of the lane: those of rows 16 m + g in the lower halves, of 16 m + 8 + g in
  // the upper ones.
  using Sets = unsigned[kFragments];

  // What is the same for all threads of a block, in shared memory: registers have no room for it.
  struct Shared {
    QueryRows rows;
    TileBand band;
    KeyBounds keys;
    const element* K;  // of this head; V from the slice's first column on
    const element* V;
    int dv;  // columns of V that there are
    int64 mask_at;
    int64 bias_at;
    int64 slopes_at;
    acc scale;  // conversions from double, and its quotient, would hold up every step
    acc softcap;
    acc softcap_inverse;

    __device__ __forceinline__ void set(const Problem& problem, const HeadIndex& head) {
      mask_at = head.offset(problem.mask, head.head_q) + rows.i0 * problem.mask.row;
      bias_at = head.offset(problem.bias, head.head_q) + rows.i0 * problem.bias.row;
      slopes_at = head.offset(problem.alibi_slopes, head.head_q);
      scale = static_cast<acc>(problem.softmax_scale);
      softcap = static_cast<acc>(problem.softcap);
      softcap_inverse = problem.softcap == 0 ? acc(0) : static_cast<acc>(1 / problem.softcap);
    }
  };

  // memory: behind the tiles, as laid out in _sm80.py.
  __device__ ScoreChanges(const Problem& problem, const Shared& shared, bool bias_vectors,
                          bool mask_vectors, unsigned char* memory)
      : problem_(problem),
        shared_(shared),
        bias_vectors_(bias_vectors),
        mask_vectors_(mask_vectors),
        memory_(memory) {}

  // Whether scores leave apply() in nats, or as products still to be scaled.
  __device__ __forceinline__ bool in_nats() const {
    return problem_.softcap != 0 || problem_.bias.data || problem_.alibi_slopes.data;
  }

  // Starts to load the mask of tile j.
  __device__ __forceinline__ void load_mask(int j) const {
    if (!problem_.mask.data) return;
    const TensorView& view = problem_.mask;
    start(static_cast<const uint8*>(view.data) + shared_.mask_at, view, mask_tile(), j,
          mask_vectors_);
  }
  // Starts to load the bias of tile j; all lanes have read what is there.
  __device__ __forceinline__ void load_bias(int j) const {
    if (!problem_.bias.data) return;
    const TensorView& view = problem_.bias;
    __syncwarp();
    with_bias([&](const auto* bias) {
      start(bias + shared_.bias_at, view, bias_tile(), j, bias_vectors_);
    });
  }

  // A barrier of the block, and the first tile from j on (the end: there is none) that the mask
  // shows some row of the block something of. The mask of tile j has landed; that of the tile
  // behind the one returned is on its way. Without a mask, j.
  __device__ __forceinline__ int next(int j, int parity) const {
    if (!problem_.mask.data) {
      __syncthreads();
      return j;
    }
#pragma unroll 1
    for (;; ++j) {
      if (j >= shared_.keys.end) {
        __syncthreads();
        return j;
      }
      unsigned some = 0;
      __syncwarp();  // each lane waited for its own copies
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        const unsigned set = shown(m);
        shown_sets(parity)[m * kThreads] = set;
        some |= set;
      }
      __syncwarp();
      if (j + 1 < shared_.keys.end) load_mask(j + 1);
      if (__syncthreads_or(some != 0)) return j;
      cp_async_commit();
      cp_async_wait<0>();
    }
  }

  // Turns products of the tile that begins with key j0 into scores, hidden ones into -inf. The
  // result: the lane's keys that some row of the warp sees.
  __device__ __forceinline__ unsigned apply(acc (&S)[kFragments][kKeyTiles][4], int j0,
                                            int parity) const {
    Sets seen;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      seen[m] = problem_.mask.data ? shown_sets(parity)[m * kThreads] : kLaneKeys * 0x10001u;
    }
    const bool has_bias = problem_.bias.data;
    const acc softcap = shared_.softcap;
    if (softcap != acc(0)) {
      const acc inverse = shared_.softcap_inverse;
      const acc factor = shared_.scale;
      // One by one: what they make together may lie out of range.
      each(S, [&](acc s) { return softcap * cap(s * factor * inverse); });
    }
    if (has_bias) with_bias([&](const auto* bias) { add_bias(S, seen, bias); });
    if (problem_.alibi_slopes.data) add_alibi(S, j0);
    if (!shared_.keys.plain(j0) || shared_.rows.rows < kBr) clear_unseen(seen, j0);

    unsigned whole = ~0u;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) whole &= seen[m];
    if (__all_sync(kFullWarp, whole == kLaneKeys * 0x10001u)) return kLaneKeys;
    unsigned some = 0;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const bool sees = seen[m] & 1u << (key_bit(n, x % 2) + x / 2 * 16);
          S[m][n][x] = sees ? S[m][n][x] : kMinusInfinity;
        }
      }
      some |= seen[m] | seen[m] >> 16;
    }
#pragma unroll
    for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
      some |= __shfl_xor_sync(kFullWarp, some, lanes);
    }
    return some & kLaneKeys;
  }

 private:
  static __device__ __forceinline__ int first_row() { return threadIdx.x / kWarpSize * kWarpRows; }
  static __device__ __forceinline__ int quad() { return pin(threadIdx.x % kWarpSize / 4); }

  template <class Change>
  static __device__ __forceinline__ void each(acc (&S)[kFragments][kKeyTiles][4],
                                              const Change& change) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) S[m][n][x] = change(S[m][n][x]);
      }
    }
  }

  // f(the bias array), of its type.
  template <class F>
  __device__ __forceinline__ void with_bias(const F& f) const {
    if (!is_same<element, float>::value && problem_.bias_is_float) {
      f(static_cast<const float*>(problem_.bias.data));
    } else {
      f(static_cast<const element*>(problem_.bias.data));
    }
  }
  __device__ __forceinline__ int bias_bytes() const {
    return problem_.bias_is_float ? ScoreTile<float>::kBytes : ScoreTile<element>::kBytes;
  }

  // What a lane reads of a tile of the bias or the mask; g: lane / 4. In a tile of one row, that.
  template <class T>
  struct Rows {
    const unsigned char* tile;
    int first;
    int step;

    __device__ __forceinline__ Rows(const unsigned char* tile_, const TensorView& view, int g)
        : tile(tile_),
          first(ScoreTile<T>::lane_first(view.row == 0 ? 0 : g)),
          step(view.row == 0 ? 0 : 8 * ScoreTile<T>::kRowBytes) {}
    __device__ __forceinline__ Pair<T> read(int m, int h, int n) const {
      return ScoreTile<T>::read(tile + (2 * m + h) * step, first, n);
    }
  };

  // Of this warp: bias tiles of all warps, mask tiles of all warps, sets of two tiles.
  __device__ __forceinline__ unsigned char* bias_tile() const {
    return memory_ + threadIdx.x / kWarpSize * bias_bytes();
  }
  __device__ __forceinline__ unsigned char* mask_tile() const {
    unsigned char* const masks = memory_ + (problem_.bias.data ? kWarps * bias_bytes() : 0);
    return masks + threadIdx.x / kWarpSize * ScoreTile<uint8>::kBytes;
  }
  __device__ __forceinline__ unsigned* shown_sets(int parity) const {
    unsigned char* const masks = memory_ + (problem_.bias.data ? kWarps * bias_bytes() : 0);
    unsigned* const sets = reinterpret_cast<unsigned*>(masks + kWarps * ScoreTile<uint8>::kBytes);
    return sets + parity * kFragments * kThreads + threadIdx.x;
  }

  template <class T>
  __device__ __forceinline__ void start(const T* from, const TensorView& view, unsigned char* tile,
                                        int j, bool vectors) const {
    from += first_row() * view.row + static_cast<int64>(j) * kBc * view.col;
    const int rows = shared_.rows.rows - first_row();
    const int keys = static_cast<int>(problem_.seqlen_k) - j * kBc;
    ScoreTile<T>::start(tile, from, view.row, view.col, rows, keys, vectors);
  }

  // What the mask shows of the tile that has landed. As 0 or 1, two neighbours are put where their
  // bits belong by one shift.
  __device__ __forceinline__ unsigned shown(int m) const {
    const Rows<uint8> rows(mask_tile(), problem_.mask, quad());
    unsigned set = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const Pair<uint8> x = rows.read(m, h, n);
        set += ones(__builtin_bit_cast(unsigned short, x)) << (n + 16 * h);
      }
    }
    return set;
  }

  // Adds the bias to the scores, which it scales if that was not done, and takes from `seen` what a
  // bias of -inf hides: a score of NaN or +inf must not bring that back.
  template <class T>
  __device__ __forceinline__ void add_bias(acc (&S)[kFragments][kKeyTiles][4], Sets& seen,
                                           const T*) const {
    const Rows<T> rows(bias_tile(), problem_.bias, quad());
    const acc factor = shared_.softcap != acc(0) ? acc(1) : shared_.scale;
    Pair<T> least = rows.read(0, 0, 0);
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const Pair<T> b = rows.read(m, h, n);
          least = lower(least, b);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            acc& s = S[m][n][2 * h + e];
            s = fused(s, factor, static_cast<acc>(to_acc(b.x[e])));
          }
        }
      }
    }
    const auto hides = [](T b) { return static_cast<acc>(to_acc(b)) == kMinusInfinity; };
    if (!__any_sync(kFullWarp, hides(least.x[0]) || hides(least.x[1]))) return;
#pragma unroll 1
    for (int x = 0; x < kFragments * 2 * kKeyTiles; ++x) {
      const int n = x % kKeyTiles;
      const int h = x / kKeyTiles % 2;
      const int m = x / (2 * kKeyTiles);
      const Pair<T> b = rows.read(m, h, n);
      const unsigned hidden = ((hides(b.x[0]) ? 1u : 0u) | (hides(b.x[1]) ? 0x100u : 0u))
                              << (n + 16 * h);
#pragma unroll
      for (int to = 0; to < kFragments; ++to) seen[to] &= to == m ? ~hidden : ~0u;
    }
  }

  // As add_bias().
  __device__ __forceinline__ void add_alibi(acc (&S)[kFragments][kKeyTiles][4], int j0) const {
    const QueryRows at = shared_.rows;
    const TensorView& view = problem_.alibi_slopes;
    const bool scaled = shared_.softcap != acc(0) || problem_.bias.data;
    const acc factor = scaled ? acc(1) : shared_.scale;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane_row(m, h);
        const acc slope =
            static_cast<const acc*>(view.data)[shared_.slopes_at + at.head(r) * view.head];
        // From the lane's first key to the key on the row's diagonal.
        const acc diagonal =
            static_cast<acc>(at.i0 + at.query(r) + shared_.band.offset - j0 - lane_key(0));
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const acc distance = diagonal - acc(8 * n + e);
            acc& s = S[m][n][2 * h + e];
            s = fused(s, factor, -slope * fabs(distance));
          }
        }
      }
    }
  }

  // Takes from `seen` what rows don't see by position, and all of rows that are not there.
  __device__ __forceinline__ void clear_unseen(Sets& seen, int j0) const {
    QueryRows here = shared_.rows;
    here.pack = pin(here.pack);  // few tiles come here
    const TileBand band = shared_.band;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      unsigned set = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane_row(m, h);
        const int i = here.i0 + here.query(r);
        const int first = band.first(i) - j0 - lane_key(0);
        const int end = band.end(i) - j0 - lane_key(0);
        const unsigned keys = r < here.rows ? keys_below(end) & ~keys_below(first) : 0u;
        set |= keys << 16 * h;
      }
      seen[m] &= set;
    }
  }

  // The lane's keys 8 n + e < end, from its first one on.
  static __device__ __forceinline__ unsigned keys_below(int end) {
    const auto count = [](int x) { return x <= 0 ? 0 : x > 64 ? 8 : (x + 7) / 8; };
    return (1u << count(end)) - 1 + ((1u << count(end - 1)) - 1) * 0x100u;
  }

  const Problem& problem_;
  const Shared& shared_;
  bool bias_vectors_;
  bool mask_vectors_;
  unsigned char* memory_;
};

}  // namespace cupyflash
