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
#include "common/float32_layout.cuh"
#include "common/float32_producer.cuh"
#include "common/tile_softmax.cuh"
#include "common/uniform.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pin.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

namespace cupyflash {

constexpr int kScores = kBc / 2;  // floats of a thread: 64 x Bc over 128 threads
// Columns of P V that are made at a time; all of them at once leave too few registers.
constexpr int kColumns = kHeadDimV % 64 == 0 ? 64 : kHeadDimV;
constexpr int kSums = kColumns / 2;
// Parts of Q that a consumer holds in registers, where there are some left.
constexpr int kHeldParts = kHeadDim == 64 ? 2 : 0;

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

// D = sum of the products of `pairs` pairs of parts, the last ones of the six.
template <int pairs>
__device__ __forceinline__ void start_scores(float (&S)[kScores], const Queries& held,
                                             unsigned long long Q, unsigned long long K) {
#pragma unroll
  for (int pair = kPairs - pairs; pair < kPairs; ++pair) {
    const int part = left_part(pair);
    const unsigned long long q = Q + part * (QTile::kBytes / 16);
    const unsigned long long key = K + right_part(pair) * (KTile::kBytes / 16);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      if (part < kHeldParts) {
        if (pair == kPairs - pairs && k == 0) {
          wgmma<MmaType::kBf16, false, false>(S, held[part < kHeldParts ? part : 0][k], key);
        } else {
          wgmma<MmaType::kBf16, true, false>(S, held[part < kHeldParts ? part : 0][k],
                                             key + KTile::columns_step(k));
        }
      } else if (pair == kPairs - pairs && k == 0) {
        wgmma<MmaType::kBf16, false, false>(S, q, key);
      } else {
        wgmma<MmaType::kBf16, true, false>(S, q + QTile::columns_step(k),
                                           key + KTile::columns_step(k));
      }
    }
  }
  wgmma_commit();
}
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

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < -kMinusInfinity; }

// Every warp of the consumers says that it has read a buffer.
__device__ __forceinline__ void release(Mbarrier& empty) {
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(empty);
}

// Row h of the thread's two, times factor, to where `to` points: the `cols` first columns.
// vectors: they are contiguous and 8-byte aligned.
__device__ __forceinline__ void store_row(const float (&O)[kHeadDimV / 8][4], int h, float factor,
                                          float* to, int64 col_stride, int cols, bool vectors) {
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n) {
    const int column = lane_key(n);
    const Pair<float> pair{{O[n][2 * h] * factor, O[n][2 * h + 1] * factor}};
    if (vectors && column + 2 <= cols) {
      *reinterpret_cast<Pair<float>*>(to + column) = pair;
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
    const float sign = !kGeneral && problem.softmax_scale < 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int batch = 0; batch < QParts::kBatches; ++batch) {
      Batch x;
      Q_parts.load(x, batch, 0, rows.rows - c * kConsumerRows,
                   [&](int r) { return Q + r * problem.q.row; });
      if (Q_parts.mend(x, batch, [](int) { return true; })) shared.Q_special[c] = 1;
      Q_parts.store(shared.Q[c], x, batch, sign);
    }
    fence_proxy_async_shared();
    named_barrier_sync(1 + c, kWarpgroup);
  }
  Queries held;
  hold_queries(shared.Q[c], held);
  const float scale = kGeneral ? 1.0f : static_cast<float>(fabs(problem.softmax_scale));
  TileSoftmax softmax(scale);
  float O[1][kHeadDimV / 8][4] = {};

  const ConsumerKeys& keys = shared.keys[c];
#pragma unroll 1
  for (int j = block.keys.begin; j < block.keys.end; ++j) {
    const Turn<kStages> turn(j - block.keys.begin);
    const int j0 = j * kBc;
    mbarrier_wait(shared.K_full[turn.stage], turn.parity);
    if (!keys.some(j0)) {
      __syncwarp();
      release(shared.K_empty[turn.stage]);
      mbarrier_wait(shared.V_full[turn.stage], turn.parity);
      __syncwarp();
      release(shared.V_empty[turn.stage]);
      continue;
    }
    float S[1][kBc / 8][4];
    float (&S_sum)[kScores] = reinterpret_cast<float (&)[kScores]>(S);
    // Made anew for each tile: there are no registers to keep it in.
    const unsigned long long Q =
        advanced(QTile::by_columns(shared.Q[0]), pin(c) * QParts::kBytes / 16);
    const unsigned long long K =
        advanced(KTile::by_columns(shared.K[0]), turn.stage * KParts::kBytes / 16);
    wgmma_fence();
    start_scores<kPairs>(S_sum, held, Q, K);
    OwnScores::Entries entries;
    if constexpr (kGeneral) block.scores.load(entries, problem, j0);
    wgmma_wait<0>();
    wgmma_use(S_sum);
    if (shared.K_special[turn.stage] == 1 + j || shared.Q_special[c]) {
      float first[kScores];
      wgmma_fence();
      start_scores<1>(first, held, Q, K);
      wgmma_wait<0>();
      wgmma_use(first);
#pragma unroll
      for (int x = 0; x < kScores; ++x) S_sum[x] = finite(S_sum[x]) ? S_sum[x] : first[x];
    }
    release(shared.K_empty[turn.stage]);
    if constexpr (kGeneral) block.scores.apply(S, entries, problem, j0);
    if (!keys.all(j0)) hide_by_position(S, block.rows, block.band, j0);
    softmax.settle(S, O);
    softmax.weigh(S);
    unsigned P[kParts][kBc / 16][4];
    split_weights(S_sum, P);

    mbarrier_wait(shared.V_full[turn.stage], turn.parity);
    const bool special = shared.V_special[turn.stage] == 1 + j;
#pragma unroll
    for (int column = 0; column < kHeadDimV; column += kColumns) {
      float PV[kSums];
      const unsigned long long V = advanced(
          VTile::by_rows(shared.V[0]),
          (turn.stage * VParts::kBytes + column / VTile::kSlabCols * VTile::kSlabBytes) / 16);
      wgmma_fence();
      start_outputs<kPairs>(PV, P, V);
      wgmma_wait<0>();
      wgmma_use(PV);
      unsigned long long left = 0;  // sums that are to be made once more
#pragma unroll
      for (int x = 0; x < kSums; ++x) {
        if (special && !finite(PV[x])) {
          left |= 1ull << x;
        } else {
          O[0][column / 8 + x / 4][x % 4] += PV[x];
        }
      }
      if (special) {
        wgmma_fence();
        start_outputs<1>(PV, P, V);
        wgmma_wait<0>();
        wgmma_use(PV);
#pragma unroll
        for (int x = 0; x < kSums; ++x) {
          if (left >> x & 1) O[0][column / 8 + x / 4][x % 4] += PV[x];
        }
      }
    }
    release(shared.V_empty[turn.stage]);
  }

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
      shared.keys[c] = ConsumerKeys(shared.block.rows, shared.block.band, c);
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
