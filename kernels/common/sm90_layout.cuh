// SPDX-License-Identifier: MIT
// sm90_layout.cuh: forward_sm90's parameters, its tiles in shared memory, and what its warps tell
// each other of a work.
#pragma once

#include "common/config.cuh"
#include "common/params.cuh"
#include "common/swizzled_tile.cuh"
#include "common/tile_range.cuh"
#include "common/tile_scheduler.cuh"
#include "common/turn.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cupyflash {

struct Sm90Params {
  TensorMap Q;  // boxes of 64 rows x one slab
  TensorMap K;  // of Bc rows x one slab
  TensorMap V;
  TensorMap scores;  // bias or mask, of 64 rows, or the one for all, x one slab; else unused
  Problem problem;
  Schedule schedule;
  int64 o_vectors;   // 1: rows of o are 16-byte aligned, and its columns contiguous
  int64 score_rows;  // of a box of scores: 64, or 1 where one row is for all queries
};

constexpr int kWarpgroup = 128;
constexpr int kConsumerRows = 64;  // the rows of one wgmma
constexpr int kConsumers = kBr / kConsumerRows;
constexpr int kConsumerWarps = kConsumers * (kWarpgroup / kWarpSize);
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
static_assert(kBr % kConsumerRows == 0 && (kConsumers == 2 || kConsumers == 3),
              "registers are shared out for two or three consumers");
static_assert(kBc % 16 == 0 && kBc <= 256, "a tile of keys is the n of one product, the k of one");
// A block starts with 65,536 / kThreads registers a thread, in units of 8: 168 or 128. setmaxnreg
// moves them to those who hold O, S and P.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
// With dv beyond 128 a product takes longer than the softmax beside it, and turns only cost.
constexpr bool kPingPong = kHeadDimV <= 128;
enum NamedBarrier { kFirstTurn = 1 };

constexpr MmaType kMma = kElementIsBfloat16 ? MmaType::kBf16 : MmaType::kF16;
using QTile = SwizzledTile<kConsumerRows, kHeadDim>;
using KTile = SwizzledTile<kBc, kHeadDim>;
using VTile = SwizzledTile<kBc, kHeadDimV>;
// What a consumer needs of a tile of bias or mask. Two bytes of the mask count as one column; whole
// slabs of it are loaded.
constexpr int kScoreColumns = kScoreArray == ScoreArray::mask   ? round_up(kBc, 64) / 2
                              : kScoreArray == ScoreArray::bias ? kBc
                                                                : 64;
using ScoreTile = SwizzledTile<kConsumerRows, kScoreColumns>;

// One for the work whose scores are made, one for that whose O goes out, one for the next.
constexpr int kWorkStages = 4;  // a power of two
static_assert(kStages >= 2, "one tile is in use while the next is on its way");

// Which head of a tensor map; the launcher leaves at most two batch axes, the last two of three.
struct Origin {
  int head;
  int batch2;
  int batch1;
};

// One block of queries of one head, and the keys that it visits.
struct Work {
  int64 o;  // where the head's output and lse begin, in elements
  int64 lse;
  int i0;         // first query
  int rows;       // queries that are there, from i0 on
  int begin;      // tiles of keys, from end - 1 down to begin; begin = end: no query sees any key;
  int end;        // begin > end: there is no work left
  int first_key;  // of query i0 + r: max(first_key + r, 0) <= j < min(end_key + r, seqlen_k)
  int end_key;
  int seqlen_k;  // in use
  int diagonal;  // key on the diagonal of query i0
  float alibi;   // what a key loses by each step away from the diagonal, in units of scores
  int head_q;
  Origin kv;
  // Beside bias or mask, see sm90_score_arrays.cuh:
  float unit;  // of scores, in nats
  Works::Position position;
  int careful;     // 1: what bias or mask hides may hold NaN or Inf
  int redo;        // 1: the output is not finite, and was made without care
  int keys_begin;  // that any query of the head sees
  int keys_end;
  int fresh;               // 1: there is no tile in the works before, or none in the one before
  int end_of[kConsumers];  // as end, of the queries of one consumer
  int unmasked_begin[kConsumers];  // tiles that all queries of a consumer see all of
  int unmasked_end[kConsumers];
};

// Tiles of bias or mask; none where there are no such arrays.
template <ScoreArray array>
struct ScoreTiles {
  alignas(1024) unsigned char scores[kScoreStages][kConsumers][ScoreTile::kBytes];
  __device__ __forceinline__ unsigned char* score_tile(int stage, int c) {
    return scores[stage][c];
  }
};
template <>
struct ScoreTiles<ScoreArray::none> {
  __device__ __forceinline__ unsigned char* score_tile(int, int) { return nullptr; }
};

struct Shared : ScoreTiles<kScoreArray> {
  alignas(1024) unsigned char Q[kQStages][kConsumers][QTile::kBytes];
  alignas(1024) unsigned char K[kStages][KTile::kBytes];
  alignas(1024) unsigned char V[kStages][VTile::kBytes];
  Work work[kWorkStages];
  Mbarrier work_full[kWorkStages], work_empty[kWorkStages], work_wanted;
  Mbarrier Q_full[kQStages][kConsumers], Q_empty[kQStages][kConsumers];
  Mbarrier K_full[kStages], K_empty[kStages];
  Mbarrier V_full[kStages], V_empty[kStages];
  Mbarrier V_landed;
  Mbarrier scores_full[kScoreStages][kConsumers], scores_empty[kScoreStages][kConsumers];
};
static_assert(sizeof(Shared) <= kQStages * kConsumers * QTile::kBytes +
                                    kStages * (KTile::kBytes + VTile::kBytes) +
                                    kHasScoreArray * kScoreStages * kConsumers * ScoreTile::kBytes +
                                    1024,
              "the launcher adds a kilobyte to the tiles");

// Sequences are shorter than this (the launcher's check): a key so far off is past every end.
constexpr int kFarKey = 1 << 30;

__device__ __forceinline__ int near_key(int64 j) {
  return static_cast<int>(j < -kFarKey ? -kFarKey : j > kFarKey ? kFarKey : j);
}

// What scores are counted in where softcap or ALiBi change them: tanh(softmax_scale q k / softcap)
// by a softcap, products without one.
__device__ __forceinline__ double score_unit(const Problem& problem) {
  return kGeneral && problem.softcap != 0 ? problem.softcap : problem.softmax_scale;
}

// Heads are walked as they are numbered, or, where entries of the batch share a bias or mask that
// heads don't, entry by entry for each group of heads: then it is read from HBM once.
__device__ __forceinline__ unsigned walked_head(const Problem& problem, unsigned n) {
  if constexpr (!kHasScoreArray) return n;
  const TensorView& view = kScoreArray == ScoreArray::bias ? problem.bias : problem.mask;
  unsigned entries = 1;
  for (int axis = 0; axis < kBatchAxes; ++axis) {
    entries *= static_cast<unsigned>(problem.batch[axis]);
    if (problem.batch[axis] > 1 && view.batch[axis] != 0) return n;
  }
  if (view.head == 0) return n;
  const unsigned heads_q = static_cast<unsigned>(problem.heads_q);
  const unsigned group = heads_q / static_cast<unsigned>(problem.heads_k);
  const unsigned entry = n / group % entries;
  return entry * heads_q + n / group / entries * group + n % group;
}

// What the other warps have to know of a work.
__device__ __forceinline__ void describe(Work& work, const Problem& problem,
                                         Works::Position position) {
  const HeadIndex at(problem, walked_head(problem, position.head));
  work.o = at.offset(problem.o, at.head_q);
  work.lse = at.offset(problem.lse, at.head_q);
  work.head_q = static_cast<int>(at.head_q);
  work.kv = {static_cast<int>(at.head_k), static_cast<int>(at.batch[2]),
             static_cast<int>(at.batch[1])};
  const Band band(problem, at.seqlen_k(problem));
  const KeyRange keys(problem, band);
  work.seqlen_k = static_cast<int>(band.seqlen_k);
  if (kGeneral) {
    work.diagonal = near_key(position.block * static_cast<int64>(kBr) + band.offset);
    work.unit = static_cast<float>(score_unit(problem));
    work.alibi = 0.0f;
    if (problem.alibi_slopes.data) {
      const float slope = static_cast<const float*>(
          problem.alibi_slopes.data)[at.offset(problem.alibi_slopes, at.head_q)];
      // A slope that would overflow hides all keys but the diagonal's, as the largest one does.
      const float most = 3.0e38f;
      const float steps = __fdividef(slope, static_cast<float>(score_unit(problem)));
      work.alibi = fminf(fmaxf(steps, -most), most);
    }
  }
  work.keys_begin = keys.begin;
  work.keys_end = keys.end;
  const int i0 = position.block * kBr;
  const int i1 = static_cast<int>(i0 + kBr < problem.seqlen_q ? i0 + kBr : problem.seqlen_q);
  const TileRange tiles(band, i0, i1, kBc);
  work.i0 = i0;
  work.rows = i1 - i0;
  work.begin = tiles.begin;
  work.end = tiles.end > tiles.begin ? tiles.end : tiles.begin;
  work.first_key = band.left < 0 ? -kFarKey : near_key(i0 + band.offset - band.left);
  work.end_key = band.right < 0 ? kFarKey : near_key(i0 + band.offset + band.right + 1);
#pragma unroll 1
  for (int c = 0; c < kConsumers; ++c) {
    const int begin = i0 + c * kConsumerRows;
    const int end = begin + kConsumerRows < i1 ? begin + kConsumerRows : i1;
    work.end_of[c] = work.begin;
    if (begin >= i1) continue;  // all of them are past the last query
    const int end_of = TileRange(band, begin, end, kBc).end;
    if (end_of > work.begin) work.end_of[c] = end_of;
    // Queries past the last one are computed like it.
    const UnmaskedRange unmasked(band, begin, end, kBc);
    work.unmasked_begin[c] = unmasked.begin;
    work.unmasked_end[c] = unmasked.end;
  }
}

// A work without keys, or, beginning at kFarKey, word that there is none left; for each consumer
// too.
__device__ __forceinline__ void describe_empty(Work& work, int begin) {
  work.begin = begin;
  work.end = 0;
#pragma unroll 1
  for (int c = 0; c < kConsumers; ++c) work.end_of[c] = 0;
}

}  // namespace cupyflash
