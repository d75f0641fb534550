// SPDX-License-Identifier: MIT
// params.cuh: the arguments of the kernels, mirrored field by field in cupyflash/_params.py.
// Every field has eight bytes, so that neither side has padding to agree on.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

// Leading axes of the arrays that a kernel walks itself; the launcher merges axes where every
// array's strides allow it, and launches once per entry of whatever is left beyond these.
constexpr int kBatchAxes = 3;

// An array of up to (batch axes..., heads, rows, columns). Strides count elements, may be zero or
// negative, and are zero for the axes that an array lacks. data is null for an absent array.
struct TensorView {
  void* data;
  int64 batch[kBatchAxes];
  int64 head;
  int64 row;
  int64 col;
};

struct Problem {
  TensorView q;     // (batch, heads_q, seqlen_q, head_dim)      element
  TensorView k;     // (batch, heads_k, seqlen_k, head_dim)      element
  TensorView v;     // (batch, heads_k, seqlen_k, head_dim_v)    element
  TensorView o;     // (batch, heads_q, seqlen_q, head_dim_v)    element
  TensorView lse;   // (batch, heads_q, seqlen_q)                acc, nats; may be null
  TensorView bias;  // (batch, heads_q, seqlen_q, seqlen_k)      element or float; may be null
  TensorView mask;  // (batch, heads_q, seqlen_q, seqlen_k)      bool, 1 byte; may be null
  TensorView alibi_slopes;  // (batch, heads_q)                          acc; may be null
  TensorView seqlens_k;     // (batch)                                   int32 or int64; may be null
  int64 batch[kBatchAxes];
  int64 heads_q;
  int64 heads_k;
  int64 seqlen_q;
  int64 seqlen_k;
  int64 head_dim;
  int64 head_dim_v;
  double softmax_scale;
  double softcap;           // 0: none
  int64 window_left;        // -1: no limit
  int64 window_right;       // -1: no limit; causal is 0
  int64 top_left;           // 1: the diagonal starts at key 0; 0: it ends at the last key
  int64 bias_is_float;      // 1: bias is float although element is not
  int64 seqlens_are_int32;  // 1: seqlens_k is int32; 0: int64
};

// n / d and n % d. A division takes some 30 instructions, which come before a thread block's first
// load, and most sizes that blocks are numbered by are 1, or the last of them.
template <class Count>
struct Division {
  Count quotient;
  Count rest;

  __device__ __forceinline__ Division(Count n, Count d) : quotient(0), rest(n) {
    if (d == 1) {
      quotient = n;
      rest = 0;
    } else if (n >= d) {
      quotient = n / d;
      rest = n - quotient * d;
    }
  }
};

// One (batch entry, query head): where its matrices start.
struct HeadIndex {
  int64 batch[kBatchAxes];
  int64 entry;  // the batch axes as one
  int64 head_q;
  int64 head_k;

  // work counts heads_q within batch entries. It is divided in its own type: unsigned, where every
  // work fits it, takes a tenth of the time of int64.
  template <class Count>
  __device__ HeadIndex(const Problem& problem, Count work) {
    const Count heads_q = static_cast<Count>(problem.heads_q);
    const Division<Count> group(heads_q, static_cast<Count>(problem.heads_k));
    const Division<Count> heads(work, heads_q);
    head_q = heads.rest;
    head_k = Division<Count>(heads.rest, group.quotient).quotient;
    entry = heads.quotient;
    Count rest = heads.quotient;
    for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
      const Division<Count> entries(rest, static_cast<Count>(problem.batch[axis]));
      batch[axis] = entries.rest;
      rest = entries.quotient;
    }
  }

  __device__ int64 offset(const TensorView& view, int64 head) const {
    int64 sum = head * view.head;
    for (int axis = 0; axis < kBatchAxes; ++axis) sum += batch[axis] * view.batch[axis];
    return sum;
  }

  // Keys in use of this batch entry. A length out of range is clamped: nobody could be told.
  __device__ int64 seqlen_k(const Problem& problem) const {
    if (!problem.seqlens_k.data) return problem.seqlen_k;
    const int64 at = offset(problem.seqlens_k, 0);
    const int64 length = problem.seqlens_are_int32
                             ? static_cast<const int32*>(problem.seqlens_k.data)[at]
                             : static_cast<const int64*>(problem.seqlens_k.data)[at];
    return length < 0 ? 0 : length > problem.seqlen_k ? problem.seqlen_k : length;
  }
};

}  // namespace cupyflash
