// SPDX-License-Identifier: MIT
// simt_layout.cuh: forward_simt's parameters, its tiles, what lies in SRAM, and who stands where.
#pragma once

#include "common/config.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/tile_range.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

struct SimtParams {
  Problem problem;
  acc* O;            // (splits, batch, heads_q, seqlen_q, dv) partial results; null if splits is 1
  acc* lse;          // (splits, batch, heads_q, seqlen_q)
  int64 first_head;  // of this launch, among all heads of the batch
  int64 heads;       // of this launch
  int64 splits;      // parts of the keys
  int64 slices;      // of dv
  int64 q_vectors;   // 1: rows of Q may be read 16 bytes at a time; likewise below
  int64 k_vectors;
  int64 v_vectors;
  int64 o_vectors;
};

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kVec = Vec16<acc>::kSize;
// 8 rows by 4 (double: 2) columns a lane: each value from SRAM is used often enough for the FMA
// units to be the limit, and O of 512 columns still fits the registers beside the sums.
constexpr int kRows = 8;
constexpr int kRowLanes = kBc / kVec;
constexpr int kLaneRows = kWarpSize / kRowLanes;
constexpr int kWarpRows = kRows * kLaneRows;
constexpr int kGroup = kRowLanes * kVec;  // columns of V or O that a row's lanes have at a time
constexpr int kGroups = kHeadDimV / kGroup;
constexpr int kKeys = kHeadDim;  // of a chunk of V: as much work as a chunk of Q and K
constexpr int kFold = 256;       // of d

static_assert(kRowLanes % kRows == 0 && kRowLanes * kLaneRows == kWarpSize,
              "a warp is made of whole rows");
static_assert(kBr == kWarps * kWarpRows, "a warp owns whole rows of the tile");
static_assert(kHeadDimV == kGroups * kGroup, "columns of O are divided into whole groups");
static_assert(kHeadDim % kVec == 0 && kFold % kHeadDim == 0 && kBc % kKeys == 0, "whole vectors");
static_assert(kStages == 2, "one chunk is written while another is read");

__device__ __forceinline__ int at_most(int64 x, int limit) {
  return x < limit ? static_cast<int>(x) : limit;
}

// What one thread block does. Blocks of queries of one head are neighbours in time, so that K and V
// come from the L2 cache; the last ones first, since with a causal mask they have most keys to
// visit.
struct Work {
  int split;
  int slice;
  int64 head;  // among all
  int i0;      // first query

  __device__ Work(const SimtParams& p, unsigned at) {
    const unsigned tiles = static_cast<unsigned>(ceil_div(p.problem.seqlen_q, int64(kBr)));
    split = at % static_cast<unsigned>(p.splits);
    at /= static_cast<unsigned>(p.splits);
    slice = at % static_cast<unsigned>(p.slices);
    at /= static_cast<unsigned>(p.slices);
    i0 = static_cast<int>(tiles - 1 - at % tiles) * kBr;
    head = p.first_head + at / tiles;
  }

  __device__ int64 dv0() const { return static_cast<int64>(slice) * kHeadDimV; }  // column of V
};

// Where a thread stands. Found out wherever it is asked for: registers are scarce.
struct Lane {
  int warp;
  int row;  // among the kLaneRows that a warp has at a time
  int col;

  __device__ Lane() : Lane(static_cast<unsigned>(pin(threadIdx.x))) {}
  __device__ explicit Lane(unsigned thread)
      : warp(thread / kWarpSize), row(thread % kWarpSize / kRowLanes), col(thread % kRowLanes) {}

  // Row of the tile that is the thread's r-th.
  __device__ __forceinline__ int tile_row(int r) const {
    return warp * kWarpRows + r * kLaneRows + row;
  }
};

// Rows of a chunk are an odd number of 16 bytes apart: lanes that read a column of K_j meet no bank
// twice.
constexpr int kLd = kHeadDim + kVec;
static_assert(kLd / kVec % 2 == 1, "rows of Q and K would share banks");

// The rows and columns of one array that a work reads, in elements.
struct Source {
  int64 offset;  // of the first
  int64 row;
  int64 col;
  int near_row;  // row, where vectors may be read
  bool vectors;  // rows may be read 16 bytes at a time, and row is a 32-bit number

  __device__ Source(const TensorView& view, int64 offset_, bool vectors_)
      : offset(offset_),
        row(view.row),
        col(view.col),
        near_row(static_cast<int>(view.row)),
        vectors(vectors_ && near_row == view.row) {}
};

// What is asked once a step or a tile. It lies in SRAM: in registers it would crowd out the sums.
struct Head {
  Work work;
  Source Q, K, V;
  Band band;
  ScoreModifier modify;
  int rows;                  // queries that there are; a tile may have more
  int dv;                    // columns of V that there are in this slice
  int keys_begin, keys_end;  // that some row of the tile sees by position
  TileRange tiles;           // of keys, that this work visits
  UnmaskedRange unmasked;
  element* o;      // row 0, column 0 of this work; likewise below
  acc* lse;        // null if it is not wanted
  acc* partial_O;  // null if the keys are not split
  acc* partial_lse;

  __device__ Head(const SimtParams& params, const Work& work_)
      : Head(params, work_, HeadIndex(params.problem, work_.head)) {}

  __device__ Head(const SimtParams& params, const Work& work_, const HeadIndex& at)
      : work(work_),
        Q(params.problem.q, at.offset(params.problem.q, at.head_q) + work.i0 * params.problem.q.row,
          params.q_vectors),
        K(params.problem.k, at.offset(params.problem.k, at.head_k), params.k_vectors),
        V(params.problem.v,
          at.offset(params.problem.v, at.head_k) + work.dv0() * params.problem.v.col,
          params.v_vectors),
        band(params.problem, at.seqlen_k(params.problem)),
        modify(params.problem, at),
        rows(at_most(params.problem.seqlen_q - work.i0, kBr)),
        dv(at_most(params.problem.head_dim_v - work.dv0(), kHeadDimV)),
        keys_begin(static_cast<int>(band.first(work.i0))),
        keys_end(static_cast<int>(band.end(work.i0 + rows - 1))),
        tiles(band, work.i0, work.i0 + rows, kBc),
        unmasked(band, work.i0, work.i0 + rows, kBc) {
    if (tiles.end > tiles.begin) {
      const int part = ceil_div(tiles.end - tiles.begin, static_cast<int>(params.splits));
      tiles.begin += work.split * part;
      tiles.end = tiles.begin + part < tiles.end ? tiles.begin + part : tiles.end;
    }
    const Problem& problem = params.problem;
    o = static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q) +
        work.i0 * problem.o.row + work.dv0() * problem.o.col;
    lse = problem.lse.data ? static_cast<acc*>(problem.lse.data) +
                                 at.offset(problem.lse, at.head_q) + work.i0 * problem.lse.row
                           : nullptr;
    const int64 heads = problem.batch[0] * problem.batch[1] * problem.batch[2] * problem.heads_q;
    const int64 row = (work.split * heads + work.head) * problem.seqlen_q + work.i0;
    partial_O = params.O ? params.O + row * problem.head_dim_v + work.dv0() : nullptr;
    partial_lse = params.lse + row;
  }
};

constexpr int kHeadBytes = 512;
static_assert(sizeof(Head) <= kHeadBytes, "_simt.py counts kHeadBytes");

struct Sram {
  acc stage[kStages][(kBr + kBc) * kLd];  // of Q_i, then K_j; or of V_j
  acc P[kBr * kBc];
  uint8 seen[kWarps][kBc];  // whether any row of the warp sees the key; general variants only
  Head head;

  __device__ acc* K(int buffer) { return stage[buffer] + kBr * kLd; }
};
static_assert(kKeys * kGroup <= (kBr + kBc) * kLd, "a chunk of V fits a stage");

// Where P_ij has a key of one of a thread's rows. Neighbouring rows, which are read at the same
// time, have their keys exchanged so that they lie in different banks.
__device__ __forceinline__ int P_at(const Lane& lane, int r, int key) {
  constexpr int kBankRow = 128 / static_cast<int>(sizeof(acc));
  return lane.tile_row(r) * kBc + (key ^ (lane.row * (kBankRow / kLaneRows)));
}

}  // namespace cupyflash
