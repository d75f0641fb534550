# SPDX-License-Identifier: MIT
"""``forward_sm90_float32``: the calls it serves, its tiles, parts and launch records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cupyflash import _params, _sm80
from cupyflash._problem import AttentionProblem
from cupyflash._sm80 import Parts
from cupyflash.devices import Device
from cupyflash.tiling import ceil_div

KERNEL = "forward_sm90_float32"
CAPABILITY = (9, 0)
_PARTS = 3  # of a float32, of two bytes each
_PRODUCERS = 128  # threads beside those of the warps that own rows
_STATE = 1024  # bytes of mbarriers and of what a block knows of its work, at most
_MAX_LENGTH = 2**29  # of sequences, so that sums of positions are 32-bit numbers
_MAX_HEADS = 2**32
_FIELDS = (
    *(f"problem.{name}" for name in _params.PROBLEM_FIELDS),
    *("O", "lse", "first_head", "heads", "bunch", "splits", "slices"),
    *("q_vectors", "k_vectors", "v_vectors", "o_vectors", "bias_vectors", "mask_vectors"),
)


@dataclasses.dataclass(frozen=True)
class Tiles(_sm80.Tiles):
    """What a specialisation of the kernel is built for; ``warps`` are those that own rows."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps + _PRODUCERS

    @property
    def smem_bytes(self) -> int:
        """Three bfloat16 for each element of Q and of ``stages`` tiles of K and V."""
        tile = self.Bc * (self.head_dim + self.head_dim_v)
        elements = self.Br * self.head_dim + self.stages * tile
        return 2 * _PARTS * elements + _STATE


# (head_dim, head_dim_v, Br, warps, Bc, stages, blocks); the first that holds both is taken, or the
# last, which cuts V into slices. 64 keys: sums of more would be cut off too often. One tile of K
# and one of V are enough, since one is filled again while products read the other; the memory that
# a second one takes is the L1 cache's. Few columns of V, as filters have them, need fewer products.
_TABLE = (
    (64, 32, 128, 8, 64, 2, 1),
    (64, 64, 128, 8, 64, 2, 1),
    (96, 96, 128, 8, 64, 1, 1),
    (128, 128, 128, 8, 64, 1, 1),
)
_ITEMSIZE = 4
_MAX_HEAD_DIM = 128
_FEW_QUERIES = 64  # forward_sm80 has tiles of so many


def tiles_of(problem: AttentionProblem) -> Tiles | None:
    """What a call is run with; None where head_dim is too large for it."""
    head_dim_v = min(problem.head_dim_v, _MAX_HEAD_DIM)
    for row in _TABLE:
        tiles = Tiles(*row, _ITEMSIZE)
        if problem.head_dim <= tiles.head_dim and head_dim_v <= tiles.head_dim_v:
            return tiles
    return None


def refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel can't run a call, in words that end a sentence; None if it can."""
    if device.compute_capability != CAPABILITY:
        major, minor = device.compute_capability
        return f"needs compute capability 9.0, {device.name} has {major}.{minor}"
    if problem.dtype.name != "float32":
        return f"takes float32, q is {problem.dtype.name}"
    if tiles_of(problem) is None:
        return f"takes head_dim up to {_MAX_HEAD_DIM}, q has {problem.head_dim}"
    if max(problem.seqlen_q, problem.seqlen_k) >= _MAX_LENGTH:
        return f"takes sequences of less than {_MAX_LENGTH}"
    if problem.batch * problem.heads_q >= _MAX_HEADS:
        return "takes less than 2^32 heads of all batch entries together"
    return None


def has_better(problem: AttentionProblem) -> bool:
    """Whether ``forward_sm80`` is faster: it has smaller tiles, and one product for TF32."""
    return problem.seqlen_q <= _FEW_QUERIES or problem.tf32


def parts(
    problem: AttentionProblem, tiles: Tiles, device: Device, splits: int | None = None
) -> Parts:
    """Divide a call's work; ``splits`` asks for a number of parts of the keys."""
    slices = max(1, ceil_div(problem.head_dim_v, tiles.head_dim_v))
    Tr = ceil_div(problem.seqlen_q, tiles.Br)
    if splits is None:
        works = problem.batch * problem.heads_q * Tr * slices
        splits = _sm80.fitting_splits(problem, tiles, device, works)
    return Parts(
        pack=1,
        splits=splits,
        slices=slices,
        bunch=_sm80.bunch(problem, device, 1),
        blocks_a_head=Tr * splits * slices,
    )


def records(
    problem: AttentionProblem, tiles: Tiles, work: Parts, o: Any, lse: Any, xp: Any
) -> Iterator[Any]:
    """The launches of one call; ``o`` and ``lse`` have a head axis."""
    return _sm80.records(problem, tiles, work, o, lse, xp, kernel=KERNEL, fields=_FIELDS)


def specialisations() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """As ``tiling.specialisations``."""
    for row in _TABLE:
        for general in (False, True):
            yield KERNEL, Tiles(*row, _ITEMSIZE).options("float32", general), ("sm_90a",)
