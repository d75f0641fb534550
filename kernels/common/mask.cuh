// SPDX-License-Identifier: MIT
// mask.cuh: which keys a query sees, and what its scores become.
//
// Scores are made in this order: softmax_scale * Q K^T, softcap, bias, ALiBi, mask. By position,
// query i sees the keys first(i) <= j < end(i), a band around the diagonal j = i + offset:
//
//   seqlen_q 2, seqlen_k 4, causal   x x x .      seqlen_q 4, seqlen_k 2, causal   . .
//                                    x x x x                                       . .
//                                                                                  x .
//                                                                                  x x
#pragma once

#include "common/config.cuh"
#include "common/online_softmax.cuh"
#include "common/params.cuh"

namespace cupyflash {

struct Band {
  int64 left;    // -1: no limit
  int64 right;   // -1: no limit
  int64 offset;  // key on the diagonal of query 0
  int64 seqlen_k;

  __device__ Band(const Problem& problem, int64 seqlen_k_used)
      : left(problem.window_left),
        right(problem.window_right),
        offset(problem.top_left ? 0 : seqlen_k_used - problem.seqlen_q),
        seqlen_k(seqlen_k_used) {}

  __device__ int64 first(int64 i) const {
    const int64 j = i + offset - left;
    return left < 0 || j < 0 ? 0 : j;
  }
  // May lie below first(i): then query i sees nothing.
  __device__ int64 end(int64 i) const {
    const int64 j = i + offset + right + 1;
    return right < 0 || j > seqlen_k ? seqlen_k : j;
  }
};

// What the scores of one (batch entry, head) go through. Only the general variants of a kernel
// look at softcap, bias, mask and ALiBi.
struct ScoreModifier {
  const uint8* mask;        // of this head; null if there is none
  const element* bias;      // of this head; null if there is none, or
  const float* bias_float;  // if it is float and element is not
  int64 mask_row, mask_col;
  int64 bias_row, bias_col;
  acc scale;
  acc softcap;
  acc slope;

  __device__ ScoreModifier(const Problem& p, const HeadIndex& at)
      : mask(nullptr),
        bias(nullptr),
        bias_float(nullptr),
        mask_row(p.mask.row),
        mask_col(p.mask.col),
        bias_row(p.bias.row),
        bias_col(p.bias.col),
        scale(static_cast<acc>(p.softmax_scale)),
        softcap(0),
        slope(0) {
    if constexpr (kGeneral) {
      softcap = static_cast<acc>(p.softcap);
      if (p.mask.data) {
        mask = static_cast<const uint8*>(p.mask.data) + at.offset(p.mask, at.head_q);
      }
      if (p.bias.data) {
        const int64 offset = at.offset(p.bias, at.head_q);
        if (p.bias_is_float) {
          bias_float = static_cast<const float*>(p.bias.data) + offset;
        } else {
          bias = static_cast<const element*>(p.bias.data) + offset;
        }
      }
      if (p.alibi_slopes.data) {
        slope = static_cast<const acc*>(p.alibi_slopes.data)[at.offset(p.alibi_slopes, at.head_q)];
      }
    }
  }

  // The score of query i and key j, which see each other by position, from their product q.k;
  // seen turns false where the mask, or a bias of -inf, hides the key.
  __device__ __forceinline__ acc operator()(acc product, int64 i, int64 j, const Band& band,
                                            bool& seen) const {
    acc s = product * scale;
    if constexpr (kGeneral) {
      if (softcap != acc(0)) s = softcap * tanh(s / softcap);
      if (bias || bias_float) {
        const int64 at = i * bias_row + j * bias_col;
        const acc b = bias ? to_acc(bias[at]) : static_cast<acc>(bias_float[at]);
        // A score of NaN or +inf must not bring back what -inf hides.
        if (b == kMinusInfinity) seen = false;
        s += b;
      }
      if (slope != acc(0)) {
        const int64 distance = i + band.offset - j;
        s -= slope * static_cast<acc>(distance < 0 ? -distance : distance);
      }
      if (mask && !mask[i * mask_row + j * mask_col]) seen = false;
      if (!seen) s = kMinusInfinity;
    }
    return s;
  }
};

}  // namespace cupyflash
