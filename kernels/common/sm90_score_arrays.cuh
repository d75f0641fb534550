// SPDX-License-Identifier: MIT
// sm90_score_arrays.cuh: forward_sm90's bias or mask, tile by tile in shared memory.
//
// Consumer c has kScoreStages tiles of its own, of its 64 queries x Bc keys, swizzled as TMA lays
// them down. Where one row is for all queries (params.score_rows = 1) only that row is loaded.
//   warp 3      loads them. scores_full: its arrival and TMA's bytes.
//   consumer c  turns its tile of mask into bits while the product runs, and adds its tile of bias
//               to the scores; that is kept until no row needs its scores once more. scores_empty:
//               its warps have done so, and warp 2 (careful works), or warp 3 in its place.
//
// What a bias or mask hides has weight 0, but 0 * NaN is NaN, in V and, where the sum with a bias
// of -inf hides, in scores. Looking for NaN in every tile would cost up to a step of its own. So
// works are done without care first; a consumer whose O is not finite says so, and warp 0 takes the
// work once more, as a careful one: warp 2 clears the rows of V that no query of the block sees,
// and consumers select -inf. All other outputs have the same bits either way.
#pragma once

#include "common/fragment_softmax.cuh"
#include "common/sm90_layout.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

constexpr bool kHasBias = kScoreArray == ScoreArray::bias;
constexpr bool kHasMask = kScoreArray == ScoreArray::mask;
// A word of a row holds so many keys, and hides those that are equal to this pattern.
constexpr int kWordKeys = kHasMask ? 4 : 2;
constexpr unsigned kHiddenPattern = kHasMask ? 0 : kElementIsBfloat16 ? 0xff80ff80u : 0xfc00fc00u;

struct alignas(16) Unit {
  unsigned x[4];
};

// Two 16-bit elements as numbers.
__device__ __forceinline__ float lower_half(unsigned pair) {
  return to_acc(__builtin_bit_cast(element, static_cast<unsigned short>(pair)));
}
__device__ __forceinline__ float upper_half(unsigned pair) {
  if constexpr (kElementIsBfloat16) return __builtin_bit_cast(float, pair & 0xffff0000u);
  return to_acc(__builtin_bit_cast(element, static_cast<unsigned short>(pair >> 16)));
}

// ---- warp 0, one thread -------------------------------------------------------------------------

// Whether one row of bias or mask hides its entries [begin, end), begin being the first of a unit.
__device__ __forceinline__ bool hides(const unsigned char* row, int begin, int end) {
  constexpr int kEntryBytes = 4 / kWordKeys;
  int at = begin * kEntryBytes;
  unsigned seen = 0;
#pragma unroll 2
  for (; at + 16 <= end * kEntryBytes; at += 16) {
    const Unit unit = *reinterpret_cast<const Unit*>(row + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) seen |= unit.x[i] ^ kHiddenPattern;
  }
#pragma unroll 1
  for (; at < end * kEntryBytes; ++at) {
    seen |= row[at] ^ (kHiddenPattern >> at % kEntryBytes * 8 & 0xff);
  }
  return seen == 0;
}

// Where one row of bias or mask is for all queries: leaves out the first and the last tiles of a
// work if it hides all of them, as it does the padding of a sequence.
__device__ __forceinline__ void leave_out_hidden_tiles(Work& work, const Sm90Params& params) {
  if (params.score_rows != 1) return;
  const Problem& problem = params.problem;
  const TensorView& view = kHasBias ? problem.bias : problem.mask;
  const HeadIndex at(problem, walked_head(problem, work.position.head));
  const unsigned char* const row =
      static_cast<const unsigned char*>(view.data) + at.offset(view, at.head_q) * 4 / kWordKeys;
  for (bool last = true; work.begin < work.end;) {
    const int begin = (last ? work.end - 1 : work.begin) * kBc;
    const int end = begin + kBc < work.seqlen_k ? begin + kBc : work.seqlen_k;
    if (hides(row, begin, end)) {
      last ? --work.end : ++work.begin;
    } else if (last) {
      last = false;
    } else {
      break;
    }
  }
#pragma unroll 1
  for (int c = 0; c < kConsumers; ++c) {
    work.end_of[c] = max(work.begin, min(work.end_of[c], work.end));
    work.unmasked_begin[c] = max(work.begin, work.unmasked_begin[c]);
  }
}

// Takes works as take_works does, and those once more whose output is not finite.
__device__ __forceinline__ void take_works_with_care(const Sm90Params& params, Shared& shared) {
  Works works(params.schedule);
  for (unsigned n = 0;; ++n) {
    // A work ends when the next one is described. An empty one lets the last one end.
    const bool all_ended = shared.work[Turn<kWorkStages>(n - 1).stage].rows == 0;
    // Which has to be done again: the one whose place is free; at last, any of those before.
    const bool more = works.valid();
    const unsigned places = more || !all_ended ? 1 : kWorkStages;
    const Turn<kWorkStages> turn(n);
    Work& work = shared.work[turn.stage];
    bool redo = false;
#pragma unroll 1
    for (unsigned ahead = 0; ahead < places && !redo; ++ahead) {
      const Turn<kWorkStages> last(n + ahead);
      mbarrier_wait(shared.work_empty[last.stage], last.parity ^ 1);
      Work& before = shared.work[last.stage];
      redo = before.redo;
      before.redo = 0;
      if (redo) work.position = before.position;
    }
    if (!redo && more) {
      work.position = works.position();
      works.next();
    }
    work.careful = redo;
    if (redo || more) {
      describe(work, params.problem, work.position);
      leave_out_hidden_tiles(work, params);
    } else {
      describe_empty(work, all_ended ? kFarKey : 0);
      work.rows = 0;
    }
    const Work& before = shared.work[Turn<kWorkStages>(pin(n) - 1).stage];
    work.fresh = n == 0 || before.begin == before.end;
    mbarrier_arrive(shared.work_full[turn.stage]);
    if (work.begin > work.end) return;
    mbarrier_wait(shared.work_wanted, n % 2);
  }
}

// ---- warp 3, one thread -------------------------------------------------------------------------

// Loads the tiles in the order in which the consumers need them.
__device__ __forceinline__ void load_scores(const Sm90Params& params, Shared& shared) {
  constexpr int kSlabEntries = ScoreTile::kRowBytes / (kHasMask ? 1 : 2);
  const int rows = static_cast<int>(params.score_rows);
  const unsigned bytes = rows * ScoreTile::kSlabs * ScoreTile::kRowBytes;
  unsigned tiles = 0;
  for (unsigned n = 0;; ++n) {
    const Turn<kWorkStages> work_turn(n);
    mbarrier_wait(shared.work_full[work_turn.stage], work_turn.parity);
    const Work& work = shared.work[work_turn.stage];
    if (work.begin > work.end) return;
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      const Turn<kScoreStages> turn(tiles++);
#pragma unroll 1
      for (int c = 0; c < kConsumers; ++c) {
        Mbarrier& full = shared.scores_full[turn.stage][c];
        mbarrier_wait(shared.scores_empty[turn.stage][c], turn.parity ^ 1);
        mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
        for (int slab = 0; slab < ScoreTile::kSlabs; ++slab) {
          const int from[5] = {j * kBc + slab * kSlabEntries, work.i0 + c * kConsumerRows,
                               work.head_q, work.kv.batch2, work.kv.batch1};
          tma_load_5d(shared.score_tile(turn.stage, c) + slab * ScoreTile::kSlabBytes,
                      params.scores, full, from);
        }
        // In place of warp 2, which does not look at the tile.
        if (!work.careful) mbarrier_arrive(shared.scores_empty[turn.stage][c]);
      }
    }
    mbarrier_arrive(shared.work_empty[work_turn.stage]);
  }
}

// ---- warp 2 -------------------------------------------------------------------------------------

// A tile of bias or mask is there, of all consumers.
__device__ __forceinline__ void wait_for_scores(Shared& shared, const Turn<kScoreStages>& turn) {
#pragma unroll 1
  for (int c = 0; c < kConsumers; ++c) {
    mbarrier_wait(shared.scores_full[turn.stage][c], turn.parity);
  }
}

// This warp has done with it. It must have been there: else the arrival would count for the one
// before.
__device__ __forceinline__ void give_scores_back(Shared& shared, const Turn<kScoreStages>& turn) {
  __syncwarp();
  if (threadIdx.x % kWarpSize != 0) return;
#pragma unroll 1
  for (int c = 0; c < kConsumers; ++c) {
    mbarrier_wait(shared.scores_full[turn.stage][c], turn.parity);
    mbarrier_arrive(shared.scores_empty[turn.stage][c]);
  }
}

// Rows of a tile of V that bias or mask hide from all queries of the block become zeros.
__device__ __forceinline__ void clear_hidden_rows(unsigned char* V, Shared& shared,
                                                  const Turn<kScoreStages>& turn, int queries,
                                                  int score_rows) {
  const int lane = pin(threadIdx.x % kWarpSize);  // seldom needed: nothing of it is kept
  wait_for_scores(shared, turn);
#pragma unroll 1
  for (int key = 0; key < kBc;) {
    // Of the keys of one word; what is not 0 is of a key that some query sees.
    unsigned seen = 0;
#pragma unroll 1
    for (int r = lane; r < queries; r += kWarpSize) {
      const int row = r % kConsumerRows;
      if (row >= score_rows) continue;
      const unsigned char* const tile = shared.score_tile(turn.stage, r / kConsumerRows);
      const unsigned char* const unit = tile + ScoreTile::byte_of(row, key / (4 * kWordKeys));
      seen |= reinterpret_cast<const unsigned*>(unit)[key / kWordKeys % 4] ^ kHiddenPattern;
    }
    seen = __reduce_or_sync(kFullWarp, seen);
#pragma unroll 1
    for (int end = key + kWordKeys; key < end; ++key, seen >>= 32 / kWordKeys) {
      if (seen & (1u << 32 / kWordKeys) - 1u) continue;
#pragma unroll 1
      for (int x = lane; x < VTile::kBytes / kBc / 16; x += kWarpSize) {
        *reinterpret_cast<Unit*>(V + VTile::byte_of(key, x)) = Unit{};
      }
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// Hands `change` the pairs of scores S[x], S[x + 1] of a consumer's warp with their biases, which
// lie in one register.
template <int n, class Change>
__device__ __forceinline__ void with_bias(float (&S)[n], const unsigned char* tile, bool one_row,
                                          const Change& change) {
  // A lane hands in row lane % 16 of its warp's, and the first or second 8 of 16 keys.
  const int thread = pin(threadIdx.x % kWarpgroup);  // recomputed: registers are short
  const int lane = thread % kWarpSize;
  const int row = one_row ? 0 : thread / kWarpSize * 16 + lane % 16;
  const unsigned first = shared_address(tile) + ScoreTile::byte_of(row, lane / 16);
#pragma unroll
  for (int k = 0; k < n / 8; ++k) {
    constexpr int kUnits = ScoreTile::kRowBytes / 16;
    unsigned bias[4];
    ldmatrix_x4(bias, (first ^ 2 * k % kUnits * 16) + 2 * k / kUnits * ScoreTile::kSlabBytes);
#pragma unroll
    for (int x = 0; x < 4; ++x) change(S[8 * k + 2 * x], S[8 * k + 2 * x + 1], bias[x]);
  }
}

// S = unit S + bias.
template <int n>
__device__ __forceinline__ void add_bias(float (&S)[n], const unsigned char* tile, bool one_row,
                                         float unit) {
  with_bias(S, tile, one_row, [&](float& lower, float& upper, unsigned bias) {
    lower = fmaf(lower, unit, lower_half(bias));
    upper = fmaf(upper, unit, upper_half(bias));
  });
}

// Scores whose bias is -inf become -inf, whatever they are.
template <int n>
__device__ __forceinline__ void hide_by_bias(float (&S)[n], const unsigned char* tile,
                                             bool one_row) {
  with_bias(S, tile, one_row, [](float& lower, float& upper, unsigned bias) {
    if ((bias ^ kHiddenPattern) << 16 == 0) lower = kMinusInfinity;
    if ((bias ^ kHiddenPattern) >> 16 == 0) upper = kMinusInfinity;
  });
}

// What the mask says of the keys of two rows that a thread holds scores of, from its own first
// column on: bit 8 (2 h + e) + g is that of key 16 g + 8 h + e.
struct SeenKeys {
  unsigned rows[kFragmentRows];

  // Whether all of n scores are seen.
  template <int n>
  __device__ __forceinline__ bool all() const {
    constexpr unsigned kAll = ((1u << n / 8) - 1u) * 0x01010101u;
    return rows[0] == kAll && rows[1] == kAll;
  }
  __device__ __forceinline__ bool has(int r, int j, int e) const {
    return rows[r] >> (j % 2 * 16 + e * 8 + j / 2) & 1u;
  }
};

// Each byte that is not 0 becomes 1.
__device__ __forceinline__ unsigned ones(unsigned bytes) {
#pragma unroll
  for (int bits = 4; bits > 0; bits /= 2) bytes |= bytes >> bits;
  return bytes & 0x01010101u;
}

// Of a tile of Bc = 2 n keys.
template <int n>
__device__ __forceinline__ SeenKeys read_mask(const unsigned char* tile, bool one_row) {
  static_assert(n % 16 == 0 && n <= 64, "32 keys are read at once, and a row's bits are one word");
  // The matrices of ldmatrix are 8 rows of 16 keys here, of which lane q of a quad gets 4 q to
  // 4 q + 3. Its bytes take the bits of each 16 keys.
  const int thread = pin(threadIdx.x % kWarpgroup);  // recomputed: registers are short
  const int lane = thread % kWarpSize;
  const int row = one_row ? 0 : thread / kWarpSize * 16 + lane % 16;
  const unsigned first = shared_address(tile) + ScoreTile::byte_of(row, lane / 16);
  const auto read = [&](unsigned (&bytes)[4], int k) {
    constexpr int kUnits = ScoreTile::kRowBytes / 16;
    ldmatrix_x4(bytes, (first ^ 2 * k % kUnits * 16) + 2 * k / kUnits * ScoreTile::kSlabBytes);
  };
  unsigned keys[kFragmentRows] = {0, 0};
  unsigned all = 0;
#pragma unroll
  for (int k = 0; k < n / 16; ++k) {
    unsigned bytes[4];
    read(bytes, k);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      keys[x % 2] += bytes[x] << 2 * k + x / 2;
      all |= bytes[x];
    }
  }
  // numpy makes bytes of 0 and 1, but a view of others' may have any.
  if (__any_sync(kFullWarp, (all & 0xfefefefeu) != 0)) {
    keys[0] = keys[1] = 0;
#pragma unroll 1
    for (int k = 0; k < n / 16; ++k) {
      unsigned bytes[4];
      read(bytes, k);
#pragma unroll
      for (int x = 0; x < 4; ++x) keys[x % 2] += ones(bytes[x]) << 2 * k + x / 2;
    }
  }
  // A thread's scores are of keys 2 q, 2 q + 1, 8 + 2 q and 8 + 2 q + 1.
  SeenKeys seen;
  const int q = lane % 4;
#pragma unroll
  for (int r = 0; r < kFragmentRows; ++r) {
    const unsigned lower = __shfl_sync(kFullWarp, keys[r], lane - q + q / 2);
    const unsigned upper = __shfl_sync(kFullWarp, keys[r], lane - q + q / 2 + 2);
    seen.rows[r] = __byte_perm(lower, upper, q % 2 ? 0x7632 : 0x5410);
  }
  return seen;
}

// Scores that the mask hides become -inf.
template <int n>
__device__ __forceinline__ void hide_by_mask(float (&S)[n], const SeenKeys& seen) {
  if (__all_sync(kFullWarp, seen.all<n>())) return;
#pragma unroll
  for (int x = 0; x < n; ++x) {
    if (!seen.has(x / 2 % 2, x / 4, x % 2)) S[x] = kMinusInfinity;
  }
}

// The same of a thread's four scores of the j-th 8 keys.
__device__ __forceinline__ void take_mask(float (&S)[4], const SeenKeys& seen, int j) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    if (!seen.has(x / 2, j, x % 2)) S[x] = kMinusInfinity;
  }
}

// And what add_bias and hide_by_bias do.
__device__ __forceinline__ void take_bias(float (&S)[4], const unsigned char* tile, bool one_row,
                                          int j, float unit) {
  const int thread = pin(threadIdx.x % kWarpgroup);
  const int lane = thread % kWarpSize;
#pragma unroll
  for (int r = 0; r < kFragmentRows; ++r) {
    const int row = one_row ? 0 : thread / kWarpSize * 16 + lane / 4 + 8 * r;
    const unsigned bias =
        reinterpret_cast<const unsigned*>(tile + ScoreTile::byte_of(row, j))[lane % 4];
    S[2 * r] = fmaf(S[2 * r], unit, lower_half(bias));
    S[2 * r + 1] = fmaf(S[2 * r + 1], unit, upper_half(bias));
    if ((bias ^ kHiddenPattern) << 16 == 0) S[2 * r] = kMinusInfinity;
    if ((bias ^ kHiddenPattern) >> 16 == 0) S[2 * r + 1] = kMinusInfinity;
  }
}

}  // namespace cupyflash
