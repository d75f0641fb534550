// SPDX-License-Identifier: MIT
// float32_producer.cuh: the warpgroup of forward_sm90_float32 that loads K and V, splits them and
// stores the parts.
#pragma once

#include "common/float32_layout.cuh"
#include "ptx/fence.cuh"
#include "ptx/pin.cuh"

namespace cupyflash {

// The producer: tiles of K and V, in the order in which consumers need them, batch after batch. The
// next batch is on its way from memory while one is split and stored.
__device__ __forceinline__ void load_keys(const Sm90Float32Params& params, Shared& shared) {
  constexpr int kBatches = KParts::kBatches + VParts::kBatches;  // of K_j, then of V_j
  static_assert(kBatches % 2 == 0, "two take turns");
  const WorkOfBlock& block = shared.block;
  const Problem& problem = params.problem;
  const KeyBounds& keys = block.keys;
  const auto K_parts = [&] {
    const int thread = pin(threadIdx.x) % kWarpgroup;  // what follows from it is found out anew
    return KParts(thread, static_cast<int>(problem.head_dim), problem.k.col, params.k_vectors);
  };
  const auto V_parts = [&] {
    const int thread = pin(threadIdx.x) % kWarpgroup;
    return VParts(thread, block.dv, problem.v.col, params.v_vectors);
  };
  const auto load = [&](Batch& x, int j, int batch) {
    const int j0 = j * kBc;
    const int begin = keys.keys_begin - j0, end = keys.keys_end - j0;
    if (batch < KParts::kBatches) {
      K_parts().load(x, batch, begin, end,
                     [&](int r) { return block.K + (j0 + r) * problem.k.row; });
    } else {
      V_parts().load(x, batch - KParts::kBatches, begin, end,
                     [&](int r) { return block.V + (j0 + r) * problem.v.row; });
    }
  };
  const auto store_K = [&](Batch& x, int j, int batch) {
    const Turn<kStages> turn(j - keys.begin);
    // Consumers have read what is said of the tile before, too.
    if (batch == 0) mbarrier_wait(shared.K_empty[turn.stage], turn.parity ^ 1);
    if (K_parts().mend(x, batch, [](int) { return true; })) shared.K_special[turn.stage] = 1 + j;
    K_parts().store(shared.K[turn.stage], x, batch, 1.0f);
    if (batch + 1 < KParts::kBatches) return;
    fence_proxy_async_shared();
    mbarrier_arrive(shared.K_full[turn.stage]);
  };
  const auto store_V = [&](Batch& x, int j, int batch) {
    const Turn<kStages> turn(j - keys.begin);
    if (batch == 0) mbarrier_wait(shared.V_empty[turn.stage], turn.parity ^ 1);
    // A weight of 0 takes no NaN away: what no row sees may not get there.
    if (V_parts().mend(x, batch, [&](int r) {
          return !kGeneral || block.scores.shown(problem, block.band, j * kBc + r);
        })) {
      shared.V_special[turn.stage] = 1 + j;
    }
    V_parts().store(shared.V[turn.stage], x, batch, 1.0f);
    if (batch + 1 < VParts::kBatches) return;
    fence_proxy_async_shared();
    mbarrier_arrive(shared.V_full[turn.stage]);
  };
  Batch x[2];
  if (keys.begin < keys.end) load(x[0], keys.begin, 0);
#pragma unroll 1
  for (int j = keys.begin; j < keys.end; ++j) {
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int next = batch + 1;
      if (next < kBatches) {
        load(x[next % 2], j, next);
      } else if (j + 1 < keys.end) {
        load(x[next % 2], j + 1, 0);
      }
      if (batch < KParts::kBatches) {
        store_K(x[batch % 2], j, batch);
      } else {
        store_V(x[batch % 2], j, batch - KParts::kBatches);
      }
    }
  }
}

}  // namespace cupyflash
