// SPDX-License-Identifier: MIT
// forward_sm80.cu: attention forward on mma.sync and cp.async, for every GPU since Ampere.
// Source     Dao 2023, arXiv:2307.08691 (FlashAttention-2), Algorithm 1: Q outer, O in registers.
//            Split keys and their merge: section 3.1 of arXiv:2205.14135, per thread block.
// Computes   O = softmax(softmax_scale * Q K^T + bias) V, row-wise, and lse in nats.
// Shapes     Q, O (batch, heads_q, seqlen_q, d or dv); K, V (batch, heads_k, seqlen_k, d or dv), of
//            float16, bfloat16, float32 or float64. Any strides: contiguous rows that are
//            16-byte aligned are loaded by vectors, others by elements.
// Tiles      Q_i Br x d, O_i Br x dv, K_j Bc x d, V_j Bc x dv, d up to kHeadDim: columns past d
//            are zeros. dv beyond kHeadDimV is cut into slices, each a work of its own.
// Grid       one thread block a work: (part of the keys, slice of dv, head, i), see `Work`.
// Ownership  a warp owns kBr / kWarps queries, all keys and all columns: its rows of S, P and O
//            never leave its registers. Only the loading of tiles is shared by the block.
// Pipeline   K and V tiles pass through kStages buffers. Step j waits for its own copies of tile j;
//            one barrier makes everybody's visible and says that all have left tile j - 1, whose
//            buffer the copies of tile j + kStages - 1 then take. Without it, a fast warp would
//            load over what a slow one reads, and read what another has not loaded yet.
// Merge      Where keys are divided, a thread block writes its part to the workspace. Of few rows
//            the block that is done last, as a count tells it, merges all parts (merge_parts.cuh);
//            otherwise a launch of combine.cu does.
// SRAM       Q_i and kStages times K_j and V_j; bias and mask of a tile, where they are there; what
//            the block's threads look up, and which keys of a tile are seen (ScoreChanges::Shared).
// Products   products_half.cuh (16-bit: ldmatrix, m16n8k16), products_wide.cuh (float32 as three
//            TF32 products) and products_double.cuh (float64, with a softmax of its own): their
//            operands come differently, the rest is one text.
// Rounding   ex2.approx and, for softcap of 16-bit elements, tanh.approx. Of float64, Q is scaled
//            where it lies, and exponentials err by 1.4e-16.
// Limits     d <= 256; sequences of less than 2^29, so that positions are 32-bit numbers; 2^32
//            heads of the whole batch.
#include "common/config.cuh"
#include "common/divided_work.cuh"
#include "common/mask.cuh"
#include "common/merge_parts.cuh"
#include "common/params.cuh"
#include "common/tile.cuh"
#include "common/tile_scores.cuh"
#include "common/tile_softmax.cuh"
#include "ptx/atom.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/pin.cuh"
#if CUPYFLASH_HEADER == CUPYFLASH_HEADER_float16 || CUPYFLASH_HEADER == CUPYFLASH_HEADER_bfloat16
#include "common/products_half.cuh"
#elif CUPYFLASH_HEADER == CUPYFLASH_HEADER_float64
#include "common/products_double.cuh"
#else
#include "common/products_wide.cuh"
#endif

namespace cupyflash {

struct Sm80Params {
  Problem problem;
  acc* O;            // (splits, batch, heads_q, seqlen_q, dv) partial results; null if splits is 1
  acc* lse;          // (splits, batch, heads_q, seqlen_q)
  int64 first_head;  // of this launch, among all heads (heads of pack query heads) of the batch
  int64 heads;       // of this launch
  int64 pack;        // query heads that are rows of one tile: 1, or heads_q / heads_k
  int64 bunch;       // heads that are walked together
  int64 splits;      // parts of the keys
  int64 slices;      // of dv
  int64 q_vectors;   // 1: rows of Q may be read 16 bytes at a time; likewise below
  int64 k_vectors;
  int64 v_vectors;
  int64 o_vectors;
  int64 bias_vectors;
  int64 mask_vectors;
  unsigned* counts;  // (works / splits) of parts that are done, 0 before and after, slices being 1;
                     // null: combine merges
};

static_assert(kStages >= 2, "one tile is loaded while another is used");

// Whether what leads from one tile of keys to the next stays in registers. Elsewhere there are none
// left for it.
constexpr bool kKeepsLoaders = !kGeneral && sizeof(element) != 4;

// Whether a build can merge parts itself (Tiles.merges of _sm80.py): that of few queries, and few
// rows have few parts to be read by one thread block.
constexpr bool kMergesParts = !kGeneral && sizeof(element) == 2 && kBr <= 64;

// Where the rows of a work go, in shared memory: registers have no room for it, and to find it out
// anew would take longer than to store them.
struct Output {
  element* o;  // from row 0 and the slice's first column on
  acc* lse;    // of row 0; null where nobody wants it, or another slice writes it
  acc* part;   // the same of a part of the keys
  acc* part_lse;

  Output() = default;
  __device__ Output(const Sm80Params& p, const Work& work, const HeadIndex& at,
                    const QueryRows& rows) {
    const Problem& problem = p.problem;
    const int64 dv0 = work.slice * kHeadDimV;
    const bool first = work.slice == 0;
    o = static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q) +
        rows.i0 * problem.o.row + dv0 * problem.o.col;
    acc* const all = static_cast<acc*>(problem.lse.data);
    lse = !all || !first ? nullptr
                         : all + at.offset(problem.lse, at.head_q) + rows.i0 * problem.lse.row;
    part = part_lse = nullptr;
    if (p.splits == 1) return;
    const int64 row =
        work.split * part_rows(problem) + work.head * p.pack * problem.seqlen_q + rows.i0;
    part = p.O + row * problem.head_dim_v + dv0;
    if (first) part_lse = p.lse + row;
  }

  // From one part to the next.
  static __device__ int64 part_rows(const Problem& problem) {
    const int64* const batch = problem.batch;
    return batch[0] * batch[1] * batch[2] * problem.heads_q * problem.seqlen_q;
  }
};

template <class T>
__device__ __forceinline__ void load_queries(unsigned char* tile, const element* first,
                                             const QueryRows& rows, const TensorView& view,
                                             bool vectors, int cols) {
  const auto row_at = [&](int row) {
    const int r = row < rows.rows ? row : 0;  // others are not read
    return first + rows.query(r) * view.row + rows.head(r) * view.head;
  };
  if (vectors) {
    const ThreadCopies<T> copies(threadIdx.x, cols);
    copies.start(tile, 0, rows.rows, [&](int pass) {
      return row_at(copies.r0 + pass * ThreadCopies<T>::kPassRows) + copies.chunk * kVec;
    });
  } else {
    load_elements<T>(tile, row_at, view.col, 0, rows.rows, cols);
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kThreads, cupyflash::kBlocks)
    forward_sm80(const __grid_constant__ cupyflash::Sm80Params params) {
  using namespace cupyflash;
  using QTile = Products::QTile;
  using KTile = Products::KTile;
  using VTile = Products::VTile;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  // All blocks are there: combine's may come beside them, to wait.
  if constexpr (kHasGriddepcontrol) griddepcontrol_launch_dependents();
  unsigned char* const Q_smem = shared_memory;
  using KBuffer = unsigned char[KTile::kBytes];
  using VBuffer = unsigned char[VTile::kBytes];
  KBuffer* const K_smem = reinterpret_cast<KBuffer*>(shared_memory + QTile::kBytes);
  VBuffer* const V_smem =
      reinterpret_cast<VBuffer*>(shared_memory + QTile::kBytes + kStages * sizeof(KBuffer));

  const Problem& problem = params.problem;
  const Work work(params, params.pack, blockIdx.x);
  const HeadIndex at(problem, static_cast<unsigned>(work.head * params.pack));
  const TileBand band(Band(problem, at.seqlen_k(problem)));
  const QueryRows rows(problem, params.pack, work.tile);
  const int d = static_cast<int>(problem.head_dim);
  const int dv0 = work.slice * kHeadDimV;
  const int dv = within(problem.head_dim_v - dv0, kHeadDimV);
  const KeyBounds keys(rows, band, work.split, static_cast<int>(params.splits));

  const element* const Q = static_cast<const element*>(problem.q.data) +
                           at.offset(problem.q, at.head_q) + rows.i0 * problem.q.row;
  const element* const K =
      static_cast<const element*>(problem.k.data) + at.offset(problem.k, at.head_k);
  const element* const V = static_cast<const element*>(problem.v.data) +
                           at.offset(problem.v, at.head_k) + dv0 * problem.v.col;
  Products products(Q_smem);
  __shared__ ScoreChanges::Shared shared;
  __shared__ Output output;
  const ScoreChanges changes(
      problem, shared, params.bias_vectors, params.mask_vectors,
      shared_memory + QTile::kBytes + kStages * sizeof(KBuffer) + kStages * sizeof(VBuffer));
  // Of the scores that softmax takes. Products are scaled there if nothing else happens to them.
  const auto in_nats = [&] { return kGeneral && changes.in_nats(); };
  const auto scale = [&] {
    return static_cast<acc>(in_nats() ? 1.0 : fabs(problem.softmax_scale));
  };
  RowSoftmax softmax(scale());
  acc O[kFragments][Products::kColumnTiles][4] = {};
  // Warps past the last row have nothing to compute.
  const auto works_on = [](const QueryRows& rows) {
    return static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows < rows.rows;
  };
  const bool busy = works_on(rows);

  const auto share = [&] {
    if (threadIdx.x != 0) return;
    shared.rows = rows;
    shared.band = band;
    shared.keys = keys;
    shared.K = K;
    shared.V = V;
    shared.dv = dv;
    if constexpr (kGeneral) shared.set(problem, at);
    output = Output(params, work, at, rows);
  };
  // Seen by all from the first barrier on; who needs it before has one more.
  if constexpr (!kKeepsLoaders) {
    load_queries<QTile>(Q_smem, Q, rows, problem.q, params.q_vectors, d);
    share();
    __syncthreads();
  }
  // Starts to load tile j, if there is one. What leads there is found out anew.
  const auto load_tile = [&](int j, int stage) {
    if (j < shared.keys.end) {
      const int j0 = j * kBc;
      const int begin = shared.keys.keys_begin - j0;
      const int end = shared.keys.keys_end - j0;
      const int thread = pin(threadIdx.x);
      KeyLoader<KTile>(problem.k, shared.K + j0 * problem.k.row, d, params.k_vectors, thread)
          .load(K_smem[stage], begin, end, thread);
      KeyLoader<VTile>(problem.v, shared.V + j0 * problem.v.row, shared.dv, params.v_vectors,
                       thread)
          .load(V_smem[stage], begin, end, thread);
    }
  };
  if constexpr (kGeneral) {
    // As below, but that bias and mask are loaded too, and that tiles may be left out. One step
    // before the first tile finds that tile and starts to load it.
    changes.load_mask(keys.begin);
    cp_async_commit();
#pragma unroll 1
    for (int j = keys.begin - 1, next = 0, stage = 0; j < shared.keys.end; j = next) {
      cp_async_wait<0>();
      next = changes.next(j + 1, stage);  // the barrier of a step
      load_tile(next, stage);
      cp_async_commit();
      stage ^= 1;
      if (!works_on(shared.rows)) continue;
      const bool begun = j >= shared.keys.begin;
      unsigned seen = kLaneKeys;
      acc S[kFragments][kKeyTiles][4] = {};
      if (begun) {
        products.scores(S, K_smem[stage]);
        seen = changes.apply(S, j * kBc, stage);
      } else {
        products.take_q(!changes.in_nats() && problem.softmax_scale < 0, softmax.slope());
      }
      if (next < shared.keys.end) changes.load_bias(next);
      cp_async_commit();
      if (!begun) continue;
      softmax.settle(S, O);
      softmax.weigh(S);
      if (__all_sync(kFullWarp, seen == kLaneKeys)) {
        products.accumulate<true>(O, S, V_smem[stage], seen);
      } else {
        products.accumulate<false>(O, S, V_smem[stage], seen);
      }
    }
  } else {
    const int64 first_key = keys.begin * kBc;
    KeyLoader<KTile> K_loader(problem.k, K + first_key * problem.k.row, d, params.k_vectors,
                              threadIdx.x);
    KeyLoader<VTile> V_loader(problem.v, V + first_key * problem.v.row, dv, params.v_vectors,
                              threadIdx.x);
    const bool whole = K_loader.whole() && V_loader.whole();
    const auto load_keys = [&](int j, int stage) {
      const int j0 = j * kBc;
      if constexpr (!kKeepsLoaders) return load_tile(j, stage);
      if (whole && j < keys.end && keys.whole(j0)) {
        const int thread = pin(threadIdx.x);  // addresses in the tiles are found out anew
        K_loader.next_whole(K_smem[stage], thread);
        V_loader.next_whole(V_smem[stage], thread);
      } else if (j < keys.end) {
        K_loader.next(K_smem[stage], keys.keys_begin - j0, keys.keys_end - j0);
        V_loader.next(V_smem[stage], keys.keys_begin - j0, keys.keys_end - j0);
      }
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      // Q comes with the first tile, behind it: K and V have the longer way.
      load_keys(keys.begin + stage, stage);
      if (kKeepsLoaders && stage == 0) {
        load_queries<QTile>(Q_smem, Q, rows, problem.q, params.q_vectors, d);
      }
      cp_async_commit();
    }
    if constexpr (kKeepsLoaders) share();  // while they are on their way
#pragma unroll 1
    for (int j = keys.begin, stage = 0; j < keys.end; ++j) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // tile j is there, and tile j - 1 is no longer read
      load_keys(j + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
      cp_async_commit();
      if (busy) {
        if (j == keys.begin) products.take_q(problem.softmax_scale < 0, softmax.slope());
        const int j0 = j * kBc;
        acc S[kFragments][kKeyTiles][4];
        products.scores(S, K_smem[stage]);
        const KeyBounds& bounds = sizeof(element) == 8 ? keys : shared.keys;
        if (!bounds.plain(j0)) hide_by_position(S, shared.rows, shared.band, j0);
        softmax.settle(S, O);
        softmax.weigh(S);
        products.accumulate<true>(O, S, V_smem[stage], kLaneKeys);
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

  // Each row goes to the result, or, being one part of several, to the workspace.
  if (kKeepsLoaders && keys.begin >= keys.end) __syncthreads();  // no step had a barrier
  const QueryRows out_rows = shared.rows;
  const Output out = output;
  const int out_dv = shared.dv;
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      acc factor, row_lse;
      softmax.finish(scale(), m, h, factor, row_lse);
#pragma unroll
      for (int e = 0; e < kStoredRows; ++e) {
        const int r = stored_row(m, h, e);
        const bool valid = r < out_rows.rows;
        const int i = out_rows.query(r);
        const int head = out_rows.head(r);
        const acc row_factor = of_stored_row(factor, e);
        const acc lse_of_row = of_stored_row(row_lse, e);
        const bool writes_lse = valid && stores_first_column();
        const int x = kStoredRows * h + e;
        if (params.splits == 1) {
          element* const to = out.o + i * problem.o.row + head * problem.o.head;
          store_row(O[m], x, row_factor, valid, to, problem.o.col, out_dv, params.o_vectors);
          if (writes_lse && out.lse) {
            out.lse[i * problem.lse.row + head * problem.lse.head] = lse_of_row;
          }
        } else {
          const int64 row = head * problem.seqlen_q + i;
          acc* const to = out.part + row * problem.head_dim_v;
          store_partial_row(O[m], x, row_factor, valid, to, out_dv);
          if (writes_lse && out.part_lse) out.part_lse[row] = lse_of_row;
        }
      }
    }
  }

  if constexpr (kMergesParts) {
    if (!params.counts) return;
    cp_async_wait<0>();  // tiles' memory is taken for the parts
    __syncthreads();     // all of this part is written
    const unsigned others = static_cast<unsigned>(params.splits) - 1;
    const Division<unsigned> at_part(pin(static_cast<int>(blockIdx.x)), others + 1);
    unsigned* const count = params.counts + at_part.quotient;
    const bool last = threadIdx.x == 0 && atom_inc_acq_rel(count, others) == others;
    if (!__syncthreads_or(last)) return;
    const int64 before = at_part.rest * Output::part_rows(problem);
    const TileParts parts = {out.part - before * problem.head_dim_v,
                             out.part_lse - before,
                             Output::part_rows(problem),
                             problem.seqlen_q,
                             static_cast<int>(params.splits),
                             out_dv,
                             out.o,
                             out.lse};
    merge_parts(parts, out_rows, problem, params.o_vectors, shared_memory);
  }
}
