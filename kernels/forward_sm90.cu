// SPDX-License-Identifier: MIT
// forward_sm90.cu: attention forward on Hopper: TMA, wgmma, warpgroups with roles.
// Source     Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2, for the
//            pipeline; the running softmax is Algorithm 1 of Dao 2023, arXiv:2307.08691.
// Computes   O = softmax(softmax_scale * Q K^T) V, row-wise, and lse in nats; keys are hidden by
//            length, causal mask or window. softmax_scale > 0. Softcap, ALiBi, bias and mask: see
//            Options.
// Shapes     Q, O (batch, heads_q, seqlen_q, d or dv); K, V (batch, heads_k, seqlen_k, d or dv), of
//            float16 or bfloat16; Q, K, V as TMA takes them: columns contiguous, the other strides
//            multiples of 16 bytes and not negative. d and dv up to kHeadDim, kHeadDimV: what TMA
//            reads outside the arrays are zeros.
// Tiles      Q_i Br x d, 64 rows for each consumer; K_j, V_j Bc x d, dv, kStages of each.
// Grid       as many thread blocks as multiprocessors, each taking works (head, i): see
//            tile_scheduler.cuh. All keys of a work are visited by one block, from the last tile to
//            the first: the result does not depend on who takes it.
// Roles      warpgroup 0, the producer: warp 0 takes works, warp 1 loads Q and K, warp 2 loads V,
//            warp 3 bias or mask.
//            Warpgroups 1 to kConsumers: S = Q K^T, softmax, O += P V for 64 queries each; S, P
//            and O live in their registers, which the producer gives up.
// SRAM       kQStages of Q_i, kStages of K_j and V_j, kScoreStages of bias or mask for each
//            consumer, all swizzled; kWorkStages descriptions of works; mbarriers: struct Shared.
// Pipeline   the tiles of all works are one stream. A consumer's step t: S_t = Q K_t^T and O +=
//            P_t-1 V_t-1 are started together; the softmax of S_t runs while the second product
//            does. Where t-1 was a work's last tile, O goes out at the end of the step. Maxima of
//            rows are looked for in the first tile of a work and in those that position masks; in
//            all of them beside ALiBi that is not causal, and beside a bias that leaves no
//            registers: see FragmentSoftmax. A consumer passes by the tiles that none of its
//            queries sees. With ping-pong, the consumers start their products in turn, so that
//            one's softmax runs under the other's:
//              consumer 1   [QK PV]softmax ......[QK PV]softmax
//              consumer 2   ......[QK PV]softmax ......[QK PV]softmax
// Barriers   X_full (X = Q, K, V): a producer warp's arrival and TMA's bytes; consumers wait for it
//            before they read X. Without it they would read the tile before.
//            X_empty: every consumer warp arrives when its products that read X are complete, and,
//            of Q and K, when no row needs its scores once more; the producer warp waits for it
//            before it loads over X.
//            work_full, work_empty: the same for the description of a work, written by warp 0.
//            work_wanted: warp 1 has nearly started all loads of a work; warp 0 takes the next one.
//            V_landed: warp 2 waits for its own load where it has to overwrite rows of V.
//            scores_full, scores_empty: as those of K, for a consumer's own tile of bias or mask;
//            see sm90_score_arrays.cuh.
//            Turn (named barrier 1 + c): consumer c waits for consumer c - 1 to have started its
//            products. It orders only the use of the tensor cores: without it results are the same.
// Options    CUPYFLASH_GENERAL = 1 adds softcap (tanh.approx: 2^-11 of the cap) and ALiBi between
//            the product and the softmax. CUPYFLASH_SCORE_ARRAY = bias or mask adds that array, of
//            the inputs' dtype or of bytes, behind them.
// Rounding   ex2.approx for weights, __fdividef and __log2f once a row: 2^-22, far below what P and
//            O lose in 16 bits.
// Limits     head dims up to 256, sequences of less than 2^30, less than 2^31 works.
//            softmax_scale, the cap and their ratio within 2^-100 to 2^100, 2^-20 to 2^20 with
//            ALiBi. A bias or a mask, not both; as TMA takes it: columns contiguous, the other
//            strides multiples of 16 bytes and not negative, 0 where it is broadcast.
//            V is in shared memory for all rows: a NaN in a row of V that some query of the block
//            sees reaches the others.
#include "common/fragment_softmax.cuh"
#include "common/sm90_layout.cuh"
#include "common/sm90_producer.cuh"
#include "common/sm90_score_arrays.cuh"
#include "common/store_fragment.cuh"
#include "common/uniform.cuh"
#include "common/warp_scores.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pin.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tanh.cuh"
#include "ptx/wgmma.cuh"

namespace cupyflash {

constexpr int kScores = kBc / 2;  // floats of a thread: 64 x Bc over 128 threads
constexpr int kOutputs = kHeadDimV / 2;

// From one stage's descriptor to the next one's.
constexpr int kQStep = kConsumers * QTile::kBytes / 16;
constexpr int kKStep = KTile::kBytes / 16;
constexpr int kVStep = VTile::kBytes / 16;

// S = Q K^T, started.
__device__ __forceinline__ void start_scores(float (&S)[kScores], unsigned long long Q,
                                             unsigned long long K) {
  wgmma<kMma, false, false>(S, Q, K);
#pragma unroll
  for (int k = 1; k < kHeadDim / 16; ++k) {
    wgmma<kMma, true, false>(S, Q + QTile::columns_step(k), K + KTile::columns_step(k));
  }
  wgmma_commit();
}

// O += P V, started.
__device__ __forceinline__ void start_outputs(float (&O)[kOutputs],
                                              const unsigned (&P)[kBc / 16][4],
                                              unsigned long long V) {
#pragma unroll
  for (int k = 0; k < kBc / 16; ++k) wgmma<kMma, true, true>(O, P[k], V + VTile::rows_step(k));
  wgmma_commit();
}

// Three consumers have no registers for a bias in the loop without maxima.
constexpr bool kHasSteadyTiles = !kHasBias || kConsumers == 2;
// After rows have outgrown their maxima, so many tiles are folded with new ones: scores that go on
// to grow cost a few products of a warp's own in a work, not one for each tile.
constexpr int kWaryTiles = 12;

// A number as a type, for lambdas to take one that is known to the compiler.
template <int n>
struct Number {
  __device__ constexpr operator int() const { return n; }
};

// One consumer, as its threads see it.
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Sm90Params& params, Shared& shared)
      : params_(params),
        problem_(params.problem),
        shared_(shared),
        c_(warp_uniform(threadIdx.x / kWarpgroup - 1)),
        slope_(static_cast<float>((kHasBias ? 1.0 : score_unit(problem_)) * 1.4426950408889634)),
        to_cap_(kGeneral && problem_.softcap != 0
                    ? static_cast<float>(problem_.softmax_scale / problem_.softcap)
                    : 0.0f) {}

  __device__ __forceinline__ void run() {
    // The last consumer lets the first one begin.
    if (kPingPong && c_ == kConsumers - 1) named_barrier_arrive(kFirstTurn, 2 * kWarpgroup);

    unsigned works = 0;    // before the one whose scores are made
    unsigned Q_tiles = 0;  // the same of works that see keys
    unsigned tiles = 0;    // of K and V, before the one whose weights P holds
    float S[kScores];
    float O[kOutputs];
    unsigned P[kBc / 16][4];
    float keep[kFragmentRows];
    FragmentSoftmax softmax;
    const auto Q_matrix = [&](unsigned n) {
      // Made anew for each tile: there are no registers to keep it in.
      const Turn<kQStages> turn(pin(n));
      const int c = kHasScoreArray ? pin(c_) : c_;
      return advanced(QTile::by_columns(shared_.Q[0][c]), turn.stage * kQStep);
    };
    const auto K_matrix = [&](unsigned t) {
      return advanced(KTile::by_columns(shared_.K[0]), Turn<kStages>(t).stage * kKStep);
    };
    const auto V_matrix = [&](unsigned t) {
      return advanced(VTile::by_rows(shared_.V[0]), Turn<kStages>(t).stage * kVStep);
    };
    const auto take_turn = [&] { named_barrier_sync(kFirstTurn + turn(), 2 * kWarpgroup); };
    const auto pass_turn = [&] {
      const int next = turn() + 1;
      named_barrier_arrive(kFirstTurn + (next == kConsumers ? 0 : next), 2 * kWarpgroup);
    };
    // S = Q K_t+1^T and O += P V_t, started together, in this consumer's turn.
    const auto start_products = [&](unsigned t) {
      const unsigned long long Q = Q_matrix(Q_tiles), K = K_matrix(t + 1), V = V_matrix(t);
      if (kPingPong) take_turn();
      wgmma_fence();
      start_scores(S, Q, K);
      wait_for_V(t);
      wgmma_fence();  // the compiler wants one in each block of code, or it runs one at a time
      start_outputs(O, P, V);
      if (kPingPong) pass_turn();
    };
    // Scores of tile j, the t-th of all, complete but for `pending` younger products, become
    // weights; true if O is to be rescaled.
    const auto weigh = [&](auto pending, unsigned t, int j) {
      const SeenKeys seen = see_keys(t);
      wgmma_wait<pending>();
      wgmma_use(S);
      if constexpr (kGeneral) change(S, j * kBc, work(works));
      if constexpr (kHasScoreArray) take_array(S, t, seen, works);
      if constexpr (kHasBias) give_array_back(t);
      hide(S, j, work(works));
      const bool moved = softmax.fold(S, slope_, keep);
      // The weights are made before P V is complete, not after it: the compiler moves nothing
      // across both this use and the loop in a wait.
      wgmma_use(S);
      return moved;
    };
    // Waits until O += P V_t is complete.
    const auto receive_outputs = [&](unsigned t) {
      wgmma_wait<0>();
      wgmma_use(O);
      release(shared_.V_empty[Turn<kStages>(t).stage]);
    };
    // Tile j's K, and after a work's last tile its Q, may be loaded over.
    const auto release_operands = [&](unsigned t, int j, const Tiles& of_work) {
      release(shared_.K_empty[Turn<kStages>(t).stage]);
      if (j == of_work.begin) release(shared_.Q_empty[Turn<kQStages>(pin(Q_tiles)).stage][c_]);
    };
#pragma unroll 1
    for (;;) {
      // Nothing is in flight: the first work, or the one before has none to follow at once.
      Tiles of_work = tiles_of(works);
      if (of_work.begin > of_work.end) return;
      // Every tile takes a turn of each consumer, but those that follow nothing.
      bool in_turn = kPingPong && !work(works).fresh;
#pragma unroll 1
      for (; of_work.skipped > 0; --of_work.skipped, ++tiles) {
        if (in_turn) take_turn();
        if (in_turn) pass_turn();
        in_turn = kPingPong;
        wait_for_K(tiles);
        wait_for_V(tiles);
        if constexpr (kHasScoreArray) wait_for_array(tiles);
        __syncwarp();  // every lane has seen it come
        if constexpr (kHasScoreArray) release_array(tiles);
        release(shared_.K_empty[Turn<kStages>(tiles).stage]);
        release(shared_.V_empty[Turn<kStages>(tiles).stage]);
      }
      if (of_work.begin == of_work.end) {
        if (work(works).begin < work(works).end) {
          wait_for_Q(Q_tiles);
          __syncwarp();
          release(shared_.Q_empty[Turn<kQStages>(Q_tiles++).stage][c_]);
        }
        store_nothing(work(works));
        give_back(works++);
        continue;
      }
      int j = of_work.end - 1;
      int falls_from = kGeneral ? rows_fall_from(of_work) : 0;
      softmax = FragmentSoftmax();
      clear(O);
      wait_for_Q(Q_tiles);
      wait_for_K(tiles);
      {
        const unsigned long long Q = Q_matrix(Q_tiles), K = K_matrix(tiles);
        if (in_turn) take_turn();
        wgmma_fence();
        start_scores(S, Q, K);
        if (in_turn) pass_turn();
      }
      weigh(Number<0>(), tiles, j);
      release_operands(tiles, j, of_work);
      if (j > of_work.begin) wait_for_K(tiles + 1);
      pack_weights(S, P);

      // P holds the weights of tile j, O the sum over the tiles of its work before.
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        while (j > of_work.begin) {
          // As long as nothing is masked by position and the rows are steady.
          const bool steady =
              kHasSteadyTiles && (!kGeneral || j <= falls_from) && softmax.steady(slope_);
          int last = steady ? last_unmasked(j, work(works)) : j;
#pragma unroll 1
          while (j > last) {
            --j;
            start_products(tiles);
            const SeenKeys seen = see_keys(tiles + 1);
            wgmma_wait<1>();
            wgmma_use(S);
            if constexpr (kGeneral) change(S, pin(j) * kBc, work(works));
            if constexpr (kHasScoreArray) take_array(S, tiles + 1, seen, works);
            bool grown[kFragmentRows];
            const bool some = softmax.fold_steady(S, slope_, grown);
            wgmma_use(S);
            receive_outputs(tiles++);
            if (some) {
              remake(S, grown, Q_tiles, tiles, j * kBc, seen, work(works));
              softmax.fold_grown(S, slope_, grown, keep);
              scale_rows(O, keep);
              if (kGeneral) falls_from = j - kWaryTiles;
              if (kGeneral || !softmax.steady(slope_)) last = j;
            }
            if constexpr (kHasBias) give_array_back(tiles);
            release_operands(tiles, j, of_work);
            pack_weights(S, P);
            if (j > of_work.begin) wait_for_K(tiles + 1);
          }
          if (j > of_work.begin) {
            --j;
            start_products(tiles);
            const bool moved = weigh(Number<1>(), tiles + 1, j);
            release_operands(tiles + 1, j, of_work);
            if (j > of_work.begin) wait_for_K(tiles + 2);
            receive_outputs(tiles++);
            if (__any_sync(kFullWarp, moved)) scale_rows(O, keep);
            pack_weights(S, P);
          }
        }
        // The same from the last tile of a work to the first of the next.
        const unsigned finished = works;
        float scale[kFragmentRows];
        finish(softmax, scale, work(finished));
        softmax = FragmentSoftmax();
        of_work = tiles_of(++works);
        ++Q_tiles;
        const bool more = of_work.begin < of_work.end && of_work.skipped == 0;
        if (more) {
          j = of_work.end - 1;
          if (kGeneral) falls_from = rows_fall_from(of_work);
          wait_for_Q(Q_tiles);
          wait_for_K(tiles + 1);
          start_products(tiles);
          weigh(Number<1>(), tiles + 1, j);
          release_operands(tiles + 1, j, of_work);
          if (j > of_work.begin) wait_for_K(tiles + 2);
        } else {
          const unsigned long long V = V_matrix(tiles);
          wait_for_V(tiles);
          wgmma_fence();
          start_outputs(O, P, V);
        }
        receive_outputs(tiles++);
        if constexpr (kHasScoreArray) check(O, shared_.work[Turn<kWorkStages>(finished).stage]);
        store(O, scale, work(finished));
        give_back(finished);
        if (!more) break;
        clear(O);
        pack_weights(S, P);
      }
    }
  }

 private:
  static __device__ __forceinline__ void clear(float (&O)[kOutputs]) {
#pragma unroll
    for (int x = 0; x < kOutputs; ++x) O[x] = 0.0f;
  }

  __device__ __forceinline__ void wait_for_Q(unsigned n) const {
    const Turn<kQStages> turn(n);
    mbarrier_wait(shared_.Q_full[turn.stage][c_], turn.parity);
  }

  __device__ __forceinline__ void wait_for_K(unsigned n) const {
    const Turn<kStages> turn(n);
    mbarrier_wait(shared_.K_full[turn.stage], turn.parity);
  }

  __device__ __forceinline__ void wait_for_V(unsigned n) const {
    const Turn<kStages> turn(n);
    mbarrier_wait(shared_.V_full[turn.stage], turn.parity);
  }

  __device__ __forceinline__ void wait_for_array(unsigned n) const {
    const Turn<kScoreStages> turn(n);
    mbarrier_wait(shared_.scores_full[turn.stage][c_], turn.parity);
  }

  // This warp has done with a buffer. Its lanes are together.
  __device__ __forceinline__ void release(Mbarrier& empty) const {
    if (pin(threadIdx.x) % kWarpSize == 0) mbarrier_arrive(empty);
  }

  __device__ __forceinline__ void release_array(unsigned n) const {
    release(shared_.scores_empty[Turn<kScoreStages>(n).stage][c_]);
  }

  // c_, for barriers: beside bias or mask no register is left for what follows from it.
  __device__ __forceinline__ int turn() const {
    return kHasScoreArray ? pin(threadIdx.x) / kWarpgroup - 1 : c_;
  }

  // The thread's upper row in its tile of Br queries.
  __device__ __forceinline__ int row() const {
    const int thread = pin(threadIdx.x) - kWarpgroup;  // no register holds it through the loops
    return thread / kWarpSize * 16 + thread % kWarpSize / 4;
  }

  __device__ __forceinline__ const Work& work(unsigned n) const {
    return shared_.work[Turn<kWorkStages>(pin(n)).stage];  // few steps ask for it
  }

  // Of keys that a work visits: from end - 1 down to begin, after those that none of this
  // consumer's queries sees.
  struct Tiles {
    int begin;
    int end;
    int skipped;
  };

  // Waits for the description of work n.
  __device__ __forceinline__ Tiles tiles_of(unsigned n) const {
    const Turn<kWorkStages> turn(n);
    mbarrier_wait(shared_.work_full[turn.stage], turn.parity);
    const Work& found = work(n);
    const int end = warp_uniform(found.end_of[c_]);
    return {warp_uniform(found.begin), end, warp_uniform(found.end) - end};
  }

  __device__ __forceinline__ void give_back(unsigned n) const {
    __syncwarp();  // every lane has read it
    release(shared_.work_empty[Turn<kWorkStages>(n).stage]);
  }

  // The last of the tiles after j, going down, that all queries of this consumer see all of; j if
  // the next one is not of them.
  __device__ __forceinline__ int last_unmasked(int j, const Work& work) const {
    const bool next = j > work.unmasked_begin[c_] && j <= work.unmasked_end[c_];
    return warp_uniform(next ? work.unmasked_begin[c_] : j);
  }

  __device__ __forceinline__ bool alibi() const { return kGeneral && problem_.alibi_slopes.data; }

  // Products of the keys from `first_key` on become scores: softcap, then ALiBi.
  template <int n>
  __device__ __forceinline__ void change(float (&S)[n], int first_key, const Work& work) const {
    if (to_cap_ != 0.0f) {
#pragma unroll
      for (int x = 0; x < n; ++x) S[x] = tanh_approx(S[x] * to_cap_);
    }
    if (alibi()) {
      const int first_column = first_key + pin(threadIdx.x) % 4 * 2;
      const float slope = work.alibi;
      const float diagonal[] = {static_cast<float>(work.diagonal + row() - first_column),
                                static_cast<float>(work.diagonal + row() + 8 - first_column)};
#pragma unroll
      for (int x = 0; x < n; ++x) {
        const float distance = diagonal[x / 2 % 2] - static_cast<float>(x / 4 * 8 + x % 2);
        S[x] = fmaf(-slope, fabsf(distance), S[x]);
      }
    }
  }

  // The tile from which, going down, rows are not expected to outgrow their maxima. Those of ALiBi
  // rise all the way to the diagonal; behind it, with maxima in some tiles only, the others gain
  // less than the change of loops costs.
  __device__ __forceinline__ int rows_fall_from(const Tiles& tiles) const {
    return !alibi() || problem_.window_right == 0 ? tiles.end : -1;
  }

  // This consumer's t-th tile of mask, as bits; it is given back.
  __device__ __forceinline__ SeenKeys see_keys(unsigned t) const {
    SeenKeys seen{};
    if constexpr (kHasMask) {
      wait_for_array(t);
      seen = read_mask<kScores>(score_tile(t), params_.score_rows == 1);
      give_array_back(t);
    }
    return seen;
  }

  // The t-th tile of bias changes S, of work n, or that of mask hides keys.
  __device__ __forceinline__ void take_array(float (&S)[kScores], unsigned t, const SeenKeys& seen,
                                             unsigned n) const {
    if constexpr (kHasBias) {
      wait_for_array(t);
      const unsigned char* const tile = score_tile(t);
      add_bias(S, tile, params_.score_rows == 1, work(n).unit);
      if (work(n).careful) hide_by_bias(S, tile, params_.score_rows == 1);
    } else {
      hide_by_mask(S, seen);
    }
  }

  __device__ __forceinline__ const unsigned char* score_tile(unsigned t) const {
    return shared_.score_tile(Turn<kScoreStages>(t).stage, c_);
  }

  __device__ __forceinline__ void give_array_back(unsigned t) const {
    __syncwarp();  // all lanes have read the tile
    release_array(t);
  }

  // Asks for a work to be done again, with care, if its O is not finite.
  static __device__ __forceinline__ void check(const float (&O)[kOutputs], Work& work) {
    float zero = 0.0f;
#pragma unroll
    for (int x = 0; x < kOutputs; ++x) zero = fmaf(O[x], 0.0f, zero);
    if (zero != 0.0f && !work.careful) atomicOr(&work.redo, 1);
  }

  // The scores of rows that have grown, where S holds weights: of the t-th tile of K, whose keys
  // are from first_key on, and the n-th of Q.
  __device__ __forceinline__ void remake(float (&S)[kScores], const bool (&grown)[kFragmentRows],
                                         unsigned n, unsigned t, int first_key,
                                         const SeenKeys& seen, const Work& work) const {
    const int warp = pin(threadIdx.x) / kWarpSize % 4;
    const WarpScores scores(shared_.Q[Turn<kQStages>(n).stage][c_], 16 * warp,
                            shared_.K[Turn<kStages>(t).stage]);
#pragma unroll 1
    for (int k = 0; k < kBc / 8; ++k) {
      float fresh[4];
      scores.make(fresh, 8 * k);
      if constexpr (kGeneral) change(fresh, first_key + 8 * k, work);
      if constexpr (kHasBias) {
        take_bias(fresh, score_tile(t), params_.score_rows == 1, k, work.unit);
      }
      if constexpr (kHasMask) take_mask(fresh, seen, k);
#pragma unroll
      for (int x = 0; x < 4; ++x) fresh[x] = grown[x / 2] ? fresh[x] : S[x];
#pragma unroll
      for (int x = 0; x < kScores - 4; ++x) S[x] = S[x + 4];
#pragma unroll
      for (int x = 0; x < 4; ++x) S[kScores - 4 + x] = fresh[x];
    }
  }

  // Scores of tile j that position hides become -inf. Most tiles that are masked are so on one
  // side.
  __device__ __forceinline__ void hide(float (&S)[kScores], int j, const Work& work) const {
    const int first_column = j * kBc + pin(threadIdx.x) % 4 * 2;
    if (j >= work.unmasked_end[c_]) {
      int end[kFragmentRows];
#pragma unroll
      for (int r = 0; r < kFragmentRows; ++r) {
        const int key = work.end_key + row() + 8 * r;
        end[r] = (key < work.seqlen_k ? key : work.seqlen_k) - first_column;
      }
      hide_from(S, end);
    }
    if (j < work.unmasked_begin[c_]) {
      const int first[] = {work.first_key + row() - first_column,
                           work.first_key + row() + 8 - first_column};
      hide_before(S, first);
    }
  }

  // Row r of the thread's two among the head's queries; -1 if it is past the last one.
  __device__ __forceinline__ int64 query(int r, const Work& work) const {
    return row() + 8 * r < work.rows ? work.i0 + row() + 8 * r : -1;
  }

  // Writes lse; scale is what O is to be multiplied by when it is complete.
  __device__ __forceinline__ void finish(const FragmentSoftmax& softmax,
                                         float (&scale)[kFragmentRows], const Work& work) const {
    float lse[kFragmentRows];
    softmax.finish(slope_, scale, lse);
    if (!problem_.lse.data || threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < kFragmentRows; ++r) {
      const int64 i = query(r, work);
      if (i < 0) continue;
      static_cast<float*>(problem_.lse.data)[work.lse + i * problem_.lse.row] = lse[r];
    }
  }

  __device__ __forceinline__ void store(const float (&O)[kOutputs],
                                        const float (&scale)[kFragmentRows],
                                        const Work& work) const {
    store_rows(O, scale, static_cast<element*>(problem_.o.data) + work.o,
               {query(0, work), query(1, work)}, problem_.o.row, problem_.o.col,
               static_cast<int>(problem_.head_dim_v), params_.o_vectors);
  }

  // Rows that see no key: o = 0, lse = -inf. A warp its 16 rows.
  __device__ __forceinline__ void store_nothing(const Work& work) const {
    const int lane = threadIdx.x % kWarpSize;
    const int first = row() - lane / 4;
#pragma unroll 1
    for (int r = first; r < first + 16 && r < work.rows; ++r) {
      const int64 i = work.i0 + r;
      element* const o = static_cast<element*>(problem_.o.data) + work.o + i * problem_.o.row;
#pragma unroll 1
      for (int x = lane; x < problem_.head_dim_v; x += kWarpSize) {
        o[x * problem_.o.col] = from_acc<element>(0.0f);
      }
      if (problem_.lse.data && lane == 0) {
        static_cast<float*>(problem_.lse.data)[work.lse + i * problem_.lse.row] = kMinusInfinity;
      }
    }
  }

  const Sm90Params& params_;
  const Problem& problem_;
  Shared& shared_;
  const int c_;
  const float slope_;   // from scores to exponents of 2
  const float to_cap_;  // from products to what tanh is taken of; 0: no softcap
};

}  // namespace cupyflash

extern "C" __global__ void __launch_bounds__(cupyflash::kThreads, 1)
    forward_sm90(const __grid_constant__ cupyflash::Sm90Params params) {
  using namespace cupyflash;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);

  if (threadIdx.x == 0) {
    tma_prefetch_map(params.Q);
    tma_prefetch_map(params.K);
    tma_prefetch_map(params.V);
    if constexpr (kHasScoreArray) {
      tma_prefetch_map(params.scores);
      for (int stage = 0; stage < kScoreStages; ++stage) {
        for (int c = 0; c < kConsumers; ++c) {
          mbarrier_init(shared.scores_full[stage][c], 1);
          // A consumer's warps, and warp 2 or 3.
          mbarrier_init(shared.scores_empty[stage][c], kWarpgroup / kWarpSize + 1);
        }
      }
      for (int stage = 0; stage < kWorkStages; ++stage) {
        shared.work[stage].redo = 0;
        shared.work[stage].rows = 1;  // what comes before the first work is no empty one
      }
    }
    for (int stage = 0; stage < kWorkStages; ++stage) {
      mbarrier_init(shared.work_full[stage], 1);
      mbarrier_init(shared.work_empty[stage],
                    kConsumerWarps + 2 + kHasScoreArray);  // and warps 1, 2, 3
    }
    for (int stage = 0; stage < kQStages; ++stage) {
      for (int c = 0; c < kConsumers; ++c) {
        mbarrier_init(shared.Q_full[stage][c], 1);
        mbarrier_init(shared.Q_empty[stage][c], kWarpgroup / kWarpSize);
      }
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared.K_full[stage], 1);
      mbarrier_init(shared.V_full[stage], 1);
      mbarrier_init(shared.K_empty[stage], kConsumerWarps);
      mbarrier_init(shared.V_empty[stage], kConsumerWarps);
    }
    mbarrier_init(shared.V_landed, 1);
    mbarrier_init(shared.work_wanted, 1);
    fence_mbarrier_init();
  }
  __syncthreads();  // before anybody waits on the mbarriers

  if (threadIdx.x < kWarpgroup) {
    setmaxnreg_dec<kProducerRegisters>();
    // Roles of one thread or one warp each; the other threads have nothing to do.
    if (threadIdx.x == 0) {
      if constexpr (kHasScoreArray) {
        take_works_with_care(params, shared);
      } else {
        take_works(params, shared);
      }
    }
    if (threadIdx.x == kWarpSize) load_Q_and_K(params, shared);
    if (threadIdx.x / kWarpSize == 2) load_V(params, shared);
    if constexpr (kHasScoreArray) {
      if (pin(threadIdx.x) == 3 * kWarpSize) load_scores(params, shared);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(params, shared).run();
  }
}
