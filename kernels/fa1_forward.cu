// SPDX-License-Identifier: MIT
// fa1_forward.cu: FlashAttention-1 forward, to be read beside the paper.
// Source     Dao et al. 2022, arXiv:2205.14135, Algorithm 1; "line n" in comments is its line n.
//            Departures: scores are scaled, capped, biased and masked; tiles that position hides
//            are skipped; the last tiles may be ragged; the Tr query blocks may be divided among
//            thread blocks, since their O_i, l_i, m_i never meet.
// Computes   O = softmax(softmax_scale * Q K^T + bias) V, row-wise, and lse = m + ln(l) in nats.
// Shapes     Q, O (batch, heads_q, seqlen_q, d or dv); K, V (batch, heads_k, seqlen_k, d or dv).
//            Any strides. l, m (batch, heads_q, seqlen_q), contiguous. For 16-bit elements O lives
//            in a contiguous float array until its last step, which rounds it once into o.
// Tiles      Q_i Br x d, O_i Br x dv, K_j Bc x d, V_j Bc x dv, S_ij Br x Bc; Tr = ceil(seqlen_q /
//            Br), Tc = ceil(seqlen_k / Bc). Br, Bc, d and dv are run-time numbers: any M will do.
// Grid       blocks walk over (batch entry, head, chunk), chunk fastest. Chunk c of C owns the
//            query blocks i = c, c + C, ...: neighbours in a chunk differ in causal work by little.
//            C = 1 is the paper's own loop.
// Ownership  512 threads. In both products a warp owns strips of kRows rows by 32 * n columns, a
//            lane every 32nd column of it; in the softmax a warp owns whole rows. Four barriers a
//            step, each named where it stands, keep the phases apart.
// SRAM       addresses; K_j, V_j, Q_i, O_i, S_ij, four numbers a row and, if masks are
//            possible, a flag a key, all accumulators (float, double for double): see Sram and
//            tiling.py.
// HBM        O_i, l_i, m_i are read and written in every step (i, j): that is Algorithm 1.
// Limits     what fits the SRAM; nothing else.
#include "common/config.cuh"
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/params.cuh"

namespace cupyflash {

struct Fa1Params {
  Problem problem;
  void* O;  // acc; problem.o itself unless the element is a 16-bit type
  acc* l;   // (batch, heads_q, seqlen_q)
  acc* m;   // (batch, heads_q, seqlen_q)
  int64 Br;
  int64 Bc;
  int64 chunks;  // C: thread blocks that share the Tr query blocks of one head
};

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVec = Vec16<acc>::kSize;
// A strip of 8 rows by 4 (double: 2) columns a lane reuses each value from SRAM often enough for
// the FMA units to be the limit, and leaves registers for 16 warps, which hide the latencies: 8
// warps with wider strips took 1.5 times as long.
constexpr int kRows = 8;
constexpr int kMaxCols = 16 / sizeof(acc);
constexpr bool kOutIsAcc = is_same<element, acc>::value;

// What a thread block works on: one (batch entry, head).
struct Head {
  Band band;
  ScoreModifier modify;
  const element *Q, *K, *V;
  element* out;
  acc* O;  // out itself where elements are accumulators, else the contiguous workspace
  int64 O_row, O_col;
  acc *l, *m;
  acc* lse;                    // null if it is not wanted
  int64 keys_begin, keys_end;  // the keys that any query sees
  int chunk;                   // whose query blocks are this thread block's
  int Tr;

  __device__ Head(const Fa1Params& params, int64 work)
      : Head(params, HeadIndex(params.problem, work / params.chunks)) {
    chunk = static_cast<int>(work % params.chunks);
    Tr = static_cast<int>(ceil_div(params.problem.seqlen_q, params.Br));  // lines 3 and 4
  }

  __device__ Head(const Fa1Params& params, const HeadIndex& at)
      : band(params.problem, at.seqlen_k(params.problem)), modify(params.problem, at) {
    const Problem& problem = params.problem;
    Q = static_cast<const element*>(problem.q.data) + at.offset(problem.q, at.head_q);
    K = static_cast<const element*>(problem.k.data) + at.offset(problem.k, at.head_k);
    V = static_cast<const element*>(problem.v.data) + at.offset(problem.v, at.head_k);
    out = static_cast<element*>(problem.o.data) + at.offset(problem.o, at.head_q);
    lse = problem.lse.data ? static_cast<acc*>(problem.lse.data) + at.offset(problem.lse, at.head_q)
                           : nullptr;
    const int64 first_row = (at.entry * problem.heads_q + at.head_q) * problem.seqlen_q;
    l = params.l + first_row;
    m = params.m + first_row;
    keys_begin = band.first(0);
    keys_end = problem.seqlen_q > 0 ? band.end(problem.seqlen_q - 1) : 0;
    O_row = kOutIsAcc ? problem.o.row : problem.head_dim_v;
    O_col = kOutIsAcc ? problem.o.col : 1;
    O = static_cast<acc*>(params.O) +
        (kOutIsAcc ? at.offset(problem.o, at.head_q) : first_row * problem.head_dim_v);
  }
};

// Where the tiles lie, behind Addresses; tiling.py counts the same terms.
struct Sram {
  int ldk;  // odd multiple of 16 bytes: lanes that read a column of K_j meet no bank twice
  int ldq;
  int lds;
  acc *K, *V, *Q, *O, *S;
  acc *m, *l;        // m_i, l_i of line 8
  acc *keep, *take;  // line 12's factors of O_i and of P_ij V_j
  int* seen;         // whether any row of this tile sees the key; general variants only

  __device__ Sram(acc* base, int Br, int Bc, int d, int dv) {
    ldq = round_up(d, kVec);
    ldk = (ldq / kVec) % 2 ? ldq : ldq + kVec;
    lds = round_up(Bc, kVec);
    K = base;
    V = K + Bc * ldk;
    Q = V + round_up(lds * dv, kVec);
    const int strips = round_up(Br, kRows);  // a strip reads rows past Br, and drops what they give
    O = Q + strips * ldq;
    S = O + round_up(Br * dv, kVec);
    m = S + strips * lds;
    l = m + Br;
    keep = l + Br;
    take = keep + Br;
    seen = reinterpret_cast<int*>(take + Br);
  }
};

// The first bytes of SRAM. In registers they would crowd out the sums.
struct Addresses {
  Head head;
  Sram sram;
};

constexpr int kAddressBytes = 384;
static_assert(sizeof(Addresses) <= kAddressBytes, "tiling.py counts kAddressBytes");

struct Thread {
  int warp = threadIdx.x / kWarpSize;
  int lane = threadIdx.x % kWarpSize;
};

// x held within 0 .. limit.
__device__ __forceinline__ int within(int64 x, int limit) {
  return static_cast<int>(x < 0 ? 0 : x > limit ? limit : x);
}

// The power of two, 32 at most, that takes n columns to lanes.
__device__ __forceinline__ int lanes_for(int n) {
  int lanes = 1;
  while (lanes < n && lanes < kWarpSize) lanes *= 2;
  return lanes;
}

// tile[r][c] = source[r][c] for begin <= r < end and c < cols; 0 in the rest of rows x ld_used.
template <class T>
__device__ void load_tile(acc* tile, int ld, int ld_used, int rows, const T* source, int64 row,
                          int64 col, int begin, int end, int cols) {
  constexpr int kInFlight = 16 / sizeof(acc);  // loads of a thread before the first is waited for
  const Thread thread;
  const int lanes = lanes_for(ld_used);
  const int rows_per_pass = kWarps * (kWarpSize / lanes);
  const int r0 = thread.warp * (kWarpSize / lanes) + thread.lane / lanes;
  const int64 pass_step = rows_per_pass * row;
#pragma unroll 1
  for (int r = r0; r < rows; r += rows_per_pass * kInFlight) {
#pragma unroll 1
    for (int c = thread.lane % lanes; c < ld_used; c += lanes) {
      const T* const from = source + r * row + c * col;
      acc value[kInFlight];
#pragma unroll
      for (int n = 0; n < kInFlight; ++n) {
        const int at = r + n * rows_per_pass;
        value[n] = at >= begin && at < end && c < cols ? to_acc(from[n * pass_step]) : acc(0);
      }
#pragma unroll
      for (int n = 0; n < kInFlight; ++n) {
        const int at = r + n * rows_per_pass;
        if (at < rows) tile[at * ld + c] = value[n];
      }
    }
  }
}

template <int n>
struct Int {
  static constexpr int value = n;
};

// Divides a tile of rows x col_groups * lanes into strips, as many as there are warps where that
// can be, and calls strip(Int<columns a lane>, first row, first column group) for the warp's own.
template <class Strip>
__device__ __forceinline__ void for_strips(int rows, int col_groups, const Strip& strip) {
  const int row_strips = ceil_div(rows, kRows);
  int per_row = ceil_div(col_groups, kMaxCols);
  const int wanted = ceil_div(kWarps, row_strips);
  if (per_row < wanted) per_row = wanted < col_groups ? wanted : col_groups;
  const int cols = ceil_div(col_groups, per_row);
  per_row = ceil_div(col_groups, cols);
#pragma unroll 1
  for (int s = Thread().warp; s < row_strips * per_row; s += kWarps) {
    const int row = s / per_row * kRows;
    const int group = s % per_row * cols;
    if (kMaxCols > 2 && cols > 2) {
      strip(Int<kMaxCols>(), row, group);
    } else if (cols == 2) {
      strip(Int<2>(), row, group);
    } else {
      strip(Int<1>(), row, group);
    }
  }
}

// Line 9: S_ij = Q_i K_j^T.
__device__ __forceinline__ void scores(const Sram& sram, int Br, int Bc) {
  const int lane = Thread().lane;
  for_strips(Br, ceil_div(Bc, kWarpSize), [&](auto columns, int row, int group) {
    constexpr int kCols = decltype(columns)::value;
    const int ldk = sram.ldk, ldq = sram.ldq, lds = sram.lds;
    const acc* const K = sram.K;
    const acc* const Q = sram.Q + row * ldq;
    acc* const S = sram.S + row * lds;
    acc sum[kRows][kCols] = {};
    // Columns past the tile repeat its last one, and are not stored.
    int K_row[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int col = (group + c) * kWarpSize + lane;
      K_row[c] = (col < Bc ? col : Bc - 1) * ldk;
    }
#pragma unroll 1
    for (int x = 0; x < ldq; x += kVec) {
      Vec16<acc> k[kCols];
#pragma unroll
      for (int c = 0; c < kCols; ++c) k[c] = load_vec16(K + K_row[c] + x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Vec16<acc> q = load_vec16(Q + r * ldq + x);
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[r][c] += q.x[e] * k[c].x[e];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int col = (group + c) * kWarpSize + lane;
        if (row + r < Br && col < Bc) S[r * lds + col] = sum[r][c];
      }
    }
  });
}

// Lines 10, 11 and 13, a warp a row: S_ij scaled, biased and masked, its m~, then P~ in its place,
// l~, m_new and l_new, and line 12's factors. i0 and j0 are the tile's first query and key.
__device__ __forceinline__ void statistics(const Sram& sram, const Head& head, int Br, int Bc,
                                           int rows, int64 i0, int64 j0, bool last, int64 lse_row) {
  const Thread thread;
  // In registers, or every store to S would have them read again.
  const Band band = head.band;
  const ScoreModifier modify = head.modify;
#pragma unroll 1
  for (int r = thread.warp; r < Br; r += kWarps) {
    const int lds = sram.lds;
    acc* const S = sram.S + r * lds;
    int* const any_seen = sram.seen;
    const int64 i = i0 + r;
    // The keys of this tile that row i sees by position. Rows past the last query see none.
    const int first = within(band.first(i) - j0, Bc);
    const int end = r < rows ? within(band.end(i) - j0, Bc) : 0;
    acc m_tile = kMinusInfinity;
#pragma unroll 2
    for (int c = thread.lane; c < Bc; c += kWarpSize) {
      acc s = kMinusInfinity;
      if (c >= first && c < end) {
        bool seen = true;
        s = modify(S[c], i, j0 + c, band, seen);
        if (kGeneral && seen) atomicOr(any_seen + c, 1);
      }
      S[c] = s;
      m_tile = s > m_tile ? s : m_tile;
    }
    m_tile = warp_max(m_tile);
    const acc base = exponent_base(m_tile);
    acc l_tile = 0;
#pragma unroll 4
    for (int c = thread.lane; c < lds; c += kWarpSize) {
      const acc p = c < Bc ? exp_nat(S[c] - base) : acc(0);
      S[c] = p;
      l_tile += p;
    }
    l_tile = warp_sum(l_tile);
    if (thread.lane == 0) {
      const acc m_old = sram.m[r];
      const acc m_new = m_old > m_tile ? m_old : m_tile;
      const acc base_new = exponent_base(m_new);
      const acc old_part = exp_nat(m_old - base_new) * sram.l[r];
      const acc tile_factor = exp_nat(m_tile - base_new);
      const acc l_new = old_part + tile_factor * l_tile;
      // l_new is 0 only if nothing was seen so far: O_i stays 0.
      sram.keep[r] = l_new == acc(0) ? acc(0) : old_part / l_new;
      sram.take[r] = l_new == acc(0) ? acc(0) : tile_factor / l_new;
      if (r < rows) {
        head.l[i] = l_new;
        head.m[i] = m_new;
        if (last && head.lse) head.lse[i * lse_row] = m_new + log(l_new);
      }
    }
  }
}

// Line 12: O_i <- diag(l_new)^-1 (diag(l_i) e^(m_i - m_new) O_i + e^(m~ - m_new) P~_ij V_j), the
// diagonals being in keep and take, written to HBM; at the last step of a 16-bit O, to the output.
// Where fewer than 32 columns are there, the lanes that would be idle share the keys.
__device__ __forceinline__ void accumulate(const Sram& sram, const Head& head, int Br, int dv,
                                           int rows, int64 i0, bool last, int64 out_row,
                                           int64 out_col) {
  if (dv == 0) return;
  const int lane = Thread().lane;
  const int lanes = lanes_for(dv);
  const int sharers = kWarpSize / lanes;
  for_strips(Br, ceil_div(dv, lanes), [&](auto columns, int row, int group) {
    constexpr int kCols = decltype(columns)::value;
    acc sum[kRows][kCols] = {};
    int col[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int at = (group + c) * lanes + lane % lanes;
      col[c] = at < dv ? at : dv - 1;
    }
    const int lds = sram.lds;
    const acc* const S = sram.S + row * lds;
    const acc* const V = sram.V;
    const int* const seen = sram.seen;
#pragma unroll 1
    for (int x = lane / lanes * kVec; x < lds; x += sharers * kVec) {
      acc v[kVec][kCols];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const bool use = !kGeneral || seen[x + e];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          // A hidden key's V may be NaN, and 0 * NaN is NaN.
          v[e][c] = use ? V[(x + e) * dv + col[c]] : acc(0);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Vec16<acc> p = load_vec16(S + r * lds + x);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int c = 0; c < kCols; ++c) sum[r][c] += p.x[e] * v[e][c];
        }
      }
    }
#pragma unroll 1
    for (int step = lanes; step < kWarpSize; step *= 2) {  // over the sharers
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) sum[r][c] += __shfl_xor_sync(kFullWarp, sum[r][c], step);
      }
    }
    __syncwarp();  // or the compiler would fetch what follows while the sums need the registers
    const int64 O_row = head.O_row, O_col = head.O_col;
    acc* const O = head.O + (i0 + row) * O_row;
    element* const out = head.out + (i0 + row) * out_row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= rows) break;
      const acc keep = sram.keep[row + r];
      const acc take = sram.take[row + r];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int at = (group + c) * lanes + lane;
        if (lane < lanes && at < dv) {
          const acc value = keep * sram.O[(row + r) * dv + at] + take * sum[r][c];
          if (!kOutIsAcc && last) {
            out[r * out_row + at * out_col] = from_acc<element>(value);
          } else {
            O[r * O_row + at * O_col] = value;
          }
        }
      }
    }
  });
}

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kThreads, 1)
    fa1_forward(const __grid_constant__ cupyflash::Fa1Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(16) unsigned char shared_memory[];

  const Problem& problem = params.problem;
  const int Br = static_cast<int>(params.Br);
  const int Bc = static_cast<int>(params.Bc);
  const int d = static_cast<int>(problem.head_dim);
  const int dv = static_cast<int>(problem.head_dim_v);
  const int chunks = static_cast<int>(params.chunks);
  Addresses& addresses = *reinterpret_cast<Addresses*>(shared_memory);
  Head& head = addresses.head;
  const Sram& sram = addresses.sram;
  if (threadIdx.x == 0) {
    addresses.sram = Sram(reinterpret_cast<acc*>(shared_memory + kAddressBytes), Br, Bc, d, dv);
  }

  const int64 works =
      problem.batch[0] * problem.batch[1] * problem.batch[2] * problem.heads_q * params.chunks;
  for (int64 work = blockIdx.x; work < works; work += gridDim.x) {
    __syncthreads();  // nobody works on the previous head any more
    if (threadIdx.x == 0) head = Head(params, work);
    __syncthreads();  // the head is there

    // The key blocks [begin, end) that query block i sees something of, by position.
    struct Blocks {
      int begin, end;
    };
    const auto blocks_seen = [&](int i) {
      const int64 i0 = i * params.Br;
      const int64 i1 = i0 + Br < problem.seqlen_q ? i0 + Br : problem.seqlen_q;
      const int64 first = head.band.first(i0);
      const int64 end = head.band.end(i1 - 1);
      return first < end
                 ? Blocks{static_cast<int>(first / Bc), static_cast<int>(ceil_div(end, params.Bc))}
                 : Blocks{0, 0};
    };

    // Line 2: O = 0, l = 0, m = -inf, in HBM.
    for (int i = head.chunk; i < head.Tr; i += chunks) {
      const Blocks seen = blocks_seen(i);
      const bool never = seen.begin == seen.end;  // no step will come to this block
      const int rows = static_cast<int>(
          problem.seqlen_q - i * params.Br < Br ? problem.seqlen_q - i * params.Br : Br);
      for (int r = Thread().warp; r < rows; r += kWarps) {
        const int64 row = i * params.Br + r;
        for (int c = Thread().lane; c < dv; c += kWarpSize) {
          head.O[row * head.O_row + c * head.O_col] = acc(0);
          if (!kOutIsAcc && never) {
            head.out[row * problem.o.row + c * problem.o.col] = from_acc<element>(acc(0));
          }
        }
        if (Thread().lane == 0) {
          head.l[row] = acc(0);
          head.m[row] = kMinusInfinity;
          if (head.lse && never) head.lse[row * problem.lse.row] = kMinusInfinity;
        }
      }
    }

    // Line 5, over the key blocks that any query sees.
    for (int j = static_cast<int>(head.keys_begin / Bc); j * params.Bc < head.keys_end; ++j) {
      const int64 j0 = j * params.Bc;
      bool loaded = false;
      for (int i = head.chunk; i < head.Tr; i += chunks) {  // line 7
        const Blocks seen = blocks_seen(i);
        if (j < seen.begin || j >= seen.end) continue;
        const bool last = j + 1 == seen.end;
        const int64 i0 = i * params.Br;
        const int rows = static_cast<int>(problem.seqlen_q - i0 < Br ? problem.seqlen_q - i0 : Br);

        // Line 12 of the previous step has read S, O, keep and take, and its O_i, l_i and m_i are
        // in HBM for whichever thread loads them now.
        __syncthreads();
        if (!loaded) {  // line 6. Keys that no query sees are zeros: nothing is multiplied by them.
          const int begin = within(head.keys_begin - j0, Bc);
          const int end = within(head.keys_end - j0, Bc);
          load_tile(sram.K, sram.ldk, sram.ldq, Bc, head.K + j0 * problem.k.row, problem.k.row,
                    problem.k.col, begin, end, d);
          load_tile(sram.V, dv, dv, sram.lds, head.V + j0 * problem.v.row, problem.v.row,
                    problem.v.col, begin, end, dv);
          loaded = true;
        }
        // Line 8.
        load_tile(sram.Q, sram.ldq, sram.ldq, Br, head.Q + i0 * problem.q.row, problem.q.row,
                  problem.q.col, 0, rows, d);
        load_tile(sram.O, dv, dv, Br, head.O + i0 * head.O_row, head.O_row, head.O_col, 0, rows,
                  dv);
        for (int r = threadIdx.x; r < Br; r += kThreads) {
          sram.l[r] = r < rows ? head.l[i0 + r] : acc(0);
          sram.m[r] = r < rows ? head.m[i0 + r] : kMinusInfinity;
        }
        if constexpr (kGeneral) {
          for (int c = threadIdx.x; c < sram.lds; c += kThreads) sram.seen[c] = 0;
        }
        __syncthreads();  // the tiles are there

        scores(sram, Br, Bc);
        __syncthreads();  // S_ij is whole

        statistics(sram, head, Br, Bc, rows, i0, j0, last, problem.lse.row);
        __syncthreads();  // P~_ij, keep and take are there

        accumulate(sram, head, Br, dv, rows, i0, last, problem.o.row, problem.o.col);
      }
    }
  }
}
