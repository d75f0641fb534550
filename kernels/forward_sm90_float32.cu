// SPDX-License-Identifier: MIT
// forward_sm90_float32.cu: attention forward of float32 at its own accuracy on Hopper's wgmma.
// Source     Henry, Tang and Heinecke 2019, arXiv:1904.06376, for float32 products from bfloat16;
//            Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), section 3.1, for warpgroups
//            with roles; Algorithm 1 of Dao 2023, arXiv:2307.08691, for the running softmax.
// Computes   O = softmax(softmax_scale * Q K^T + bias) V, row-wise, and lse in nats, with every
//            option.
// Shapes     Q, O (batch, heads_q, seqlen_q, d or dv); K, V (batch, heads_k, seqlen_k, d or dv), of
//            float32, of any strides: contiguous rows that are 16-byte aligned are loaded by
//            vectors, others by elements.
// Tiles      Q_i Br x d, 64 rows for each consumer, O_i Br x dv, K_j Bc x d, V_j Bc x dv; each of
//            Q, K and V as three tiles of bfloat16: see bf16_parts.cuh. d up to kHeadDim; dv beyond
//            kHeadDimV is cut into slices, each a work of its own.
// Grid       one thread block a work: see divided_work.cuh.
// Roles      warpgroups 0 and 1, the consumers: S = Q K^T, softmax, O += P V for 64 queries each. A
//            warp owns 16 of them, and their rows of S, P and O never leave its registers.
//            Warpgroup 2, the producer: loads tiles of K and V, splits them and stores the parts,
//            swizzled as wgmma reads them. TMA could load them, but not split them.
// SRAM       the parts of Q_i, and kStages times those of K_j and V_j; what the block knows of its
//            work, and mbarriers: struct Shared.
// Pipeline   a consumer makes S, waits, makes P, makes P V, waits, and adds that to O. None of it
//            overlaps, but six products take so long that those of the other consumer fill the
//            tensor cores meanwhile:
//              consumer 1   [   Q K^T   ]softmax.....[    P V    ]...........[   Q K^T   ]softmax
//              consumer 2   ............[   Q K^T   ]softmax.....[    P V    ]...........[   Q K^T
//            and the producer has the time of two products to fill a buffer again.
// Barriers   K_full, V_full: every thread of the producer arrives when it has stored its columns
//            (and made them visible to the asynchronous units: fence.proxy.async); consumers wait
//            for it before they read the tile. Without it they would read the one before.
//            K_empty, V_empty: every consumer warp arrives when its products that read the tile
//            are complete; the producer waits for it before it stores over the tile.
//            Named barrier 1 + c: the parts of Q of consumer c are stored, by its own threads.
// NaN, Inf   make all sums that they meet NaN, by way of their other parts. A tile of K or V, or
//            the queries, that has any says so, and where a sum came out as NaN or Inf, it is made
//            once more, of first parts alone: Inf stays Inf, a score of -inf a weight of 0. V's
//            rows that no query of the block sees are 0 where they have any.
// Rounding   ex2.approx; of the sums of S and of each tile of P V, what d / 16 and Bc / 16 steps of
//            the tensor cores cut off: 2^-24 each.
// Limits     head_dim up to 128 (Q's parts fill the shared memory); positions are 32-bit numbers:
//            sequences of less than 2^29; 2^32 heads of the whole batch.
#include "common/bf16_parts.cuh"
#include "common/config.cuh"
#include "common/divided_work.cuh"
#include "common/mask.cuh"
#include "common/own_scores.cuh"
#include "common/params.cuh"
#include "common/swizzled_tile.cuh"
#include "common/tile_scores.cuh"
#include "common/tile_softmax.cuh"
#include "common/turn.cuh"
#include "common/uniform.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pin.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

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
// Whether P V of a tile is made beside the softmax of the next one.
constexpr bool kOverlaps = kHeadDim == 64 || !kGeneral;
constexpr int kProducerRegisters = kOverlaps ? 88 : 104;  // of the 168 that a thread starts with
constexpr int kConsumerRegisters = kOverlaps ? 208 : 200;
static_assert(kConsumers == 2 && kFragments == 1, "a warp owns 16 rows");

using QTile = SwizzledTile<kConsumerRows, kHeadDim>;
using KTile = SwizzledTile<kBc, kHeadDim>;
using VTile = SwizzledTile<kBc, kHeadDimV>;
using QParts = PartTiles<QTile>;
using KParts = PartTiles<KTile>;
using VParts = PartTiles<VTile>;
constexpr int kScores = kBc / 2;  // floats of a thread: 64 x Bc over 128 threads
// Columns of P V that are made at a time; all of them at once leave too few registers.
constexpr int kColumns = kHeadDimV % 64 == 0 ? 64 : kHeadDimV;
constexpr int kSums = kColumns / 2;
// Parts of Q that a consumer holds in registers, where there are some left.
constexpr int kHeldParts = kHeadDim == 64 && !kGeneral ? 2 : 0;

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

// The tiles of keys that one consumer visits. Rows that are not there see what the last one does.
struct ConsumerTiles {
  int begin;  // tiles of the work, of which some row sees some key by position
  int end;
  int all_begin;  // keys that every row sees
  int all_end;

  __device__ ConsumerTiles(const QueryRows& rows, const TileBand& band, const KeyBounds& keys,
                           int c)
      : ConsumerTiles(band, keys, rows.i0 + min(c * kConsumerRows, rows.rows - 1),
                      rows.i0 + min((c + 1) * kConsumerRows, rows.rows) - 1) {}

  // Of the tile that begins with key j0.
  __device__ __forceinline__ bool plain(int j0) const {
    return j0 >= all_begin && j0 + kBc <= all_end;
  }

 private:
  __device__ ConsumerTiles(const TileBand& band, const KeyBounds& keys, int first, int last)
      : begin(keys.begin), end(keys.begin), all_begin(band.first(last)), all_end(band.end(first)) {
    const int some_begin = band.first(first), some_end = band.end(last);
    if (some_end <= some_begin) return;
    begin = max(begin, min(some_begin / kBc, keys.end));
    end = max(begin, min(ceil_div(some_end, kBc), keys.end));
  }
};

struct Shared {
  alignas(1024) unsigned char Q[kConsumers][QParts::kBytes];
  alignas(1024) unsigned char K[kStages][KParts::kBytes];
  alignas(1024) unsigned char V[kStages][VParts::kBytes];
  Mbarrier K_full[kStages], K_empty[kStages];
  Mbarrier V_full[kStages], V_empty[kStages];
  WorkOfBlock block;
  ConsumerTiles tiles[kConsumers];
  // Of what has NaN or Inf: 1 for Q, 1 + j for tile j.
  int Q_special[kConsumers], K_special[kStages], V_special[kStages];
};

// The first parts of Q as left operands of products over 16 columns each. A product of 64 x 64 x 16
// reads 4 KiB from shared memory in the 32 cycles that it takes, all that there is to read; with
// its left operand in registers it reads half of that.
using Queries = unsigned[kHeldParts ? kHeldParts : 1][kHeadDim / 16][4];
__device__ __forceinline__ void hold_queries(const unsigned char* tiles, Queries& held) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
#pragma unroll
  for (int p = 0; p < kHeldParts; ++p) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const unsigned at = QTile::byte_of(row + x % 2 * 8, 2 * k + x / 2) + lane % 4 * 4;
        held[p][k][x] = *reinterpret_cast<const unsigned*>(tiles + p * QTile::kBytes + at);
      }
    }
  }
}

// S = Q K^T, started: the products of six pairs of parts.
__device__ __forceinline__ void start_scores(float (&S)[kScores], const Queries& held,
                                             unsigned long long Q, unsigned long long K) {
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const int part = left_part(pair);
    const unsigned long long q = Q + part * (QTile::kBytes / 16);
    const unsigned long long key = K + right_part(pair) * (KTile::kBytes / 16);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      if (part < kHeldParts) {
        if (pair == 0 && k == 0) {
          wgmma<MmaType::kBf16, false, false>(S, held[part < kHeldParts ? part : 0][k], key);
        } else {
          wgmma<MmaType::kBf16, true, false>(S, held[part < kHeldParts ? part : 0][k],
                                             key + KTile::columns_step(k));
        }
      } else if (pair == 0 && k == 0) {
        wgmma<MmaType::kBf16, false, false>(S, q, key);
      } else {
        wgmma<MmaType::kBf16, true, false>(S, q + QTile::columns_step(k),
                                           key + KTile::columns_step(k));
      }
    }
  }
  wgmma_commit();
}
__device__ __forceinline__ bool finite(float x) { return fabsf(x) < -kMinusInfinity; }

// Scores that came out as NaN or Inf, of first parts alone. One by one: few are asked for, and there
// are no registers for a second sum.
__device__ __forceinline__ void mend_scores(float (&S)[kScores], const unsigned char* Q,
                                            const unsigned char* K) {
  const int lane = threadIdx.x % kWarpSize;
  unsigned left = 0;
#pragma unroll
  for (int x = 0; x < kScores; ++x) left |= !finite(S[x]) << x;
#pragma unroll 1
  for (; left; left &= left - 1) {
    const int at = __ffs(left) - 1;
    const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4 + at / 2 % 2 * 8;
    const int key = at / 4 * 8 + lane % 4 * 2 + at % 2;
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < kHeadDim; ++k) {
      sum = fmaf(first_part<QTile>(Q, row, k), first_part<KTile>(K, key, k), sum);
    }
#pragma unroll
    for (int x = 0; x < kScores; ++x) S[x] = x == at ? sum : S[x];
  }
}

// P V, started: of the last `pairs` pairs of parts.
template <int pairs>
__device__ __forceinline__ void start_outputs(float (&PV)[kSums],
                                              const unsigned (&P)[kParts][kBc / 16][4],
                                              unsigned long long V) {
#pragma unroll
  for (int pair = kPairs - pairs; pair < kPairs; ++pair) {
    const unsigned long long v = V + right_part(pair) * (VTile::kBytes / 16);
#pragma unroll
    for (int k = 0; k < kBc / 16; ++k) {
      if (pair == kPairs - pairs && k == 0) {
        wgmma<MmaType::kBf16, false, true>(PV, P[left_part(pair)][k], v);
      } else {
        wgmma<MmaType::kBf16, true, true>(PV, P[left_part(pair)][k], v + VTile::rows_step(k));
      }
    }
  }
  wgmma_commit();
}

// The weights as the left operand of products over 16 keys each, in parts.
__device__ __forceinline__ void split_weights(const float (&S)[kScores],
                                              unsigned (&P)[kParts][kBc / 16][4]) {
#pragma unroll
  for (int k = 0; k < kBc / 16; ++k) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      unsigned parts[kParts];
      split(S[8 * k + 2 * x], S[8 * k + 2 * x + 1], parts);
#pragma unroll
      for (int p = 0; p < kParts; ++p) P[p][k][x] = parts[p];
    }
  }
}

// Every warp of the consumers says that it has read a buffer.
__device__ __forceinline__ void release(Mbarrier& empty) {
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(empty);
}

// The producer: tiles of K and V, in the order in which consumers need them.
__device__ __forceinline__ void load_keys(const Sm90Float32Params& params, Shared& shared) {
  const WorkOfBlock& block = shared.block;
  const Problem& problem = params.problem;
  const KeyBounds& keys = block.keys;
  const auto load_K = [&](int j) {
    const Turn<kStages> turn(j - keys.begin);
    const int j0 = j * kBc;
    const int thread = pin(threadIdx.x) % kWarpgroup;  // what follows from it is found out anew
    const KParts parts(thread, static_cast<int>(problem.head_dim), problem.k.col, params.k_vectors);
    const bool special = parts.load(
        shared.K[turn.stage], keys.keys_begin - j0, keys.keys_end - j0, 1.0f,
        [&](int r) { return block.K + (j0 + r) * problem.k.row; },
        [&] { mbarrier_wait(shared.K_empty[turn.stage], turn.parity ^ 1); },
        [](int) { return true; });
    if (special) shared.K_special[turn.stage] = 1 + j;
    fence_proxy_async_shared();
    mbarrier_arrive(shared.K_full[turn.stage]);
  };
  const auto load_V = [&](int j) {
    const Turn<kStages> turn(j - keys.begin);
    const int j0 = j * kBc;
    const int thread = pin(threadIdx.x) % kWarpgroup;
    const VParts parts(thread, block.dv, problem.v.col, params.v_vectors);
    // A weight of 0 takes no NaN away: what no row sees may not get there.
    const bool special = parts.load(
        shared.V[turn.stage], keys.keys_begin - j0, keys.keys_end - j0, 1.0f,
        [&](int r) { return block.V + (j0 + r) * problem.v.row; },
        [&] { mbarrier_wait(shared.V_empty[turn.stage], turn.parity ^ 1); },
        [&](int r) { return !kGeneral || block.scores.shown(problem, j0 + r); });
    if (special) shared.V_special[turn.stage] = 1 + j;
    fence_proxy_async_shared();
    mbarrier_arrive(shared.V_full[turn.stage]);
  };
  // In the order in which they are needed.
#pragma unroll 1
  for (int j = keys.begin; j < keys.end + kOverlaps; ++j) {
    if (j < keys.end) load_K(j);
    if (j > keys.begin || !kOverlaps) load_V(j - kOverlaps);
  }
}

// Row h of the thread's two, times factor, to where `to` points: the `cols` first columns.
// vectors: they are contiguous and 8-byte aligned.
__device__ __forceinline__ void store_row(const float (&O)[kHeadDimV / 8][4], int h, float factor,
                                          float* to, int64 col_stride, int cols, bool vectors) {
  struct alignas(8) Pair2 {
    float x[2];
  };
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n) {
    const int column = lane_key(n);
    const Pair2 pair{{O[n][2 * h] * factor, O[n][2 * h + 1] * factor}};
    if (vectors && column + 2 <= cols) {
      *reinterpret_cast<Pair2*>(to + column) = pair;
    } else {
      if (column < cols) to[column * col_stride] = pair.x[0];
      if (column + 1 < cols) to[(column + 1) * col_stride] = pair.x[1];
    }
  }
}

// One consumer: 64 queries.
__device__ __forceinline__ void attend(const Sm90Float32Params& params, Shared& shared) {
  const WorkOfBlock& block = shared.block;
  const Problem& problem = params.problem;
  const QueryRows& rows = block.rows;
  const int c = warp_uniform(threadIdx.x / kWarpgroup);
  {
    const QParts Q_parts(threadIdx.x % kWarpgroup, static_cast<int>(problem.head_dim),
                         problem.q.col, params.q_vectors);
    const float* const Q = static_cast<const float*>(problem.q.data) +
                           block.at.offset(problem.q, block.at.head_q) +
                           (rows.i0 + c * kConsumerRows) * problem.q.row;
    // Without options m is found among products times |softmax_scale|.
    if (Q_parts.load(
            shared.Q[c], 0, rows.rows - c * kConsumerRows,
            !kGeneral && problem.softmax_scale < 0 ? -1.0f : 1.0f,
            [&](int r) { return Q + r * problem.q.row; }, [] {}, [](int) { return true; })) {
      shared.Q_special[c] = 1;
    }
    fence_proxy_async_shared();
    named_barrier_sync(1 + c, kWarpgroup);
  }
  Queries held;
  hold_queries(shared.Q[c], held);
  const float scale = kGeneral ? 1.0f : static_cast<float>(fabs(problem.softmax_scale));
  TileSoftmax softmax(scale);
  float O[1][kHeadDimV / 8][4] = {};

  const ConsumerTiles& tiles = shared.tiles[c];
  const auto turn_of = [&](int j) { return Turn<kStages>(j - block.keys.begin); };
  float S[1][kBc / 8][4];
  float (&S_sum)[kScores] = reinterpret_cast<float (&)[kScores]>(S);
  unsigned P[kParts][kBc / 16][4];
  float PV[kSums];
  float keep[1][2];
  OwnScores::Entries entries;
  // Descriptors are made anew for each tile: there are no registers to keep them in.
  const auto Q_matrix = [&] {
    return advanced(QTile::by_columns(shared.Q[0]), pin(c) * QParts::kBytes / 16);
  };
  const auto K_matrix = [&](int j) {
    return advanced(KTile::by_columns(shared.K[0]), turn_of(j).stage * KParts::kBytes / 16);
  };
  const auto V_matrix = [&](int j, int column) {
    const int slab = column / VTile::kSlabCols * VTile::kSlabBytes;
    return advanced(VTile::by_rows(shared.V[0]), (turn_of(j).stage * VParts::kBytes + slab) / 16);
  };
  const auto wait_for = [&](Mbarrier(&full)[kStages], int j) {
    mbarrier_wait(full[turn_of(j).stage], turn_of(j).parity);
  };
  // A tile that none of these rows sees.
  const auto pass_by = [&](int j) {
    wait_for(shared.K_full, j);
    wait_for(shared.V_full, j);
    __syncwarp();
    release(shared.K_empty[turn_of(j).stage]);
    release(shared.V_empty[turn_of(j).stage]);
  };
  // The products of tile j become weights.
  const auto weigh = [&](int j) {
    wgmma_use(S_sum);
    if (shared.K_special[turn_of(j).stage] == 1 + j || shared.Q_special[c]) {
      mend_scores(S_sum, shared.Q[c], shared.K[turn_of(j).stage]);
    }
    release(shared.K_empty[turn_of(j).stage]);
    if constexpr (kGeneral) block.scores.apply(S, entries, problem, j * kBc);
    if (!tiles.plain(j * kBc)) hide_by_position(S, block.rows, block.band, j * kBc);
    softmax.settle(S, O, keep);
    softmax.weigh(S);
    wgmma_use(S_sum);  // before P V is complete, not after it
  };
  // O = keep (O + P V_j), the first of whose columns are started; keep is in O already.
  const auto receive_outputs = [&](int j) {
    const bool special = shared.V_special[turn_of(j).stage] == 1 + j;
#pragma unroll
    for (int column = 0; column < kHeadDimV; column += kColumns) {
      if (column > 0) {
        wgmma_fence();
        start_outputs<kPairs>(PV, P, V_matrix(j, column));
      }
      wgmma_wait<0>();
      wgmma_use(PV);
      unsigned long long left = 0;  // sums that are to be made once more
#pragma unroll
      for (int x = 0; x < kSums; ++x) {
        float& sum = O[0][column / 8 + x / 4][x % 4];
        if (special && !finite(PV[x])) {
          left |= 1ull << x;
        } else {
          sum = fmaf(PV[x], keep[0][x / 2 % 2], sum);
        }
      }
      if (special) {
        wgmma_fence();
        start_outputs<1>(PV, P, V_matrix(j, column));
        wgmma_wait<0>();
        wgmma_use(PV);
#pragma unroll
        for (int x = 0; x < kSums; ++x) {
          float& sum = O[0][column / 8 + x / 4][x % 4];
          if (left >> x & 1) sum = fmaf(PV[x], keep[0][x / 2 % 2], sum);
        }
      }
    }
    release(shared.V_empty[turn_of(j).stage]);
  };

#pragma unroll 1
  for (int j = block.keys.begin; j < tiles.begin; ++j) pass_by(j);
  int j = tiles.begin;
  if constexpr (!kOverlaps) {
#pragma unroll 1
    for (; j < tiles.end; ++j) {
      wait_for(shared.K_full, j);
      wgmma_fence();
      start_scores(S_sum, held, Q_matrix(), K_matrix(j));
      block.scores.load(entries, problem, j * kBc);
      wgmma_wait<0>();
      weigh(j);
      keep[0][0] = keep[0][1] = 1.0f;  // P V is weighed by the same m
      split_weights(S_sum, P);
      wait_for(shared.V_full, j);
      wgmma_fence();
      start_outputs<kPairs>(PV, P, V_matrix(j, 0));
      receive_outputs(j);
    }
  } else if (j < tiles.end) {
    wait_for(shared.K_full, j);
    wgmma_fence();
    start_scores(S_sum, held, Q_matrix(), K_matrix(j));
    if constexpr (kGeneral) block.scores.load(entries, problem, j * kBc);
    wgmma_wait<0>();
    weigh(j);
    split_weights(S_sum, P);
    // P holds the weights of tile j, O the sum over the tiles before.
#pragma unroll 1
    while (++j < tiles.end) {
      wait_for(shared.K_full, j);
      wgmma_fence();
      start_scores(S_sum, held, Q_matrix(), K_matrix(j));
      wait_for(shared.V_full, j - 1);
      wgmma_fence();  // the compiler wants one in each block of code
      start_outputs<kPairs>(PV, P, V_matrix(j - 1, 0));
      if constexpr (kGeneral) block.scores.load(entries, problem, j * kBc);
      wgmma_wait<1>();
      weigh(j);
      receive_outputs(j - 1);
      split_weights(S_sum, P);
    }
    keep[0][0] = keep[0][1] = 1.0f;
    wait_for(shared.V_full, j - 1);
    wgmma_fence();
    start_outputs<kPairs>(PV, P, V_matrix(j - 1, 0));
    receive_outputs(j - 1);
  }
#pragma unroll 1
  for (; j < block.keys.end; ++j) pass_by(j);

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane_row(0, h);
    float factor, row_lse;
    softmax.finish(scale, 0, h, factor, row_lse);
    if (r >= rows.rows) continue;
    const bool writes_lse = threadIdx.x % 4 == 0 && block.work.slice == 0;
    if (params.splits == 1) {
      const int64 i = rows.i0 + r;
      const int64 o_at = block.at.offset(problem.o, block.at.head_q) + i * problem.o.row;
      store_row(O[0], h, factor,
                static_cast<float*>(problem.o.data) + o_at + block.dv0 * problem.o.col,
                problem.o.col, block.dv, params.o_vectors);
      if (writes_lse && problem.lse.data) {
        const int64 lse_at = block.at.offset(problem.lse, block.at.head_q) + i * problem.lse.row;
        static_cast<float*>(problem.lse.data)[lse_at] = row_lse;
      }
    } else {
      const int64 heads = problem.batch[0] * problem.batch[1] * problem.batch[2] * problem.heads_q;
      const int64 row =
          (block.work.split * heads + block.work.head) * problem.seqlen_q + rows.i0 + r;
      store_row(O[0], h, factor, params.O + row * problem.head_dim_v + block.dv0, 1, block.dv,
                false);
      if (writes_lse) params.lse[row] = row_lse;
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kThreads + cupyflash::kWarpgroup, 1)
    forward_sm90_float32(const __grid_constant__ cupyflash::Sm90Float32Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  // All blocks are there: combine's may come beside them, to wait.
  if constexpr (kHasGriddepcontrol) griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared.K_full[stage], kWarpgroup);
      mbarrier_init(shared.V_full[stage], kWarpgroup);
      mbarrier_init(shared.K_empty[stage], kWarps);
      mbarrier_init(shared.V_empty[stage], kWarps);
      shared.K_special[stage] = shared.V_special[stage] = 0;
    }
    shared.block = WorkOfBlock(params);
    for (int c = 0; c < kConsumers; ++c) {
      shared.tiles[c] = ConsumerTiles(shared.block.rows, shared.block.band, shared.block.keys, c);
      shared.Q_special[c] = 0;
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // before anybody waits on the mbarriers
  if (threadIdx.x >= kThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    load_keys(params, shared);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    attend(params, shared);
  }
}
