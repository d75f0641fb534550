# SPDX-License-Identifier: MIT
"""``forward_sm80``: which calls it serves, with what tiles and parts, and its launch records."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyflash import _params, _tiles
from cupyflash._problem import ARRAYS, AttentionProblem
from cupyflash.devices import Device
from cupyflash.tiling import ceil_div, round_up

KERNEL = "forward_sm80"
COMBINE = "combine"
_ROW_LINE = 128  # bytes that a row of a tile in shared memory is padded to
_STATIC_SMEM = 256  # bytes that a block has beside its tiles, at most
_MAX_LENGTH = 2**29  # of sequences, so that sums of positions are 32-bit numbers
_MAX_HEADS = 2**32
_MAX_FLOAT64_SCALE = 2.0**100  # Q is scaled before its products are made
_MAX_ROWS = 2**31  # (query, head) pairs of a group that tiles are cut of
# Compute capabilities whose float64 is an afterthought.
SLOW_FLOAT64 = ((7, 5), (8, 6), (8, 9), (10, 3), (12, 0))
_COMBINE_WARPS = 8  # kWarps
_COMBINE_ROUND = 4  # kRound
MAX_SPLITS = 128  # kMaxSplits
MAX_COUNTS = 4096  # tiles whose parts are counted, of a launch
_VECTOR = 16  # bytes that parts are read by
_PROBLEM = tuple(f"problem.{name}" for name in _params.PROBLEM_FIELDS)
_FIELDS = (
    *_PROBLEM,
    *("O", "lse", "first_head", "heads", "pack", "bunch", "splits", "slices"),
    *("q_vectors", "k_vectors", "v_vectors", "o_vectors", "bias_vectors"),
    *("mask_vectors", "counts"),
)
_ARGUMENTS = tuple(f"problem.{name}.data" for name in ARRAYS)
_COMBINE_FIELDS = (*_PROBLEM, "O", "lse", "rows", "splits", "team")
_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a specialisation of the kernel is built for.

    ``head_dim`` and ``head_dim_v`` are columns of tiles; arrays may have fewer, and more of V's are
    cut into slices. ``blocks`` of its thread blocks are to share a multiprocessor, which bounds
    their registers. ``bias_bytes`` and ``mask_bytes`` of a score, where a call has them, lie in
    shared memory beside the tiles; a build serves any. ``tf32``: float32 by one TF32 product.
    """

    head_dim: int
    head_dim_v: int
    Br: int
    warps: int
    Bc: int
    stages: int
    blocks: int
    itemsize: int
    bias_bytes: int = 0
    mask_bytes: int = 0
    tf32: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """Q, ``stages`` of K and V, and the tile of bias and mask that is loaded ahead.

        Rows of Q, K and V are padded to whole lines. Beside a mask there are the sets of keys that
        it shows of two tiles: a word for 32 of a lane's scores each.
        """
        d, dv = (round_up(n * self.itemsize, _ROW_LINE) for n in (self.head_dim, self.head_dim_v))
        scores = self.Br * self.Bc * (self.bias_bytes + self.mask_bytes)
        sets = 2 * 4 * self.threads * (self.Br // (16 * self.warps)) if self.mask_bytes else 0
        return self.Br * d + self.stages * self.Bc * (d + dv) + scores + sets

    def merges(self, general: bool) -> bool:
        """Whether a build has code to merge parts of the keys itself (kMergesParts)."""
        return not general and self.itemsize == 2 and self.Br <= _SHORT_ROWS

    def fits(self, device: Device) -> bool:
        """Whether ``blocks`` of them find room on a multiprocessor."""
        smem_bytes = self.smem_bytes + _STATIC_SMEM
        return device.resident_blocks(self.threads, 32, smem_bytes) >= self.blocks

    def options(self, dtype: str, general: bool) -> tuple[str, ...]:
        """The -D macros of the specialisation."""
        return (
            *_tiles.options(self, dtype, general),
            f"-DCUPYFLASH_WARPS={self.warps}",
            f"-DCUPYFLASH_BLOCKS={self.blocks}",
            *(("-DCUPYFLASH_TF32=1",) if self.tf32 else ()),
        )


# Columns of K's and V's tiles.
_BUCKETS = (32, 64, 96, 128, 192, 256)
_SLICE_LIMIT = {2: 256, 4: 128, 8: 128}  # more columns of O would not fit the registers
# (itemsize, largest bucket, kind): (Br, warps, Bc, stages, blocks), best first; the first
# that fits the device is taken. Kinds: "plain" calls; "short" ones, whose queries all fit 64 rows,
# and "general" ones, where what changes the scores needs registers.
#   16-bit    32 queries a warp: what is read of K and V then serves two products, or shared memory
#             would be the limit. O of more than 128 columns leaves registers for 16 queries only.
#             In an earlier form, on an H200, bf16, 4,096 tokens: 337 TFLOP/s at head_dim 64 with
#             Bc = 96, 328 with 64, 288 with 112 (spills); 391 at 128 with Bc = 64, 295 with 48.
#             16 queries: 290 and 270.
#   float32   32 queries to 64 columns: in an earlier form 62 TFLOP/s, 16 queries 56. Then O leaves
#             room for 16.
#   float64   at 128 columns reading Q for 16 keys takes all that shared memory gives beside Q K^T,
#             for 24 keys 83 % of it: 46.5 and 45.6 TFLOP/s on an H200.
#   general   as plain ones; 96 keys are no power of two, which the tiles of bias and mask want, and
#             more keys or wider elements leave no registers.
_TABLE = {
    (2, 64, "plain"): ((128, 4, 96, 2, 2), (128, 4, 64, 2, 2), (128, 4, 32, 2, 2)),
    (2, 128, "plain"): ((128, 4, 64, 2, 2), (128, 4, 32, 2, 2), (128, 4, 32, 2, 1)),
    (2, 256, "plain"): ((128, 8, 64, 2, 1), (128, 8, 32, 2, 1), (64, 4, 32, 2, 1)),
    (2, 128, "short"): ((64, 4, 64, 2, 2), (64, 4, 32, 2, 2)),
    (2, 256, "short"): ((64, 4, 32, 2, 1),),
    (2, 128, "general"): ((128, 4, 64, 2, 2), (128, 4, 32, 2, 2), (128, 4, 32, 2, 1)),
    (2, 256, "general"): ((128, 8, 32, 2, 1), (64, 4, 32, 2, 1), (64, 4, 16, 2, 1)),
    (4, 64, "plain"): ((128, 4, 32, 2, 2), (64, 4, 32, 2, 2), (64, 4, 32, 2, 1)),
    (4, 128, "plain"): ((128, 8, 32, 2, 1), (64, 4, 32, 2, 1)),
    (4, 256, "plain"): ((64, 4, 16, 2, 1), (32, 2, 16, 2, 1)),
    (4, 64, "short"): ((64, 4, 32, 2, 2), (64, 4, 32, 2, 1)),
    (4, 64, "general"): ((64, 4, 32, 2, 2), (64, 4, 32, 2, 1)),
    (4, 128, "general"): ((64, 4, 16, 2, 2), (64, 4, 16, 2, 1)),
    (8, 64, "plain"): ((128, 8, 32, 2, 1), (64, 4, 16, 2, 1)),
    (8, 128, "plain"): (
        (128, 8, 24, 2, 1),
        (128, 8, 16, 2, 1),
        (64, 4, 16, 2, 1),
        (32, 2, 16, 2, 1),
    ),
    (8, 256, "plain"): ((64, 4, 16, 2, 1), (32, 2, 16, 2, 1), (16, 1, 8, 2, 1)),
    (8, 128, "general"): ((128, 8, 8, 2, 1), (64, 4, 8, 2, 1), (32, 2, 8, 2, 1)),
    (8, 256, "general"): ((64, 4, 8, 2, 1), (32, 2, 8, 2, 1), (16, 1, 8, 2, 1)),
}
_SHORT_ROWS = 64
KINDS = ("plain", "short", "general")


def buckets(itemsize: int, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of the tiles of K and V that hold these head dims, V's perhaps in slices.

    Each pair is a specialisation of its own: both take the larger bucket, but for small V beside
    large K.

    Examples
    --------
    >>> buckets(2, 40, 64), buckets(2, 192, 128), buckets(8, 256, 256), buckets(4, 64, 512)
    ((64, 64), (192, 128), (256, 128), (128, 128))
    """
    limit = _SLICE_LIMIT[itemsize]
    d, dv = _bucket(head_dim), _bucket(min(head_dim_v, limit))
    if d > 128 and dv <= 128:
        return d, 128
    return max(d, dv), min(max(d, dv), limit)


def _bucket(columns: int) -> int:
    return next(bucket for bucket in _BUCKETS if columns <= bucket)


def _candidates(
    itemsize: int, d: int, dv: int, kind: str, bias_bytes: int = 0, mask_bytes: int = 0
) -> Iterator[Tiles]:
    limits = sorted({limit for size, limit, _ in _TABLE if size == itemsize})
    fitting = [limit for limit in limits if max(d, dv) <= limit]
    # A kind without a row of its own is run as a plain call.
    rows = next(
        _TABLE[itemsize, limit, name]
        for name in (kind, "plain")
        for limit in fitting
        if (itemsize, limit, name) in _TABLE and (name == "plain" or limit <= 128 or d > 128)
    )
    for row in rows:
        yield Tiles(d, dv, *row, itemsize, bias_bytes, mask_bytes)


def tiles_for(problem: AttentionProblem, device: Device) -> Tiles | None:
    """What a call is run with on a device; None where not even the smallest tiles fit."""
    itemsize = problem.dtype.itemsize
    kind = "plain"
    if problem.general:
        kind = "general"
    elif problem.seqlen_q * pack(problem) <= _SHORT_ROWS:
        kind = "short"
    d, dv = buckets(itemsize, problem.head_dim, problem.head_dim_v)
    bias_bytes = problem.bias_dtype.itemsize if problem.bias_dtype is not None else 0
    for tiles in _candidates(itemsize, d, dv, kind, bias_bytes, int(problem.has_mask)):
        if tiles.fits(device):
            return dataclasses.replace(tiles, tf32=problem.tf32)
    return None


def refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel can't run a call, in words that end a sentence; None if it can."""
    if device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        return f"needs compute capability 8.0, {device.name} has {major}.{minor}"
    if problem.head_dim > _BUCKETS[-1]:
        return f"takes head_dim up to {_BUCKETS[-1]}, q has {problem.head_dim}"
    if max(problem.seqlen_q, problem.seqlen_k) >= _MAX_LENGTH:
        return f"takes sequences of less than {_MAX_LENGTH}"
    if problem.batch * problem.heads_q >= _MAX_HEADS:
        return "takes less than 2^32 heads of all batch entries together"
    if problem.dtype.itemsize == 8 and abs(problem.softmax_scale) > _MAX_FLOAT64_SCALE:
        return f"takes a softmax_scale of float64 up to {_MAX_FLOAT64_SCALE:g} in size"
    if tiles_for(problem, device) is None:
        return (
            f"can't hold tiles of head_dim {problem.head_dim} in the {device.smem_block_bytes} "
            f"bytes of shared memory that a thread block of {device.name} has"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the work is divided among thread blocks.

    ``pack`` query heads of a group are rows of a tile; ``splits`` parts of the keys, whose results
    ``combine`` merges; ``slices`` of head_dim_v; ``bunch`` heads (of ``pack``) are walked together,
    so that their K and V stay in the L2 cache. ``merges``: the thread block of a tile that is done
    last merges its parts, which needs no ``combine``.
    """

    pack: int
    splits: int
    slices: int
    bunch: int
    blocks_a_head: int
    merges: bool = False


def pack(problem: AttentionProblem) -> int:
    """Query heads that share a tile: all that share a key head, where few queries are there.

    Not where a mask or a bias may hide from one head what another sees: V is shared by a tile.
    """
    if problem.has_mask or problem.bias_dtype is not None:
        return 1
    few = 0 < problem.seqlen_q < _SHORT_ROWS and problem.seqlen_q * problem.group < _MAX_ROWS
    return problem.group if few and problem.group > 1 else 1


def parts(
    problem: AttentionProblem, tiles: Tiles, device: Device, splits: int | None = None
) -> Parts:
    """Divide a call's work; ``splits`` asks for a number of parts of the keys."""
    packed = pack(problem)
    heads = problem.batch * problem.heads_q // packed
    slices = max(1, ceil_div(problem.head_dim_v, tiles.head_dim_v))
    Tr = ceil_div(problem.seqlen_q * packed, tiles.Br)
    if splits is None:
        splits = fitting_splits(problem, tiles, device, heads * Tr * slices)
    assert 1 <= splits <= MAX_SPLITS
    merges = splits > 1 and slices == 1 and _merges(problem, tiles, packed, splits, heads * Tr)
    bunched = bunch(problem, device, packed)
    return Parts(packed, splits, slices, bunched, Tr * splits * slices, merges)


def _merges(problem: AttentionProblem, tiles: Tiles, packed: int, splits: int, works: int) -> bool:
    """Whether one thread block merges a tile's parts: where they fit its shared memory.

    It has them all on their way at once then. On an H200 that is 60 KB for one query of 4 heads and
    32 parts; more would take it longer than it takes ``combine``, which spreads them, to be there.
    """
    itemsize = problem.acc_dtype.itemsize
    rows = min(problem.seqlen_q * packed, tiles.Br)
    part_bytes = rows * (problem.head_dim_v + 1) * itemsize
    return (
        tiles.merges(problem.general)
        and problem.head_dim_v * itemsize % _VECTOR == 0
        and splits * part_bytes <= tiles.smem_bytes
        and works <= MAX_COUNTS
    )


_SPLIT_KEYS = 256  # fewer keys in a part are not worth its share of the merge
_BLOCK_COST = 4  # what beginning and ending a thread block costs, in tiles of keys


def fitting_splits(problem: AttentionProblem, tiles: Tiles, device: Device, works: int) -> int:
    """Parts of the keys, so that all multiprocessors have work and the last round is full."""
    slots = device.multiprocessors * tiles.blocks
    Tc = ceil_div(problem.seqlen_k, tiles.Bc)
    most = min(ceil_div(problem.seqlen_k, _SPLIT_KEYS), Tc, MAX_SPLITS)
    if works == 0 or most <= 1 or works >= 0.8 * slots:
        return 1

    def steps(splits: int) -> int:
        return ceil_div(works * splits, slots) * (ceil_div(Tc, splits) + _BLOCK_COST)

    return min(range(1, most + 1), key=lambda splits: (steps(splits), splits))


def bunch(problem: AttentionProblem, device: Device, packed: int) -> int:
    """Heads, of ``packed`` query heads each, whose K and V fit the L2 cache together."""
    heads = problem.batch * problem.heads_q // packed
    if problem.window_left < 0 and problem.window_right < 0:
        return 1  # all works take equally long
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    key_heads = max(1, int(_tiles.L2_SHARE * device.l2_bytes) // max(1, problem.seqlen_k * row))
    return max(1, min(key_heads * problem.group // packed, heads))


def records(
    problem: AttentionProblem,
    tiles: Tiles,
    work: Parts,
    o: Any,
    lse: Any,
    xp: Any,
    *,
    kernel: str = KERNEL,
    fields: tuple[str, ...] = _FIELDS,
) -> Iterator[Any]:
    """The launches of one call; ``o`` and ``lse`` have a head axis.

    ``kernel`` may be another that divides its work alike; ``fields`` are those of its parameters.
    """
    from cupyflash import _launch

    rows = (problem.heads_q, problem.seqlen_q)
    for sizes, views in _launch.launch_batches(problem, o, lse, _params.BATCH_AXES):
        batch = math.prod(sizes)
        arguments = views | _launch.scalar_fields(problem, sizes)
        values = {f"problem.{name}": value for name, value in arguments.items()}
        if work.splits > 1:
            acc = problem.acc_dtype
            values["O"] = xp.empty((work.splits, batch, *rows, problem.head_dim_v), acc)
            values["lse"] = xp.empty((work.splits, batch, *rows), acc)
        if work.merges:
            values["counts"] = xp.zeros(MAX_COUNTS, np.uint32)
        numbers = {"pack": work.pack, "bunch": work.bunch, "splits": work.splits}
        numbers |= {"slices": work.slices}
        for name in (*"qkvo", "bias", "mask"):
            numbers[f"{name}_vectors"] = int(_tiles.vectors(name, views))
        numbers = {name: value for name, value in numbers.items() if name in fields}
        heads = batch * problem.heads_q // work.pack
        at_once = max(1, _launch.MAX_GRID_X // work.blocks_a_head)
        for first in range(0, heads, at_once):
            count = min(at_once, heads - first)
            params, pointers = _params.pack(
                fields, values | numbers | {"first_head": first, "heads": count}
            )
            yield _launch.LaunchRecord(
                kernel=kernel,
                options=tiles.options(problem.dtype.name, problem.general),
                grid=(work.blocks_a_head * count, 1, 1),
                block=(tiles.threads, 1, 1),
                smem_bytes=tiles.smem_bytes,
                params=params,
                pointers=pointers,
            )
        if work.splits > 1 and not work.merges:
            rows_in_all = batch * math.prod(rows)
            team = combine_team(work.splits)
            # Of the arguments it needs no address: each costs the host time at every call.
            needed = {n: x for n, x in values.items() if n not in _ARGUMENTS}
            params, pointers = _params.pack(
                _COMBINE_FIELDS,
                needed | {"rows": rows_in_all, "splits": work.splits, "team": team},
            )
            blocks = ceil_div(rows_in_all, _COMBINE_WARPS // team)
            yield _launch.LaunchRecord(
                kernel=COMBINE,
                options=combine_options(problem.dtype.name),
                grid=(min(blocks, _launch.MAX_GRID_X), 1, 1),
                block=(32 * _COMBINE_WARPS, 1, 1),
                smem_bytes=0,
                params=params,
                pointers=pointers,
                waits_itself=True,
            )


def combine_team(splits: int) -> int:
    """Warps that merge a row: a power of two, so many that each has one round of parts to load.

    Examples
    --------
    >>> [combine_team(splits) for splits in (2, 4, 5, 16, 17, 128)]
    [1, 1, 2, 4, 8, 8]
    """
    rounds = ceil_div(splits, _COMBINE_ROUND)
    return min(_COMBINE_WARPS, 1 << (rounds - 1).bit_length())


def combine_options(dtype: str) -> tuple[str, ...]:
    """The -D macros of ``combine``."""
    return (f"-DCUPYFLASH_ELEMENT={dtype}", "-DCUPYFLASH_GENERAL=0")


def specialisations() -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """As ``tiling.specialisations``."""
    from cupyflash import devices

    pairs = [(d, d) for d in _BUCKETS] + [(d, 128) for d in _BUCKETS if d > 128]
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)):
        wanted: dict[tuple[Tiles, bool], list[str]] = {}
        for (d, dv), kind, architecture in itertools.product(pairs, KINDS, _ARCHITECTURES):
            if dv > _SLICE_LIMIT[itemsize]:
                continue
            device = devices.architecture_device(architecture)
            extras = (
                {(b, m) for b in (0, itemsize, 4) for m in (0, 1)}
                if kind == "general"
                else {(0, 0)}
            )
            for extra in sorted(extras):
                candidates = _candidates(itemsize, d, dv, kind, *extra)
                tiles = next((t for t in candidates if t.fits(device)), None)
                if tiles is not None:
                    build = dataclasses.replace(tiles, bias_bytes=0, mask_bytes=0)
                    found = wanted.setdefault((build, kind == "general"), [])
                    found += [] if architecture in found else [architecture]
        for (tiles, general), architectures in wanted.items():
            for tf32 in (False, True)[: 2 if dtype == "float32" else 1]:
                build = dataclasses.replace(tiles, tf32=tf32)
                yield KERNEL, build.options(dtype, general), tuple(architectures)
        # forward_simt divides its keys too.
        yield COMBINE, combine_options(dtype), ("sm_70", "sm_75", *_ARCHITECTURES)
