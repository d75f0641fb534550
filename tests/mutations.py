# SPDX-License-Identifier: MIT
"""Plant one fault at a time in a copy of the kernels; say which test on the CPU sees it.

    python tests/mutations.py [--only WORD]

The table in docs/host-execution.md is what it prints. The exit code is 1 if a fault is not seen.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` at its only place in ``file``, or at its ``at``-th of several."""

    kernel: str
    what: str
    file: str
    old: str
    new: str
    at: int | None = None

    def apply(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / self.file
        parts = path.read_text().split(self.old)
        places = len(parts) - 1
        if places == 0 or (self.at is None and places > 1):
            raise ValueError(f"{self.what}: {self.old!r} is {places} times in {self.file}")
        at = (self.at or 0) + 1
        text = self.old.join(parts[:at]) + self.new + self.old.join(parts[at:])
        path.write_text(text)


FA1, SIMT, SM80, SM90 = "fa1_forward", "forward_simt", "forward_sm80", "forward_sm90"
FLOAT32 = "forward_sm90_float32"
_BARRIER = "        __syncthreads();"
# In the loop over the tiles of one work.
_WAIT_FOR_O = "      wgmma_wait<0>();\n      wgmma_use(O);\n"
_RELEASE_V = "      release(shared_.V_empty[Turn<kStages>(t).stage]);\n"

MUTATIONS = (
    # Masks.
    Mutation(FA1, "causal: one key too few", "common/mask.cuh", "+ right + 1;", "+ right;"),
    Mutation(FA1, "window: one key too many on the left", "common/mask.cuh",
             "offset - left;", "offset - left - 1;"),
    Mutation(FA1, "causal aligned at the top left", "common/mask.cuh",
             "problem.top_left ? 0 : seqlen_k_used - problem.seqlen_q", "0"),
    Mutation(FA1, "causal aligned by the array's length, not the length in use", "common/mask.cuh",
             "seqlen_k_used - problem.seqlen_q", "problem.seqlen_k - problem.seqlen_q"),
    Mutation(SM80, "< becomes <= in the mask", "common/tile_scores.cuh",
             "(8 * n + e - first) < count", "(8 * n + e - first) <= count"),
    Mutation(SM80, "tiles that need a mask: one too few", "common/tile_scores.cuh",
             "j0 + kBc <= plain_end", "j0 <= plain_end"),
    Mutation(SM80, "a tile that the mask hides ends the keys", "common/tile_scores.cuh",
             "if (__syncthreads_or(some != 0)) return j;",
             "return __syncthreads_or(some != 0) ? j : shared_.keys.end;"),
    Mutation(SM80, "the bias is loaded over what is read", "common/tile_scores.cuh",
             "    __syncwarp();\n    with_bias", "    with_bias"),
    Mutation(SM80, "what a bias of -inf hides is not taken out", "common/tile_scores.cuh",
             "to == m ? ~hidden : ~0u", "~0u"),
    Mutation(SIMT, "< becomes <= in the mask", "forward_simt.cu",
             "key < min(high + r * kLaneRows, length)", "key <= min(high + r * kLaneRows, length)"),
    Mutation(SIMT, "hidden keys' values are multiplied", "forward_simt.cu",
             "seen.x[n] ? v[n].x[e] : acc(0)", "v[n].x[e]"),
    Mutation(SM90, ">= becomes > in the mask", "common/fragment_softmax.cuh",
             ">= end[x / 2 % 2]", "> end[x / 2 % 2]"),
    Mutation(SM90, "< becomes <= in the window", "common/fragment_softmax.cuh",
             "< first[x / 2 % 2]", "<= first[x / 2 % 2]"),
    Mutation(SM90, "tiles without a mask: one too many", "common/tile_range.cuh",
             "static_cast<int>(band.end(i0)) / Bc)",
             "ceil_div(static_cast<int>(band.end(i0)), Bc))"),
    # Heads.
    Mutation(FA1, "query heads take key heads in turn", "common/params.cuh",
             "head_k = Division<Count>(heads.rest, group.quotient).quotient;",
             "head_k = heads.rest % static_cast<Count>(problem.heads_k);"),
    # The running softmax.
    Mutation(FA1, "O is not rescaled", "fa1_forward.cu",
             "l_new == acc(0) ? acc(0) : old_part / l_new;", "l_new == acc(0) ? acc(0) : acc(1);"),
    Mutation(SM80, "O is not rescaled", "common/tile_softmax.cuh",
             "O[m][k][2 * h + 1] *= keep;", ""),
    Mutation(SM80, "l is not rescaled", "common/tile_softmax.cuh", "l_[m][h] *= keep;", ""),
    Mutation(SIMT, "O is not rescaled", "forward_simt.cu", "O[g][r][e] *= keep;", ";"),
    Mutation(SIMT, "l is not rescaled", "forward_simt.cu", "stats.l *= keep;", ";"),
    Mutation(SIMT, "sums over head_dim are not made in parts", "common/simt_layout.cuh",
             "constexpr int kFold = 256;", "constexpr int kFold = 1 << 24;"),
    Mutation(SIMT, "a part of the sums over head_dim is lost", "forward_simt.cu",
             "folded ? sram.P[place] + S[r][n] : S[r][n]", "S[r][n]"),
    Mutation(SM90, "O is not rescaled", "forward_sm90.cu",
             "if (__any_sync(kFullWarp, moved)) scale_rows(O, keep);", ";"),
    Mutation(SM90, "O is not rescaled where a row has grown", "forward_sm90.cu",
             "              scale_rows(O, keep);\n", ""),
    Mutation(SM90, "rows do not grow", "common/fragment_softmax.cuh",
             "grown[r] = sum[r] > kRoom;", "grown[r] = false;"),
    Mutation(SM90, "scores are made again of the wrong columns", "common/warp_scores.cuh",
             "k / 8 + 2 + lane / 16", "k / 8 + lane / 16"),
    Mutation(SM80, "parts are merged with equal weights", "common/part_weights.cuh",
             "exp_nat(lse_at(s) - base) / sum);", "acc(1) / acc(splits));"),
    Mutation(SM80, "sums of parts are added before all are there", "combine.cu",
             "      __syncthreads();  // all", "      __syncwarp();  // all"),
    # Barriers and waits.
    *(
        Mutation(FA1, f"no barrier: {name}", "fa1_forward.cu", _BARRIER, "        ;", at)
        for at, name in enumerate(
            ("before tiles are loaded", "before Q K^T", "before the statistics", "before P V")
        )
    ),
    *(
        Mutation(SIMT, f"no barrier: {name}", "forward_simt.cu", "__syncthreads();", ";", at)
        for at, name in enumerate(
            ("behind the head", "in a step of the scores", "in a step of the values")
        )
    ),
    Mutation(SIMT, "o is written over weights that are still read", "forward_simt.cu",
             "  __syncwarp();  // the weights", "  // the weights"),
    Mutation(SM80, "no barrier in a step", "forward_sm80.cu", "      __syncthreads();", "      ;"),
    Mutation(SM80, "copies are waited for one step too late", "forward_sm80.cu",
             "cp_async_wait<kStages - 2>()", "cp_async_wait<kStages - 1>()"),
    Mutation(SM90, "no barrier behind the mbarriers' initialisation", "forward_sm90.cu",
             "  __syncthreads();", "  ;"),
    Mutation(SM90, "wrong parity of K_empty", "common/sm90_producer.cuh",
             "shared.K_empty[turn.stage], turn.parity ^ 1",
             "shared.K_empty[turn.stage], turn.parity"),
    Mutation(SM90, "V_full is not waited for", "forward_sm90.cu",
             "mbarrier_wait(shared_.V_full[turn.stage], turn.parity);", ""),
    Mutation(SM90, "V_empty arrives before the product is complete", "forward_sm90.cu",
             _WAIT_FOR_O + _RELEASE_V, _RELEASE_V + _WAIT_FOR_O),
    Mutation(SM90, "S is used before it is complete", "forward_sm90.cu",
             "wgmma_wait<pending>();", "wgmma_wait<pending + 1>();"),
    Mutation(SM90, "K_empty expects one arrival too many", "forward_sm90.cu",
             "mbarrier_init(shared.K_empty[stage], kConsumerWarps);",
             "mbarrier_init(shared.K_empty[stage], kConsumerWarps + 1);"),
    Mutation(SM90, "no end for a consumer where no work is left", "common/sm90_layout.cuh",
             "#pragma unroll 1\n  for (int c = 0; c < kConsumers; ++c) work.end_of[c] = 0;\n", ""),
    Mutation(SM90, "a tile that goes by is not given back", "forward_sm90.cu",
             "        release(shared_.V_empty[Turn<kStages>(tiles).stage]);\n", ""),
    Mutation(SM90, "a work is given back before all lanes have read it", "forward_sm90.cu",
             "    __syncwarp();  // every lane has read it\n", ""),
    Mutation(FLOAT32, "wrong parity of V_empty", "common/float32_producer.cuh",
             "shared.V_empty[turn.stage], turn.parity ^ 1",
             "shared.V_empty[turn.stage], turn.parity"),
    Mutation(FLOAT32, "K_full is not waited for", "forward_sm90_float32.cu",
             "    mbarrier_wait(shared.K_full[turn.stage], turn.parity);\n", ""),
    Mutation(FLOAT32, "K_full expects one arrival too few", "forward_sm90_float32.cu",
             "mbarrier_init(shared.K_full[stage], kWarpgroup);",
             "mbarrier_init(shared.K_full[stage], kWarpgroup - 1);"),
    Mutation(FLOAT32, "no barrier behind the parts of Q", "forward_sm90_float32.cu",
             "    named_barrier_sync(1 + c, kWarpgroup);\n", ""),
    Mutation(FLOAT32, "V_empty arrives before the product is complete", "forward_sm90_float32.cu",
             "      wgmma_wait<0>();\n      wgmma_use(PV);\n",
             "      release(shared.V_empty[turn.stage]);\n", 0),
    # Parts of float32 numbers.
    Mutation(FLOAT32, "the third parts are left out", "common/bf16_parts.cuh",
             "return pair == 0 ? 2 : pair == 1 ||", "return pair == 1 ||"),
    Mutation(FLOAT32, "parts are of the wrong half of a pair", "common/bf16_parts.cuh",
             "0x7632", "0x3276"),
    Mutation(FLOAT32, "sums with Inf are not made once more", "forward_sm90_float32.cu",
             "shared.V_special[turn.stage] == 1 + j", "false"),
    Mutation(FLOAT32, "scores with Inf are not made once more", "forward_sm90_float32.cu",
             "if (shared.K_special[turn.stage] == 1 + j || shared.Q_special[c])", "if (false)"),
    Mutation(FLOAT32, "NaN in what no row sees is kept", "common/float32_producer.cuh",
             "return !kGeneral || block.scores.shown(problem, block.band, j * kBc + r);",
             "return true;"),
    Mutation(FLOAT32, "a consumer passes by a tile too many", "common/float32_layout.cuh",
             "return j0 < some_end &&", "return j0 + kBc <= some_end &&"),
    # Layouts.
    Mutation(SM80, "a chunk is added where the swizzle exchanges it", "common/products_half.cuh",
             "((tile + offset) ^ (column % 128))", "((tile + offset) + (column % 128))"),
    Mutation(SM80, "ldmatrix ignores the swizzle's row", "common/products_half.cuh",
             "offset(T::offset(row, high))", "offset(row * T::kRowBytes + high * kChunkBytes)"),
    Mutation(SM90, "the second slab of K is read as the first", "common/swizzled_tile.cuh",
             "k * 16 / kSlabCols * kSlabBytes + ", ""),
    Mutation(SM90, "V's slabs lie too close", "common/swizzled_tile.cuh",
             "(tile, kSwizzle, kSlabBytes,", "(tile, kSwizzle, 1024,"),
    # Ragged ends.
    Mutation(SIMT, "vectors of o are stored past its last column", "forward_simt.cu",
             "if (vectors && left >= kVec) {", "if (vectors) {"),
    Mutation(SIMT, "keys past the last are read", "common/simt_chunks.cuh",
             "const bool inside = r >= begin && r < end", "const bool inside = r >= begin"),
    Mutation(SM80, "vectors of o are stored past its last column", "common/products_half.cuh",
             "if (vectors && column + 8 <= cols) {", "if (vectors) {"),
    Mutation(SM90, "rows past the last query are stored", "forward_sm90.cu",
             "return row() + 8 * r < work.rows ?", "return row() + 8 * r < kBr ?"),
    Mutation(FLOAT32, "vectors are loaded past the last column", "common/bf16_parts.cuh",
             "vectors_ && left_ >= kUnit &&", "vectors_ &&"),
    Mutation(FLOAT32, "rows past the last query are stored", "forward_sm90_float32.cu",
             "    if (r >= rows.rows) continue;\n", ""),
    Mutation(FA1, "the last queries' tile is taken as whole", "fa1_forward.cu",
             "problem.seqlen_q - i0 < Br ? problem.seqlen_q - i0 : Br", "Br"),
    # What the CPU can't show: a fence between the generic and the asynchronous proxy.
    Mutation(SM90, "no fence before cleared rows of V are multiplied", "common/sm90_producer.cuh",
             "        fence_proxy_async_shared();\n", ""),
    Mutation(FLOAT32, "no fence before parts of V are multiplied", "common/float32_producer.cuh",
             "    fence_proxy_async_shared();\n    mbarrier_arrive(shared.V_full",
             "    mbarrier_arrive(shared.V_full"),
)  # fmt: skip
UNSEEN = (
    "no fence before cleared rows of V are multiplied",
    "no fence before parts of V are multiplied",
)


def seen_by(mutation: Mutation, arguments: list[str]) -> tuple[str | None, str]:
    """The first test that fails, and its first words; None if none does."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        kernels = Path(folder) / "kernels"
        shutil.copytree(CHECKOUT / "kernels", kernels)
        mutation.apply(kernels)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-m", "hostcuda and not gpu",
             "--tb=no", "-p", "no:cacheprovider", *arguments],
            cwd=CHECKOUT,
            env={**os.environ, "CI": "1", "CUPYFLASH_TEST_KERNEL": mutation.kernel,
                 "CUPYFLASH_HOSTCUDA_KERNELS": str(kernels), "COLUMNS": "400"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.what}: pytest ended with {done.returncode}\n{done.stdout}")
    if "CompileError" in done.stdout:
        raise RuntimeError(f"{mutation.what}: does not compile\n{done.stdout}")
    found = re.search(r"^FAILED (\S+?::.*?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    return (found[1], found[2] or "") if found else (None, done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose kernel or words hold this")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    arguments = parser.parse_args()
    wrong = 0
    for mutation in MUTATIONS:
        if arguments.only not in f"{mutation.kernel}: {mutation.what}":
            continue
        start = time.monotonic()
        test, words = seen_by(mutation, arguments.pytest)
        wrong += (test is None) != (mutation.what in UNSEEN)
        seconds = time.monotonic() - start
        print(
            f"| {mutation.kernel} | {mutation.what} | {test or 'none'} | {seconds:.0f} s",
            flush=True,
        )
        print(f"    {words[:150]}", file=sys.stderr, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
