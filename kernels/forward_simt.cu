// SPDX-License-Identifier: MIT
// forward_simt.cu: attention forward on the ordinary arithmetic units, for any GPU and head dim.
// Source     Dao 2023, arXiv:2307.08691 (FlashAttention-2), Algorithm 1: Q outer, O in registers.
//            Split keys and their merge: section 3.1 of arXiv:2205.14135, per thread block.
// Computes   O = softmax(softmax_scale * Q K^T + bias) V, row-wise, and lse in nats.
// Shapes     Q, O (batch, heads_q, seqlen_q, d or dv); K, V (batch, heads_k, seqlen_k, d or dv), of
//            float16, bfloat16, float32 or float64. Any strides.
// Tiles      S_ij and P_ij Br x Bc, O_i Br x kHeadDimV; dv beyond that is cut into slices, each a
//            work of its own that makes the scores again. Q_i and K_j are never held whole: they
//            pass by in chunks of kHeadDim of d, V_j in chunks of kKeys keys by kGroup columns, so
//            that neither d nor dv has a limit.
// Grid       one thread block a work: (part of the keys, slice of dv, head, i), see Work in
//            simt_layout.cuh.
// Ownership  a warp owns kWarpRows queries, all keys and all columns. kRowLanes lanes share a row;
//            a lane has kRows rows of kVec keys, or of kVec columns of each group.
// Pipeline   a step multiplies one chunk. Its elements come to registers during the step before
//            and go from there to one of two buffers. The barrier behind that makes them
//            everybody's and says that all have left the step before, whose buffer the next step
//            writes. Without it, a fast warp would write over what a slow one reads.
// SRAM       two chunks, P_ij, and a flag for each warp and key, see Sram.
// Rounding   sums run over kFold of d, and over the keys of one tile, before they are added to
//            others: errors of plain sums would grow with d and with seqlen_k.
// Limits     sequences of less than 2^29, so that positions are 32-bit numbers.
#include "common/online_softmax.cuh"
#include "common/simt_chunks.cuh"

namespace cupyflash {

using Sums = acc[kRows][kVec];

// S += Q_i K_j^T over the d of a chunk; [r][n] is key n kRowLanes + lane.col of row r.
__device__ __forceinline__ void multiply_scores(Sums& S, const acc* Q, const acc* K) {
  const Lane lane;
  const acc* const Q_row = Q + lane.tile_row(0) * kLd;
  const acc* const K_row = K + lane.col * kLd;
#pragma unroll
  for (int x = 0; x < kHeadDim; x += kVec) {
    Vec16<acc> k[kVec];
#pragma unroll
    for (int n = 0; n < kVec; ++n) k[n] = load_vec16(K_row + n * kRowLanes * kLd + x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Vec16<acc> q = load_vec16(Q_row + r * kLaneRows * kLd + x);
#pragma unroll
      for (int n = 0; n < kVec; ++n) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) S[r][n] += q.x[e] * k[n].x[e];
      }
    }
  }
}

// sum += P_ij V_j over the keys of a chunk, of which key0 is the first; [r][e] is column
// lane.col kVec + e of the group.
__device__ __forceinline__ void multiply_values(Sums& sum, const Sram& sram, const acc* V,
                                                int key0) {
  const Lane lane;
  struct alignas(kVec) Flags {
    uint8 x[kVec];
  };
#pragma unroll(kGeneral ? 2 : kKeys / kVec)  // flags take registers too
  for (int x = 0; x < kKeys; x += kVec) {
    Vec16<acc> v[kVec];
#pragma unroll
    for (int n = 0; n < kVec; ++n) v[n] = load_vec16(V + (x + n) * kGroup + lane.col * kVec);
    if constexpr (kGeneral) {
      // A hidden key's V may be NaN, and 0 * NaN is NaN.
      const Flags seen = *reinterpret_cast<const Flags*>(sram.seen[lane.warp] + key0 + x);
#pragma unroll
      for (int n = 0; n < kVec; ++n) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[n].x[e] = seen.x[n] ? v[n].x[e] : acc(0);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Vec16<acc> p = load_vec16(sram.P + P_at(lane, r, key0 + x));
#pragma unroll
      for (int n = 0; n < kVec; ++n) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[r][e] += p.x[n] * v[n].x[e];
      }
    }
  }
}

// f(r, n, place of the score in P_ij): a thread comes to its own scores only.
template <class Function>
__device__ __forceinline__ void for_scores(const Function& f) {
  const Lane lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kVec; ++n) f(r, n, P_at(lane, r, n * kRowLanes + lane.col));
  }
}

// Which keys of a tile a thread's rows see by position, counted from the tile's first key.
struct SeenKeys {
  int low;     // that the thread's row 0 sees first, if there is one
  int high;    // one behind its last
  int length;  // keys in use

  __device__ SeenKeys(const Head& head, const Lane& lane, int j0)
      : length(static_cast<int>(head.band.seqlen_k) - j0) {
    constexpr int kFar = 1 << 30;  // lengths and limits of windows are less
    const int diagonal = head.work.i0 + lane.tile_row(0) + static_cast<int>(head.band.offset) - j0;
    low = head.band.left < 0 ? -kFar : diagonal - static_cast<int>(head.band.left);
    high = head.band.right < 0 ? kFar : diagonal + static_cast<int>(head.band.right) + 1;
  }

  __device__ __forceinline__ bool operator()(int r, int key) const {
    return key >= low + r * kLaneRows && key < min(high + r * kLaneRows, length);
  }
};

// Softcap, bias, ALiBi and masks: turns products into scores, and says which keys the warp sees.
// By way of SRAM, since a loop over registers would have to be unrolled, tanh and all.
__device__ __forceinline__ void modify_scores(Sums& S, Sram& sram, int j0) {
  const Lane lane;
  // Here in registers, or every store to P_ij would have them read again.
  const Band band = sram.head.band;
  const ScoreModifier modify = sram.head.modify;
  const SeenKeys seen_keys(sram.head, lane, j0);
  const int i = sram.head.work.i0 + lane.tile_row(0);
  const int i_end = sram.head.work.i0 + sram.head.rows;
  for_scores([&](int r, int n, int at) { sram.P[at] = S[r][n]; });
  unsigned any = 0;
#pragma unroll 1
  for (int r = 0; r < kRows && i + r * kLaneRows < i_end; ++r) {
#pragma unroll 1
    for (int n = 0; n < kVec; ++n) {
      const int key = n * kRowLanes + lane.col;
      acc& score = sram.P[P_at(lane, r, key)];
      bool seen = seen_keys(r, key);
      score = seen ? modify(score, i + r * kLaneRows, j0 + key, band, seen) : kMinusInfinity;
      any |= (seen ? 1u : 0u) << n;
    }
  }
  for_scores([&](int r, int n, int at) { S[r][n] = sram.P[at]; });
#pragma unroll
  for (int lanes = kRowLanes; lanes < kWarpSize; lanes *= 2) {
    any |= __shfl_xor_sync(kFullWarp, any, lanes);
  }
  if (lane.row == 0) {
#pragma unroll
    for (int n = 0; n < kVec; ++n) sram.seen[lane.warp][n * kRowLanes + lane.col] = any >> n & 1;
  }
}

// The same where nothing but position hides a key.
__device__ __forceinline__ void scale_scores(Sums& S, const Sram& sram, int j) {
  const Lane lane;
  const acc scale = sram.head.modify.scale;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kVec; ++n) S[r][n] *= scale;
  }
  if (j >= sram.head.unmasked.begin && j < sram.head.unmasked.end) return;
  const SeenKeys seen(sram.head, lane, j * kBc);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kVec; ++n) {
      if (!seen(r, n * kRowLanes + lane.col)) S[r][n] = kMinusInfinity;
    }
  }
}

// What is known of each row is kept by the lanes that share it, each for one of their rows.
constexpr int kKeepers = kRowLanes / kRows;  // lanes that keep the same row

// The number of the row that a lane keeps.
__device__ __forceinline__ int kept_row(const Lane& lane) { return lane.col / kKeepers; }

// What is kept of row r.
__device__ __forceinline__ acc of_row(acc kept, const Lane& lane, int r) {
  return __shfl_sync(kFullWarp, kept, lane.row * kRowLanes + r * kKeepers);
}

// Sums of rows over the lanes that share them; each lane gets that of the row that it keeps. In
// each step a lane gives away half of its rows and adds what it gets of the others.
__device__ __forceinline__ acc row_sums(acc (&x)[kRows], const Lane& lane) {
  int lanes = kRowLanes / 2;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2, lanes /= 2) {
    const bool upper = lane.col & lanes;
#pragma unroll
    for (int r = 0; r < half; ++r) {
      const acc other = __shfl_xor_sync(kFullWarp, upper ? x[r] : x[r + half], lanes);
      x[r] = (upper ? x[r + half] : x[r]) + other;
    }
  }
#pragma unroll
  for (; lanes > 0; lanes /= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], lanes);
  return x[0];
}

// The running (m, l) of the row that a lane keeps.
struct Statistics {
  acc m = kMinusInfinity;
  acc l = 0;
};

// The running softmax: folds S into (m, l), rescales O and leaves the weights in P_ij.
__device__ __forceinline__ void fold_scores(const Sums& S, Statistics& stats, Sums (&O)[kGroups],
                                            Sram& sram) {
  const Lane lane;
  const acc m_kept = stats.m;
  acc sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const acc m_old = of_row(m_kept, lane, r);
    acc m = m_old;
#pragma unroll
    for (int n = 0; n < kVec; ++n) m = S[r][n] > m ? S[r][n] : m;
    m = warp_max<kRowLanes>(m);
    const acc base = exponent_base(m);
    const acc keep = exp_nat(m_old - base);  // 0 where nothing was seen yet, as l and O are
    sums[r] = 0;
#pragma unroll
    for (int n = 0; n < kVec; ++n) {
      const acc p = exp_nat(S[r][n] - base);
      sram.P[P_at(lane, r, n * kRowLanes + lane.col)] = p;
      sums[r] += p;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) O[g][r][e] *= keep;
    }
    if (kept_row(lane) == r) {
      stats.m = m;
      stats.l *= keep;
    }
  }
  stats.l += row_sums(sums, lane);
}

// A lane's columns of one row; those from `left` on are another's.
template <class T>
__device__ __forceinline__ void store_columns(T* to, int64 col, const Vec16<acc>& values, int left,
                                              bool vectors) {
  struct alignas(kVec * sizeof(T)) Out {
    T x[kVec];
  };
  Out out;
#pragma unroll
  for (int e = 0; e < kVec; ++e) out.x[e] = from_acc<T>(values.x[e]);
  if (vectors && left >= kVec) {
    *reinterpret_cast<Out*>(to) = out;
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (e < left) to[e * col] = out.x[e];
    }
  }
}

// Registers have no index: f(g) for the g that is `group`.
template <class Function>
__device__ __forceinline__ void for_group(int group, const Function& f) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g == group) f(g);
  }
}

// O / l and lse: to the result or, being those of one part of the keys, to the workspace.
__device__ __forceinline__ void finish(Sums (&O)[kGroups], const Statistics& stats, Sram& sram,
                                       const SimtParams& params) {
  const Lane lane;
  const Head& head = sram.head;
  const Problem& problem = params.problem;
  const bool partial = params.splits > 1;
  const bool empty = stats.l == acc(0);
  const acc factor_kept = empty ? acc(0) : acc(1) / stats.l;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const acc factor = of_row(factor_kept, lane, r);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      // A row that sees nothing is 0, even where a neighbour's NaN came into its sums.
      for (int e = 0; e < kVec; ++e) O[g][r][e] = factor == acc(0) ? acc(0) : O[g][r][e] * factor;
    }
  }
  if (lane.col % kKeepers == 0 && head.work.slice == 0 && (partial || head.lse)) {
    const int row = lane.tile_row(kept_row(lane));
    if (row < head.rows) {
      const acc lse = empty ? kMinusInfinity : stats.m + log(stats.l);
      (partial ? head.partial_lse[row] : head.lse[row * problem.lse.row]) = lse;
    }
  }

  __syncwarp();  // the weights of this warp's rows are no longer read
#pragma unroll 1
  for (int group = 0; group * kGroup < head.dv; ++group) {
    const auto place = [&](int r) {
      return reinterpret_cast<Vec16<acc>*>(sram.P + lane.tile_row(r) * kBc + lane.col * kVec);
    };
    for_group(group, [&](int g) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Vec16<acc> values;
#pragma unroll
        for (int e = 0; e < kVec; ++e) values.x[e] = O[g][r][e];
        *place(r) = values;
      }
    });
    const int64 col = group * kGroup + lane.col * kVec;
    const int left = head.dv - static_cast<int>(col);
    // By way of SRAM, which has an index: a thread finds what it wrote itself.
#pragma unroll 1
    for (int r = 0; r < kRows && lane.tile_row(r) < head.rows; ++r) {
      const int64 row = lane.tile_row(r);
      if (partial) {
        store_columns(head.partial_O + row * problem.head_dim_v + col, 1, *place(r), left, false);
      } else {
        store_columns(head.o + row * problem.o.row + col * problem.o.col, problem.o.col, *place(r),
                      left, params.o_vectors);
      }
    }
  }
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kThreads, cupyflash::kBlocks)
    forward_simt(const __grid_constant__ cupyflash::SimtParams params) {
  using namespace cupyflash;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Sram& sram = *reinterpret_cast<Sram*>(shared_memory);

  const Head& head = sram.head;
  if (threadIdx.x == 0) sram.head = Head(params, Work(params, blockIdx.x));
  __syncthreads();  // the head is there

  const int chunks = static_cast<int>(ceil_div(params.problem.head_dim, int64(kHeadDim)));
  // Of a tile past the work's last one, keys are loaded in vain or, where there are none, not read.
  Piece pieces[kPieces];
  const auto load_scores = [&](int j, int chunk) {
    const int x = chunk * kHeadDim;
    const int there = at_most(params.problem.head_dim - x, kHeadDim);
    const int j0 = j * kBc;
    CarriedQ::load(pieces, params.problem.q.data, head.Q, 0, x, 0, head.rows, there);
    CarriedK::load(pieces + CarriedQ::kPieces, params.problem.k.data, head.K, j0, x,
                   head.keys_begin - j0, head.keys_end - j0, there);
  };
  const auto load_values = [&](int j, int group, int chunk) {
    const int key0 = j * kBc + chunk * kKeys;
    const int col0 = group * kGroup;
    CarriedV::load(pieces, params.problem.v.data, head.V, key0, col0, head.keys_begin - key0,
                   head.keys_end - key0, head.dv - col0);
  };

  Sums O[kGroups] = {};
  Statistics stats;
  // Warps past the last row have nothing to compute.
  const bool busy = Lane().warp * kWarpRows < head.rows;

  int buffer = 0;
  if (head.tiles.begin < head.tiles.end) load_scores(head.tiles.begin, 0);
#pragma unroll 1
  for (int j = head.tiles.begin; j < head.tiles.end; ++j) {
    Sums S = {};
    bool folded = false;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      CarriedQ::store(pieces, sram.stage[buffer], kLd);
      CarriedK::store(pieces + CarriedQ::kPieces, sram.K(buffer), kLd);
      __syncthreads();  // the chunk is there, and the one before is no longer read
      const bool more = chunk + 1 < chunks;
      if (more || head.dv == 0) {
        load_scores(more ? j : j + 1, more ? chunk + 1 : 0);
      } else {
        load_values(j, 0, 0);
      }
      if (busy) {
        multiply_scores(S, sram.stage[buffer], sram.K(buffer));
        if ((chunk + 1) * kHeadDim % kFold == 0 && more) {
          // P_ij is free by now. A thread comes back to its own scores.
          for_scores([&](int r, int n, int place) {
            sram.P[place] = folded ? sram.P[place] + S[r][n] : S[r][n];
            S[r][n] = 0;
          });
          folded = true;
        }
      }
      buffer ^= 1;
    }

    if (busy) {
      if (folded) for_scores([&](int r, int n, int place) { S[r][n] += sram.P[place]; });
      if constexpr (kGeneral) {
        modify_scores(S, sram, j * kBc);
      } else {
        scale_scores(S, sram, j);
      }
      fold_scores(S, stats, O, sram);
    }

    const int key_chunks = ceil_div(at_most(head.keys_end - j * kBc, kBc), kKeys);
#pragma unroll 1
    for (int group = 0; group * kGroup < head.dv; ++group) {
      Sums sum = {};
#pragma unroll 1
      for (int chunk = 0; chunk < key_chunks; ++chunk) {
        CarriedV::store(pieces, sram.stage[buffer], kGroup);
        __syncthreads();  // the chunk and the weights are there, the chunk before is not read
        const bool more = chunk + 1 < key_chunks;
        if (more || (group + 1) * kGroup < head.dv) {
          load_values(j, more ? group : group + 1, more ? chunk + 1 : 0);
        } else {
          load_scores(j + 1, 0);
        }
        if (busy) multiply_values(sum, sram, sram.stage[buffer], chunk * kKeys);
        buffer ^= 1;
      }
      for_group(group, [&](int g) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) O[g][r][e] += sum[r][e];
        }
      });
    }
  }
  if (busy) finish(O, stats, sram, params);
}
