# SPDX-License-Identifier: MIT
"""``forward_simt``: which calls it serves, with what tiles and parts, and its launch records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cupyflash import _params, _sm80
from cupyflash._dtypes import NAMES, named
from cupyflash._problem import AttentionProblem
from cupyflash._sm80 import Parts
from cupyflash.devices import Device
from cupyflash.tiling import ceil_div

KERNEL = "forward_simt"
_VECTOR = 16  # bytes that a thread reads of shared memory at a time
_HEAD_BYTES = 512  # kHeadBytes
_MAX_LENGTH = 2**29  # of sequences, so that sums of positions are 32-bit numbers
_FIELDS = (
    *(f"problem.{name}" for name in _params.PROBLEM_FIELDS),
    *("O", "lse", "first_head", "heads", "splits", "slices"),
    *("q_vectors", "k_vectors", "v_vectors", "o_vectors"),
)
# "sm_70" and "sm_75" are this kernel's own; on the others it serves what forward_sm80 does not.
_ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@dataclasses.dataclass(frozen=True)
class Tiles(_sm80.Tiles):
    """What a specialisation of the kernel is built for.

    Any ``head_dim`` passes by in chunks of ``head_dim`` columns, which are the keys of a chunk of V
    too; more than ``head_dim_v`` columns of V are cut into slices. ``itemsize`` is that of q.
    """

    @property
    def smem_bytes(self) -> int:
        """Two chunks of Q and K, the weights, a flag for each warp and key, and addresses."""
        acc = max(self.itemsize, 4)
        chunk = (self.Br + self.Bc) * (self.head_dim + _VECTOR // acc)
        elements = self.stages * chunk + self.Br * self.Bc
        return acc * elements + self.warps * self.Bc + _HEAD_BYTES


# By bytes of an accumulator: (columns of a chunk, of O, Br, warps, Bc, stages, blocks), the first
# that holds head_dim_v, or the last. A thread has 8 rows by 16 bytes of scores at a time, and of O
# as many registers as are left beside that: 128.
#   tall      16 lanes share a row. K and V are read half as often from the L2 cache, and K from
#             shared memory half as often, as where a warp has only 8 rows.
#   wide      32 lanes share a row, so that O of twice as many columns and more fits: each slice of
#             head_dim_v makes all scores anew.
_TABLE = {
    4: ((16, 256, 128, 8, 64, 2, 1), (16, 512, 64, 8, 128, 2, 1)),
    8: ((8, 128, 128, 8, 32, 2, 1), (8, 256, 64, 8, 64, 2, 1)),
}


def tiles_for(problem: AttentionProblem) -> Tiles:
    """What a call is run with, on any device."""
    return _tiles(problem.dtype.itemsize, problem.head_dim_v)


def _tiles(itemsize: int, head_dim_v: int) -> Tiles:
    rows = [Tiles(*row, itemsize) for row in _TABLE[max(itemsize, 4)]]
    return next((tiles for tiles in rows if head_dim_v <= tiles.head_dim_v), rows[-1])


def refusal(problem: AttentionProblem) -> str | None:
    """Why the kernel can't run a call, in words that end a sentence; None if it can."""
    if max(problem.seqlen_q, problem.seqlen_k) >= _MAX_LENGTH:
        return f"takes sequences of less than {_MAX_LENGTH}"
    return None


def parts(
    problem: AttentionProblem, tiles: Tiles, device: Device, splits: int | None = None
) -> Parts:
    """Divide a call's work; ``splits`` asks for a number of parts of the keys."""
    slices = max(1, ceil_div(problem.head_dim_v, tiles.head_dim_v))
    Tr = ceil_div(problem.seqlen_q, tiles.Br)
    if splits is None:
        works = problem.batch * problem.heads_q * Tr * slices
        splits = _sm80.fitting_splits(problem, tiles, device, works)
    return Parts(pack=1, splits=splits, slices=slices, bunch=1, blocks_a_head=Tr * splits * slices)


def records(
    problem: AttentionProblem, tiles: Tiles, work: Parts, o: Any, lse: Any, xp: Any
) -> Iterator[Any]:
    """The launches of one call; ``o`` and ``lse`` have a head axis."""
    return _sm80.records(problem, tiles, work, o, lse, xp, kernel=KERNEL, fields=_FIELDS)


def specialisations() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """As ``tiling.specialisations``."""
    for dtype in NAMES:
        itemsize = named(dtype).itemsize
        for row in _TABLE[max(itemsize, 4)]:
            for general in (False, True):
                yield KERNEL, Tiles(*row, itemsize).options(dtype, general), _ARCHITECTURES
