// SPDX-License-Identifier: MIT
// sm90_producer.cuh: the three warps of forward_sm90 that take works and load tiles.
#pragma once

#include "common/sm90_layout.cuh"
#include "common/sm90_score_arrays.cuh"
#include "ptx/fence.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

// Starts the copy of rows row0, row0 + 1, ... of one head into a tile, slab by slab.
template <class Tile>
__device__ __forceinline__ void load_tile(unsigned char* tile, const TensorMap& map,
                                          Mbarrier& arrived, int row0, const Origin& origin) {
  mbarrier_arrive_expect_tx(arrived, Tile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    const int from[5] = {slab * Tile::kSlabCols, row0, origin.head, origin.batch2, origin.batch1};
    tma_load_5d(tile + slab * Tile::kSlabBytes, map, arrived, from);
  }
}

// Rows [begin, end) of a tile of V become zeros, by one warp: a key that no query of the head sees
// has weight 0, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_rows(unsigned char* tile, int begin, int end) {
  struct alignas(16) Zeros {
    unsigned long long x[2];
  };
  constexpr int kUnits = VTile::kRowBytes / 16;
  const int lane = pin(threadIdx.x % kWarpSize);  // seldom needed: nothing of it is kept
#pragma unroll 1
  for (int slab = 0; slab < VTile::kSlabs; ++slab) {
    unsigned char* const rows = tile + slab * VTile::kSlabBytes;
#pragma unroll 1
    for (int x = begin * kUnits + lane; x < end * kUnits; x += kWarpSize) {
      *reinterpret_cast<Zeros*>(rows + x * 16) = Zeros{{0, 0}};
    }
  }
}

// The loops below that wait for a buffer to be free are one thread's: lanes beside it would look
// for phases that have come and gone.

// Warp 0, one thread: takes works and describes them to all others. The next one is taken when the
// loads of this one are nearly all started, no sooner: works that a block holds while it is busy
// are not there for a block that is free, which cost up to a fifth of the time with causal masks.
__device__ __forceinline__ void take_works(const Sm90Params& params, Shared& shared) {
  unsigned n = 0;
  for (Works works(params.schedule);; works.next()) {
    const Turn<kWorkStages> turn(n);
    mbarrier_wait(shared.work_empty[turn.stage], turn.parity ^ 1);
    Work& work = shared.work[turn.stage];
    const bool more = works.valid();
    if (more) {
      describe(work, params.problem, works.position());
      const Work& before = shared.work[Turn<kWorkStages>(n - 1).stage];
      work.fresh = n == 0 || before.begin == before.end;
    } else {
      describe_empty(work, kFarKey);
    }
    mbarrier_arrive(shared.work_full[turn.stage]);
    if (!more) return;
    mbarrier_wait(shared.work_wanted, n++ % 2);
  }
}

// Warp 1, one thread: loads Q and K in the order in which the consumers need them. The first K of a
// work is waited for before its Q, which may be free later.
__device__ __forceinline__ void load_Q_and_K(const Sm90Params& params, Shared& shared) {
  unsigned K_tiles = 0, Q_tiles = 0;
  for (unsigned n = 0;; ++n) {
    const Turn<kWorkStages> work_turn(n);
    mbarrier_wait(shared.work_full[work_turn.stage], work_turn.parity);
    const Work& work = shared.work[work_turn.stage];
    if (work.begin > work.end) return;
    // Two tiles before the last: time enough to take the next work before its first load is due.
    const int want_at = work.end - work.begin > 2 ? work.begin + 2 : work.end - 1;
    if (work.begin == work.end) mbarrier_arrive(shared.work_wanted);
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      if (j == want_at) mbarrier_arrive(shared.work_wanted);
      const Turn<kStages> turn(K_tiles++);
      mbarrier_wait(shared.K_empty[turn.stage], turn.parity ^ 1);
      load_tile<KTile>(shared.K[turn.stage], params.K, shared.K_full[turn.stage], j * kBc, work.kv);
      if (j + 1 < work.end) continue;
      const Turn<kQStages> Q_turn(Q_tiles++);
      const Origin q{work.head_q, work.kv.batch2, work.kv.batch1};
#pragma unroll 1
      for (int c = 0; c < kConsumers; ++c) {
        mbarrier_wait(shared.Q_empty[Q_turn.stage][c], Q_turn.parity ^ 1);
        load_tile<QTile>(shared.Q[Q_turn.stage][c], params.Q, shared.Q_full[Q_turn.stage][c],
                         work.i0 + c * kConsumerRows, q);
      }
    }
    mbarrier_arrive(shared.work_empty[work_turn.stage]);
  }
}

// Warp 2: loads V. Where rows of a tile have to be cleared, or may have to be, it waits for the
// copy itself and then arrives in its place.
__device__ __forceinline__ void load_V(const Sm90Params& params, Shared& shared) {
  const bool leader = threadIdx.x % kWarpSize == 0;
  unsigned V_tiles = 0, landed = 0;

  for (unsigned works = 0;; ++works) {
    const Turn<kWorkStages> work_turn(works);
    mbarrier_wait(shared.work_full[work_turn.stage], work_turn.parity);
    const Work& work = shared.work[work_turn.stage];
    if (work.begin > work.end) return;
    if (kHasScoreArray && work.careful && V_tiles > 0) {
      // Tiles of bias or mask were not waited for: now this warp is not ahead of them any more.
      const Turn<kStages> before(V_tiles - 1);
      mbarrier_wait(shared.V_empty[before.stage], before.parity);
    }
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      const Turn<kStages> turn(V_tiles);
      const Turn<kScoreStages> score_turn(V_tiles++);
      unsigned char* const tile = shared.V[turn.stage];
      Mbarrier& full = shared.V_full[turn.stage];
      const int j0 = j * kBc;
      const int there = min(static_cast<int>(params.problem.seqlen_k) - j0, kBc);
      const int begin = work.keys_begin - j0, end = work.keys_end - j0;
      const bool clear = begin > 0 || end < there;
      const bool careful = kHasScoreArray && work.careful;
      if (leader) {
        mbarrier_wait(shared.V_empty[turn.stage], turn.parity ^ 1);
        load_tile<VTile>(tile, params.V, clear || careful ? shared.V_landed : full, j0, work.kv);
      }
      if (clear || careful) {
        mbarrier_wait(shared.V_landed, landed % 2);
        ++landed;
        if (begin > 0) clear_rows(tile, 0, begin);
        if (end < there) clear_rows(tile, end, there);
        if (careful) {
          __syncwarp();  // the rows of every lane are cleared
          clear_hidden_rows(tile, shared, score_turn, work.rows,
                            static_cast<int>(params.score_rows));
        }
        fence_proxy_async_shared();
        __syncwarp();  // the rows of every lane are cleared
        if (leader) mbarrier_arrive(full);
      }
      if (careful) give_scores_back(shared, score_turn);
    }
    __syncwarp();  // every lane has read the work
    if (leader) mbarrier_arrive(shared.work_empty[work_turn.stage]);
  }
}

}  // namespace cupyflash
