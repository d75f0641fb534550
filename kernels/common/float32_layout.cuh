// SPDX-License-Identifier: MIT
// float32_layout.cuh: forward_sm90_float32's parameters, its tiles in shared memory, and what the
// threads of a block know of its work.
#pragma once

#include "common/bf16_parts.cuh"
#include "common/divided_work.cuh"
#include "common/own_scores.cuh"
#include "common/params.cuh"
#include "common/swizzled_tile.cuh"
#include "common/tile_scores.cuh"
#include "common/turn.cuh"
#include "ptx/mbarrier.cuh"

namespace cupyflash {

struct Sm90Float32Params {
  Problem problem;
  acc* O;            // (splits, batch, heads_q, seqlen_q, dv) partial results; null if splits is 1
  acc* lse;          // (splits, batch, heads_q, seqlen_q)
  int64 first_head;  // of this launch, among all heads of the batch
  int64 heads;       // of this launch
  int64 bunch;       // heads that are walked together
  int64 splits;      // parts of the keys
  int64 slices;      // of dv
  int64 q_vectors;   // 1: rows of Q may be read 16 bytes at a time; likewise below
  int64 k_vectors;
  int64 v_vectors;
  int64 o_vectors;
  int64 bias_vectors;
  int64 mask_vectors;
};

constexpr int kWarpgroup = 128;
constexpr int kConsumerRows = 64;  // the rows of one wgmma
constexpr int kConsumers = kBr / kConsumerRows;
constexpr int kProducerRegisters = 120;  // the 168 that a thread starts with, shared out anew
constexpr int kConsumerRegisters = 192;
static_assert(kConsumers == 2 && kFragments == 1, "a warp owns 16 rows");

using QTile = SwizzledTile<kConsumerRows, kHeadDim>;
using KTile = SwizzledTile<kBc, kHeadDim>;
using VTile = SwizzledTile<kBc, kHeadDimV>;
using QParts = PartTiles<QTile>;
using KParts = PartTiles<KTile>;
using VParts = PartTiles<VTile>;

// What the threads of a block know of its work. In shared memory: there are no registers for it.
struct WorkOfBlock {
  Work work;
  HeadIndex at;
  TileBand band;
  QueryRows rows;
  KeyBounds keys;
  OwnScores scores;
  int dv0;  // first column of V, and how many there are
  int dv;
  const float* K;  // of the head; V from its first column on
  const float* V;

  __device__ explicit WorkOfBlock(const Sm90Float32Params& params)
      : work(params, 1, blockIdx.x),
        at(params.problem, static_cast<unsigned>(work.head)),
        band(Band(params.problem, at.seqlen_k(params.problem))),
        rows(params.problem, 1, work.tile),
        keys(rows, band, work.split, static_cast<int>(params.splits)),
        scores(params.problem, at, rows, rows.i0 + band.offset, params.bias_vectors,
               params.mask_vectors),
        dv0(work.slice * kHeadDimV),
        dv(within(params.problem.head_dim_v - dv0, kHeadDimV)),
        K(static_cast<const float*>(params.problem.k.data) +
          at.offset(params.problem.k, at.head_k)),
        V(static_cast<const float*>(params.problem.v.data) +
          at.offset(params.problem.v, at.head_k) + dv0 * params.problem.v.col) {}
};

// Keys that the rows of one consumer see by position. Rows that are not there see what the last one
// does.
struct ConsumerKeys {
  int some_begin;  // some row sees them
  int some_end;
  int all_begin;  // every row does
  int all_end;

  __device__ ConsumerKeys(const QueryRows& rows, const TileBand& band, int c)
      : ConsumerKeys(band, rows.i0 + min(c * kConsumerRows, rows.rows - 1),
                     rows.i0 + min((c + 1) * kConsumerRows, rows.rows) - 1) {}

  // Of the tile that begins with key j0.
  __device__ __forceinline__ bool some(int j0) const {
    return j0 < some_end && j0 + kBc > some_begin;
  }
  __device__ __forceinline__ bool all(int j0) const {
    return j0 >= all_begin && j0 + kBc <= all_end;
  }

 private:
  __device__ ConsumerKeys(const TileBand& band, int first, int last)
      : some_begin(band.first(first)),
        some_end(band.end(last)),
        all_begin(band.first(last)),
        all_end(band.end(first)) {}
};

// A flag of another tile of the stage is no flag: a lane that is late may read the next one's.
struct Shared {
  alignas(1024) unsigned char Q[kConsumers][QParts::kBytes];
  alignas(1024) unsigned char K[kStages][KParts::kBytes];
  alignas(1024) unsigned char V[kStages][VParts::kBytes];
  Mbarrier K_full[kStages], K_empty[kStages];
  Mbarrier V_full[kStages], V_empty[kStages];
  WorkOfBlock block;
  ConsumerKeys keys[kConsumers];
  // Of what has NaN or Inf: 1 for Q, 1 + j for tile j.
  int Q_special[kConsumers], K_special[kStages], V_special[kStages];
};
static_assert(sizeof(Shared) <=
                  kConsumers * QParts::kBytes + kStages * (KParts::kBytes + VParts::kBytes) + 1024,
              "more than _sm90_float32.py asks for");

}  // namespace cupyflash
