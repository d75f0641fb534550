# SPDX-License-Identifier: MIT
"""``forward_sm90``: which calls it serves, with what tiles, and its launch records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyflash import _arrays, _params, _tensormap, _tiles
from cupyflash._problem import AttentionProblem
from cupyflash.devices import Device
from cupyflash.tiling import ceil_div, round_up

KERNEL = "forward_sm90"
CAPABILITY = (9, 0)
BATCH_AXES = 2  # that a tensor map has beside (heads, rows, columns)
_ITEMSIZE = 2
_CONSUMER_ROWS = 64
_WARPGROUP = 128
_SMEM_BESIDE_TILES = 1024  # descriptions of works, mbarriers
_MAX_WORKS = 2**31
_MAX_SEQLEN = 2**30  # kFarKey
# ALiBi's slopes are divided by what scores are counted in.
_SCALES = (2.0**-100, 2.0**100)
_SCALES_WITH_ALIBI = (2.0**-20, 2.0**20)
# Fewer queries waste most of a tile; more keys are worth dividing.
_FEW_ROWS = 16
_MANY_KEYS = 1024
# Multiprocessors that read one head's K and V at about the same time, where the cache does not hold
# those of all heads of a bunch.
_SHARING = 4
# struct Sm90Params: its tensor maps, the last one for bias or mask, and what is behind them.
MAPS = ("Q", "K", "V", "scores")
_FIELDS = (
    *(f"problem.{name}" for name in _params.PROBLEM_FIELDS),
    *("bunch", "blocks", "heads", "counter", "o_vectors", "score_rows"),
)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One row of the tile table: what a specialisation of the kernel is built for.

    ``head_dim`` and ``head_dim_v`` are what tiles hold; arrays may have fewer columns.
    """

    head_dim: int
    head_dim_v: int
    Br: int
    Bc: int
    stages: int  # tiles of K, and of V
    q_stages: int
    least_keys: int = 0  # in a sequence
    most_causal_keys: int | None = None  # for causal calls only, of at most so many keys
    score_array: str | None = None  # bias or mask: for calls that have it
    score_stages: int = 0  # tiles of it, for each 64 queries

    @property
    def threads(self) -> int:
        """A producer warpgroup and one consumer for each 64 queries."""
        return _WARPGROUP * (1 + self.Br // _CONSUMER_ROWS)

    @property
    def smem_bytes(self) -> int:
        """Q_i, the stages of K_j and V_j, of bias or mask, and what the warps tell each other."""
        queries = self.q_stages * self.Br * self.head_dim
        keys = self.stages * self.Bc * (self.head_dim + self.head_dim_v)
        scores = self.score_stages * self.Br * self.score_row_bytes
        return _ITEMSIZE * (queries + keys) + scores + _SMEM_BESIDE_TILES

    @property
    def score_row_bytes(self) -> int:
        """A row of a tile of bias; of mask, in whole slabs of 64 bytes."""
        return round_up(self.Bc, 64) if self.score_array == "mask" else _ITEMSIZE * self.Bc

    def options(self, dtype: str, general: bool = False) -> tuple[str, ...]:
        """The -D macros of the specialisation."""
        return (
            *_tiles.options(self, dtype, general),
            f"-DCUPYFLASH_Q_STAGES={self.q_stages}",
            *(
                (
                    f"-DCUPYFLASH_SCORE_ARRAY={self.score_array}",
                    f"-DCUPYFLASH_SCORE_STAGES={self.score_stages}",
                )
                if self.score_array
                else ()
            ),
        )


# Registers bound Br x Bc: a consumer thread holds Bc/2 scores, Bc/4 registers of weights and dv/2
# of O; shared memory bounds Bc by d. Three consumers of 160 registers where that is enough: more
# queries for each key that is read. Two tiles of Q where they fit, so that one is there when a work
# begins. Wider tiles of keys mean fewer steps, each with its fixed cost, but more keys that are
# masked in vain. Measured on an H200, bf16:
#   head_dim 64    192 x 128: 558 TFLOP/s at 16,384 keys, 411 at 512 (128 x 128: 366) and 250
#                  causal (240): a consumer passes by what it does not see. Four stages are up to
#                  3 % faster than two.
#   head_dim 128   176 keys are up to 8 % faster than 128 from 4,096 keys on, and up to 15 % slower
#                  below.
#   head_dim 256   512 keys are 8 tiles of 64, but 6.4 of 80: 478 and 465. Causal, 64 meet the
#                  diagonal of 128 queries better: 357 and 334 at 512, 515 and 480 at 1,024.
# The first row is taken that holds both head dims and whose limits of keys are kept.
#
# With a bias or a mask, whose tiles take their part of the shared memory; the last column counts
# those.
_SCORE_TABLES = {
    "bias": (
        (64, 64, 192, 128, 2, 2, 2),
        (96, 96, 128, 128, 2, 2, 2),
        (128, 128, 128, 128, 2, 1, 2),
        (192, 128, 128, 96, 2, 1, 2),
        (192, 192, 128, 96, 2, 1, 1),
        (256, 256, 128, 64, 2, 1, 2),
    ),
    "mask": (
        (64, 64, 192, 128, 4, 2, 2),
        (96, 96, 128, 128, 2, 2, 2),
        (128, 128, 128, 128, 2, 2, 2),
        (192, 128, 128, 96, 2, 1, 2),
        (192, 192, 128, 96, 2, 1, 2),
        (256, 256, 128, 64, 2, 1, 2),
    ),
}
TABLE = (
    Tiles(64, 64, 192, 128, 4, 2),
    Tiles(96, 96, 128, 128, 2, 2),
    Tiles(128, 128, 128, 176, 2, 1, least_keys=4096),
    Tiles(128, 128, 128, 128, 2, 2),
    Tiles(192, 128, 128, 128, 2, 1),
    Tiles(192, 192, 128, 96, 2, 1),
    Tiles(256, 256, 128, 64, 2, 1, most_causal_keys=2048),
    Tiles(256, 256, 128, 80, 2, 1, least_keys=513),
    Tiles(256, 256, 128, 64, 2, 1),
    *(
        Tiles(*sizes, score_array=array, score_stages=stages)
        for array, table in _SCORE_TABLES.items()
        for *sizes, stages in table
    ),
)


def tiles_for(
    head_dim: int,
    head_dim_v: int,
    seqlen_k: int,
    causal: bool = False,
    score_array: str | None = None,
) -> Tiles | None:
    """The row of the table for these sizes; None where the head dims are too large.

    Examples
    --------
    >>> tiles_for(80, 64, 512).head_dim, tiles_for(192, 128, 512).head_dim_v, tiles_for(64, 257, 9)
    (96, 128, None)
    """
    for tiles in TABLE:
        holds = head_dim <= tiles.head_dim and head_dim_v <= tiles.head_dim_v
        if tiles.score_array != score_array:
            continue
        most = tiles.most_causal_keys
        if most is not None and not (causal and seqlen_k <= most):
            continue
        if holds and seqlen_k >= tiles.least_keys:
            return tiles
    return None


def tiles_of(problem: AttentionProblem) -> Tiles | None:
    """The row of the table for a problem."""
    causal = problem.window_right >= 0
    array = score_array(problem)
    return tiles_for(problem.head_dim, problem.head_dim_v, problem.seqlen_k, causal, array)


def score_array(problem: AttentionProblem) -> str | None:
    """Which array has an entry for each score; the kernel takes no more than one."""
    return "bias" if problem.bias_dtype is not None else "mask" if problem.has_mask else None


def few_works(problem: AttentionProblem, device: Device, dividable: bool = True) -> bool:
    """Whether too few blocks of queries are there to keep the device busy over many keys.

    Then a kernel that packs the query heads of a group, or divides the keys, does better. Where
    keys must not be divided, the answer does not depend on the batch, and so no bit of a result.
    """
    tiles = tiles_of(problem)
    assert tiles is not None
    works = problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, tiles.Br)
    few_rows = problem.seqlen_q <= _FEW_ROWS
    idle = dividable and 2 * works < device.multiprocessors
    return problem.seqlen_k > _MANY_KEYS and (few_rows or idle)


def refusal(
    problem: AttentionProblem, device: Device, unreadable: tuple[str, ...] = ()
) -> str | None:
    """Why the kernel can't run a call, in words that end a sentence; None if it can.

    ``unreadable`` is what :func:`not_read_by_tma` says.
    """
    if device.compute_capability != CAPABILITY:
        major, minor = device.compute_capability
        return f"needs compute capability 9.0, {device.name} has {major}.{minor}"
    if problem.dtype.itemsize != _ITEMSIZE:
        return f"takes float16 and bfloat16, q has {problem.dtype.name}"
    tiles = tiles_of(problem)
    if tiles is None:
        return (
            f"takes head dims up to {TABLE[-1].head_dim}, q has {problem.head_dim} and v "
            f"{problem.head_dim_v}"
        )
    if problem.bias_dtype is not None and problem.has_mask:
        return "takes a bias or a mask, not both"
    if problem.bias_dtype not in (None, problem.dtype):
        return f"takes a bias of q's dtype, {problem.dtype.name}, got {problem.bias_dtype.name}"
    low, high = _SCALES_WITH_ALIBI if problem.has_alibi else _SCALES
    if not low < problem.softmax_scale < high:
        return f"takes a softmax_scale from {low:g} to {high:g}, got {problem.softmax_scale:g}"
    if problem.softcap and not low < problem.softcap < high:
        return f"takes a softcap from {low:g} to {high:g}, got {problem.softcap:g}"
    if problem.softcap and not low < problem.softmax_scale / problem.softcap < high:
        ratio = problem.softmax_scale / problem.softcap
        return f"takes softmax_scale / softcap from {low:g} to {high:g}, got {ratio:g}"
    if problem.seqlen_k == 0 or problem.head_dim_v == 0:
        return "takes no empty k or v"
    if max(problem.seqlen_q, problem.seqlen_k) >= _MAX_SEQLEN:
        return "takes sequences of less than 2^30"
    if problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, tiles.Br) >= _MAX_WORKS:
        return "takes less than 2^31 blocks of queries"
    if unreadable:
        names = " and ".join(filter(None, (", ".join(unreadable[:-1]), unreadable[-1])))
        return (
            "reads arrays by TMA, which takes contiguous columns, and addresses and other strides "
            f"that are multiples of 16 bytes and not negative; those of {names} are not"
        )
    return None


def not_read_by_tma(problem: AttentionProblem) -> tuple[str, ...]:
    """Names of the call's arrays that TMA can't read; without arrays, of contiguous ones."""
    names = ("q", "k", "v", *filter(None, [score_array(problem)]))
    if problem.q is None:
        rows = {
            **dict.fromkeys(("q", "k"), problem.head_dim * _ITEMSIZE),
            "v": problem.head_dim_v * _ITEMSIZE,
            "bias": problem.seqlen_k * _ITEMSIZE,
            "mask": problem.seqlen_k,
        }
        return tuple(name for name in names if rows[name] % 16)
    arrays = {name: getattr(problem, name) for name in names}
    return tuple(name for name, x in arrays.items() if not _tensormap.takes(x, _arrays.address(x)))


def records(
    problem: AttentionProblem, tiles: Tiles, device: Device, o: Any, lse: Any, xp: Any
) -> Iterator[Any]:
    """The launches of one call; ``xp`` (numpy or CuPy) allocates the counter of works."""
    from cupyflash import _launch

    blocks = ceil_div(problem.seqlen_q, tiles.Br)
    for sizes, views in _launch.launch_batches(problem, o, lse, BATCH_AXES):
        heads = math.prod(sizes) * problem.heads_q
        grid = min(heads * blocks, device.multiprocessors)
        # Works of equal length need no counter, and no launch that clears it. A row of bias or mask
        # for all queries is padding, as a rule, of another length in each entry.
        score_rows = _score_rows(problem, views)
        counted = (unequal(problem) or score_rows == 1) and heads * blocks > grid
        counter = xp.zeros(1, np.int32) if counted else 0
        fields = views | _launch.scalar_fields(problem, sizes)
        for name in ("q", "k", "v"):  # which are read through their maps
            del fields[f"{name}.data"]
        struct, pointers = _params.pack(
            _FIELDS,
            {f"problem.{name}": value for name, value in fields.items()}
            | {
                "bunch": bunch(problem, device),
                "blocks": blocks,
                "heads": heads,
                "counter": counter,
                "o_vectors": int(_tiles.vectors("o", views)),
                "score_rows": score_rows,
            },
        )
        front = _tensormap.BYTES * len(MAPS)
        # The struct is aligned, and so padded, to 64 bytes as its tensor maps are.
        params = (bytes(front) + struct).ljust(round_up(front + len(struct), 64), b"\0")
        yield _launch.LaunchRecord(
            kernel=KERNEL,
            options=tiles.options(problem.dtype.name, problem.general),
            grid=(grid, 1, 1),
            block=(tiles.threads, 1, 1),
            smem_bytes=tiles.smem_bytes,
            params=params,
            pointers=tuple(dataclasses.replace(p, offset=p.offset + front) for p in pointers),
            tensor_maps=tuple(_maps(problem, tiles, sizes, views)),
        )


def unequal(problem: AttentionProblem) -> bool:
    """Whether blocks of queries may see different numbers of keys."""
    return problem.window_left >= 0 or problem.window_right >= 0 or problem.has_seqlens


def bunch(problem: AttentionProblem, device: Device) -> int:
    """Query heads that are walked together, so that their K and V stay in the L2 cache.

    Works of equal length go head by head: all blocks of queries read a head's K and V at about the
    same time. Those of unequal length are given out longest first, bunch by bunch: small bunches
    leave the device without short works to end with. So they are made as large as the cache, and
    larger, as long as several multiprocessors share each head's K and V, and all of about the same
    size. Beside a bias or a mask, whose rows several heads may share, they fill the cache too.
    """
    heads = problem.batch * problem.heads_q
    if not unequal(problem) and score_array(problem) is None:
        return min(problem.group, heads)
    head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * _ITEMSIZE
    most = max(1, int(_tiles.L2_SHARE * device.l2_bytes) // head) * problem.group
    if unequal(problem):
        most = max(most, device.multiprocessors // _SHARING)
        most = ceil_div(heads, ceil_div(heads, most))
    return min(most, heads)


def _maps(
    problem: AttentionProblem, tiles: Tiles, sizes: tuple[int, ...], views: dict[str, Any]
) -> Iterator[_tensormap.TensorMap]:
    boxes = {  # array: rows, and columns of the tile
        "q": (_CONSUMER_ROWS, tiles.head_dim),
        "k": (tiles.Bc, tiles.head_dim),
        "v": (tiles.Bc, tiles.head_dim_v),
    }
    if tiles.score_array is not None:
        itemsize = getattr(problem, tiles.score_array).dtype.itemsize
        columns = tiles.score_row_bytes // itemsize
        boxes[tiles.score_array] = (_score_rows(problem, views), columns)
    for number, (name, (rows, columns)) in enumerate(boxes.items()):
        array, byte_offset = views[f"{name}.data"]
        itemsize = array.dtype.itemsize
        swizzle = 128 if columns * itemsize % 128 == 0 else 64
        extent = (array.shape[-1], array.shape[-2], array.shape[-3], sizes[2], sizes[1])
        fields = ("row", "head", "batch[2]", "batch[1]")
        strides = (itemsize * views.get(f"{name}.{field}", 0) for field in fields)
        yield _tensormap.TensorMap(
            pointer=_params.Pointer(_tensormap.BYTES * number, name, array, byte_offset),
            dtype=array.dtype.name,
            sizes=extent,
            # An axis of size 1 may have any stride in an array, not in a tensor map.
            strides=tuple(0 if n == 1 else s for n, s in zip(extent[1:], strides, strict=True)),
            box=(swizzle // itemsize, rows, 1, 1, 1),
            swizzle=swizzle,
        )


def _score_rows(problem: AttentionProblem, views: dict[str, Any]) -> int:
    """Rows of a box of bias or mask: one, where that is for all queries."""
    name = score_array(problem)
    if name is None:
        return 0
    return 1 if views[f"{name}.row"] == 0 or problem.seqlen_q == 1 else _CONSUMER_ROWS


def specialisations() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """As ``tiling.specialisations``."""
    for dtype in ("float16", "bfloat16"):
        # Two rows of the table may have the same tiles.
        built = {
            tiles.options(dtype, general)
            for tiles in TABLE
            for general in ((True,) if tiles.score_array else (False, True))
        }
        for options in sorted(built):
            yield KERNEL, options, ("sm_90a",)
