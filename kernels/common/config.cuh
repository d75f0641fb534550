// SPDX-License-Identifier: MIT
// config.cuh: the only place that sees -D macros. It turns them into types and constants.
//
//   CUPYFLASH_ELEMENT   float16 | bfloat16 | float32 | float64: dtype of Q, K, V and O
//   CUPYFLASH_GENERAL   1: softcap, bias, mask or ALiBi may be there; 0: none of them is
//
// and of the kernels that have their tiles at compile time (_sm80.py, _sm90.py, _sm90_float32.py
// and _simt.py have the tables):
//   CUPYFLASH_HEAD_DIM, CUPYFLASH_HEAD_DIM_V   columns of the tiles of Q and K, of V and O
//   CUPYFLASH_BR, CUPYFLASH_BC                 queries and keys of a tile
//   CUPYFLASH_STAGES                           tiles of K, and of V, on their way or in use
//   CUPYFLASH_Q_STAGES                         forward_sm90: tiles of Q
//   CUPYFLASH_SCORE_ARRAY                      forward_sm90: bias | mask, if there is one
//   CUPYFLASH_SCORE_STAGES                     forward_sm90: tiles of it
//   CUPYFLASH_WARPS, CUPYFLASH_BLOCKS          forward_sm80, forward_sm90_float32 (those that own
//                                              rows), forward_simt: warps of a block, and blocks
//                                              that are to share a multiprocessor (bounds the
//                                              registers)
//   CUPYFLASH_TF32                             forward_sm80: float32 by one TF32 product
#pragma once

#ifndef CUPYFLASH_ELEMENT
#error "build with -DCUPYFLASH_ELEMENT=float16, bfloat16, float32 or float64"
#endif
#ifndef CUPYFLASH_GENERAL
#error "build with -DCUPYFLASH_GENERAL=0 or 1"
#endif

#include "common/types.cuh"

namespace cupyflash {

using element = CUPYFLASH_ELEMENT;
using acc = accumulator<element>::type;
constexpr bool kGeneral = CUPYFLASH_GENERAL;
constexpr bool kElementIsBfloat16 = CUPYFLASH_HEADER == CUPYFLASH_HEADER_bfloat16;

#ifdef CUPYFLASH_BR
constexpr int kHeadDim = CUPYFLASH_HEAD_DIM;
constexpr int kHeadDimV = CUPYFLASH_HEAD_DIM_V;
constexpr int kBr = CUPYFLASH_BR;
constexpr int kBc = CUPYFLASH_BC;
constexpr int kStages = CUPYFLASH_STAGES;
#endif
#ifdef CUPYFLASH_Q_STAGES
constexpr int kQStages = CUPYFLASH_Q_STAGES;
#endif
// An array with an entry for each score: none, bias or mask.
enum class ScoreArray { none, bias, mask };
#ifdef CUPYFLASH_SCORE_ARRAY
constexpr ScoreArray kScoreArray = ScoreArray::CUPYFLASH_SCORE_ARRAY;
constexpr int kScoreStages = CUPYFLASH_SCORE_STAGES;
#else
constexpr ScoreArray kScoreArray = ScoreArray::none;
constexpr int kScoreStages = 1;
#endif
constexpr bool kHasScoreArray = kScoreArray != ScoreArray::none;
#ifdef CUPYFLASH_WARPS
constexpr int kWarps = CUPYFLASH_WARPS;
constexpr int kBlocks = CUPYFLASH_BLOCKS;
#endif
#ifdef CUPYFLASH_TF32
constexpr bool kTf32 = CUPYFLASH_TF32;
#else
constexpr bool kTf32 = false;
#endif

}  // namespace cupyflash
