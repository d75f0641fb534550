# SPDX-License-Identifier: MIT
"""Thousands of random problems against float64, all of it on the GPU.

Sizes and options are drawn freely, dtypes and tiles from a list, so that few kernels are built.
The reference and the bounds are those of ``assert_attention_close``, in CuPy; every so often a
problem is judged by both. What is read before it is written is NaN. A failure names the seed:
``run(cupy, kernel, count, seed)``.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import _dtypes, attention, devices, tiling
from cupyflash._bench_gpu import float64
from cupyflash.testing import DTYPES, Problem, assert_attention_close

ROOT = Path(__file__).resolve().parents[1]
_POOL = 2**24  # numbers that a hundred problems take theirs from: more than any array has
_SHARED = 100
_COMPARED = 250  # every so many problems are judged on the host too
_MOST_SCORES = 2**20

# Columns of tiles, and the least head_dim that takes them: all that Hopper's own kernels have, some
# of forward_sm80's, which has more dtypes and kinds of calls.
_TILES = {
    "forward_sm90": tuple(
        (1, d, dv) for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
    ),
    "forward_sm90_float32": ((1, 64, 32), (33, 64, 64), (65, 96, 96), (97, 128, 128)),
    "forward_sm80": ((33, 64, 64), (97, 128, 128), (193, 256, 128)),
}
_DTYPES = {
    "forward_sm90": ("float16", "bfloat16"),
    "forward_sm90_float32": ("float32",),
    "forward_sm80": DTYPES,
}
_DIVIDING = ("forward_sm90_float32", "forward_sm80")
_EDGES = (1, 2, 16, 63, 64, 65, 80, 127, 128, 129, 176, 191, 192, 193, 256, 257, 352, 384, 385, 640)


@dataclass(frozen=True)
class Drawn:
    """Sizes and options of one problem; no arrays yet."""

    dtype: str
    batch: int
    heads_k: int
    group: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    spread: float  # of scores
    swapped: bool  # (batch, seqlen, heads, head_dim) in memory
    num_splits: int | None
    options: dict[str, Any]


def draw(rng: np.random.Generator, kernel: str) -> Drawn:
    """A problem that the kernel takes."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    def length(most):
        return min(most, one_of(int(one_of(*_EDGES)), int(2 ** rng.uniform(0, np.log2(most)))))

    def columns(least, held):
        step = 8 if kernel == "forward_sm90" else 1  # TMA's rows are multiples of 16 bytes
        if rng.random() < 0.4:
            return held
        return step * int(rng.integers(-(-least // step), held // step, endpoint=True))

    least, held, held_v = one_of(*_TILES[kernel])
    seqlen_k = int(rng.integers(4096, 4700)) if rng.random() < 0.05 else length(700)
    seqlen_q = length(min(700, _MOST_SCORES // seqlen_k))
    room = _MOST_SCORES // (seqlen_q * seqlen_k)
    group = min(room, one_of(1, 1, 2, 4))
    heads_k = min(room // group, one_of(1, 2, 3))
    batch = min(room // (group * heads_k), one_of(1, 2, 3))
    head_dim = columns(least, held)
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["causal"] = one_of(True, True, "top_left")
    if rng.random() < 0.25:
        options["window"] = tuple(one_of(None, 0, 7, 64, 200) for _ in range(2))
    if rng.random() < 0.2:
        options["softcap"] = float(one_of(1.0, 5.0, 50.0))
    if rng.random() < 0.2:
        options["softmax_scale"] = float(one_of(0.5, 1.0, 2.0)) * head_dim**-0.5
    if rng.random() < 0.2:
        options["alibi_slopes"] = 2.0 ** rng.uniform(-8, 0, heads_k * group)
    if rng.random() < 0.3:
        options["seqlens_k"] = rng.integers(0, seqlen_k, batch, endpoint=True)
    num_splits = None
    if kernel in _DIVIDING:
        num_splits = one_of(None, None, 1, 2, 7)
        if rng.random() < 0.2:
            options["mask"] = True
        if rng.random() < 0.2:
            options["bias"] = True
    return Drawn(
        dtype=one_of(*_DTYPES[kernel]),
        batch=batch,
        heads_k=heads_k,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=columns(1, held_v),
        spread=float(one_of(1.0, 1.0, 0.01, 30.0)),
        swapped=bool(rng.random() < 0.3),
        num_splits=num_splits,
        options=options,
    )


class Pool:
    """Numbers for many problems: each takes its own stretches of them."""

    def __init__(self, xp: Any, rng: np.random.Generator) -> None:
        self._rng = rng
        self._normal = xp.random.standard_normal(_POOL)
        if xp is not np:
            self._normal = self._normal.astype(np.float32)
        self._xp = xp

    def normal(self, shape: tuple[int, ...], dtype: Any, factor: float = 1.0) -> Any:
        size = int(np.prod(shape))
        first = int(self._rng.integers(_POOL - size))
        return (self._normal[first : first + size] * factor).astype(dtype).reshape(shape)


def arrays_of(xp: Any, drawn: Drawn, pool: Pool) -> tuple[list[Any], dict[str, Any]]:
    """(q, k, v) and the options of a call."""
    d, heads_q = drawn, drawn.heads_k * drawn.group
    dtype = _dtypes.named(d.dtype)
    scale = d.options.get("softmax_scale", d.head_dim**-0.5)
    factor = (d.spread / (scale * d.head_dim**0.5)) ** 0.5

    def array(heads, rows, columns, factor):
        if d.swapped:
            return pool.normal((d.batch, rows, heads, columns), dtype, factor).swapaxes(1, 2)
        return pool.normal((d.batch, heads, rows, columns), dtype, factor)

    qkv = [
        array(heads_q, d.seqlen_q, d.head_dim, factor),
        array(d.heads_k, d.seqlen_k, d.head_dim, factor),
        array(d.heads_k, d.seqlen_k, d.head_dim_v, 1.0),
    ]
    options = dict(d.options)
    if "alibi_slopes" in options:
        wide = np.float64 if d.dtype == "float64" else np.float32
        options["alibi_slopes"] = xp.asarray(options["alibi_slopes"].astype(wide))
    if "seqlens_k" in options:
        options["seqlens_k"] = xp.asarray(options["seqlens_k"])
    if "mask" in options:
        options["mask"] = pool.normal((heads_q, d.seqlen_q, d.seqlen_k), np.float32) > -0.5
    if "bias" in options:
        options["bias"] = pool.normal((d.batch, 1, d.seqlen_q, d.seqlen_k), dtype)
    return qkv, options


def nan_filled(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """By its bits, since not every operation knows bfloat16."""
    filled = xp.empty(shape, f"u{np.dtype(dtype).itemsize}")
    filled.fill(np.iinfo(filled.dtype).max)
    return filled.view(dtype)


def judge(xp: Any, qkv: list[Any], options: dict[str, Any], o: Any, lse: Any) -> Any:
    """[error of o, error of lse], each in units of its bound; inf where NaN, or not 0 or -inf.

    The bounds are those of the docstring of ``assert_attention_close``.
    """
    dtype = qkv[0].dtype
    q, k, v = (float64(x) for x in qkv)
    group = q.shape[1] // k.shape[1]
    k, v = xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1)
    head_dim, seqlen_q, seqlen_k = q.shape[-1], q.shape[-2], k.shape[-2]
    scale = options.get("softmax_scale", head_dim**-0.5)
    length = options.get("seqlens_k", xp.full(1, seqlen_k))[:, None, None, None]
    i, j = xp.arange(seqlen_q)[:, None], xp.arange(seqlen_k)
    diagonal = i + (0 * length if options.get("causal") == "top_left" else length - seqlen_q)
    left, right = options.get("window", (None, None))
    shown = j < length
    if left is not None:
        shown = shown & (j >= diagonal - left)
    if options.get("causal"):
        shown = shown & (j <= diagonal)
    elif right is not None:
        shown = shown & (j <= diagonal + right)
    product = scale * (q @ k.swapaxes(-1, -2))
    terms = abs(scale) * (abs(q) @ abs(k).swapaxes(-1, -2))
    s = product
    if (softcap := options.get("softcap")) is not None:
        capped = xp.tanh(product / softcap)
        s = softcap * capped
        terms = terms * (1 - capped**2) + abs(s)
    added = xp.zeros(1)
    if "bias" in options:
        added = added + float64(options["bias"])
    if "alibi_slopes" in options:
        added = added - float64(options["alibi_slopes"])[:, None, None] * abs(diagonal - j)
    if "mask" in options:
        shown = shown & options["mask"]
    shown = xp.broadcast_to(shown, s.shape)
    s = xp.where(shown, s + added, -np.inf)
    top = s.max(-1, keepdims=True)
    weights = xp.exp(s - xp.where(top == -np.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    p = weights / xp.where(empty, 1.0, total)
    log_sum = xp.where(empty, -np.inf, top + xp.log(xp.where(empty, 1.0, total)))[..., 0]
    expected = p @ v

    half = dtype.itemsize == 2
    c = 1e-14 if dtype == np.float64 else 1e-6
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    most = xp.where(shown, terms + abs(added), 0.0).max()
    growth = xp.maximum(1.0, most / 8)
    score = 0.0
    if half and softcap is not None:
        score = 2.0**-15 * xp.where(shown, softcap * abs(capped), 0.0).max()
    if dtype == np.float32:
        growth = xp.maximum(growth, most / 8 * (1 + head_dim / 256))
        score = most * (2.0**-20 + head_dim * 2.0**-28)
    growth = xp.maximum(growth, head_dim**0.5 / 16 * (most - 16))
    flushed = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).smallest_normal)
    if half:
        flushed += unit * float(ml_dtypes.finfo(dtype).smallest_normal)
    used = xp.where(shown.any(-2)[..., None], abs(v), 0.0)
    floor = flushed * (1 + used.sum(-2, keepdims=True))
    quadratic = xp.sqrt(p**2 @ v**2)
    off = abs(float64(o) - expected)
    if half:
        linear, size = p @ abs(v), abs(expected)
        rounding = (unit + score) * (xp.minimum(linear, size + 4 * quadratic) + size)
        ratio = (off / (4 * c * growth * linear + rounding + floor)).max()
    else:
        norm = xp.maximum(xp.linalg.norm(expected), xp.linalg.norm(quadratic))
        bound = c * growth * norm + off.size**0.5 * floor.max()  # squares would be 0
        ratio = xp.linalg.norm(off) / bound
    none = empty[..., 0]
    wrong = (xp.where(empty, float64(o), 0.0) != 0).any() | ((lse == -np.inf) != none).any()
    wrong = wrong | xp.isnan(float64(o)).any() | xp.isnan(lse).any()
    known = xp.where(none, 0.0, log_sum)
    allowed = xp.maximum((1e-5 if half else c) * growth * xp.maximum(1.0, abs(known)), score)
    lse_off = abs(xp.where(none, 0.0, lse.astype(np.float64)) - known) / allowed
    ratios = xp.stack([ratio, lse_off.max()])
    return xp.where(wrong, np.inf, ratios)


def check_on_the_host(qkv: list[Any], options: dict[str, Any], o: Any, lse: Any) -> None:
    """The same result, held to the oracle of numpy."""

    def moved(x):
        return x.get() if hasattr(x, "get") else x

    problem = Problem(*map(moved, qkv), {name: moved(x) for name, x in options.items()})
    assert_attention_close((moved(o), moved(lse)), problem)


def build_all(kernel: str, architecture: str) -> None:
    """The specialisations of the list, side by side: in processes, for a compiler has its locks."""
    wanted = {(str(d), str(dv)) for _, d, dv in _TILES[kernel]}
    beside = "combine" if kernel in _DIVIDING else None
    jobs = []
    for name, options, architectures in tiling.specialisations():
        macros = dict(option.removeprefix("-DCUPYFLASH_").split("=") for option in options)
        tiles = (macros.get("HEAD_DIM"), macros.get("HEAD_DIM_V"))
        if name == beside or (name == kernel and tiles in wanted):
            jobs += [(name, options, architecture)] * (architecture in architectures)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def build(job):
        program = f"from cupyflash import _compile; _compile.build(*{job!r})"
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(build, jobs))


def run(xp: Any, kernel: str | None, count: int, seed: int) -> str:
    """So many problems; ``kernel`` None is numpy's. Returns what was run and how near the bounds.

    Raises
    ------
    AssertionError
        Names the problem that is furthest past its bound.
    """
    rng = np.random.default_rng(seed)
    xp.random.seed(seed)
    name = kernel or "forward_sm80"
    ran: Counter[tuple[Any, ...]] = Counter()
    worst, worst_lse = (0.0, None), (0.0, None)
    for first in range(0, count, _SHARED):
        pool = Pool(xp, rng)
        problems, ratios = [], []
        for n in range(first, min(first + _SHARED, count)):
            drawn = draw(rng, name)
            qkv, options = arrays_of(xp, drawn, pool)
            heads = drawn.heads_k * drawn.group
            shape = (drawn.batch, heads, drawn.seqlen_q, drawn.head_dim_v)
            out = nan_filled(xp, shape, qkv[0].dtype)
            # The pool of memory hands the same bytes out again, for lse and for parts.
            wide = np.float64 if drawn.dtype == "float64" else np.float32
            for rows in (shape[:-1], (2, *shape)):
                nan_filled(xp, rows, wide)
            how = {"kernel": kernel, "num_splits": drawn.num_splits if kernel else None}
            o, lse = attention(*qkv, **options, **how, out=out, return_lse=True)
            ratios.append(judge(xp, qkv, options, o, lse))
            problems.append(drawn)
            held = next(d for _, d, _ in _TILES[name] if drawn.head_dim <= d)
            ran[drawn.dtype, held] += 1
            if n % _COMPARED == 0:
                check_on_the_host(qkv, options, o, lse)
        for drawn, (ratio, ratio_lse) in zip(problems, xp.stack(ratios).tolist(), strict=True):
            worst = max(worst, (ratio, drawn), key=lambda pair: pair[0])
            worst_lse = max(worst_lse, (ratio_lse, drawn), key=lambda pair: pair[0])
    for what, (ratio, drawn) in (("o", worst), ("lse", worst_lse)):
        assert ratio <= 1, f"{what} is {ratio:.3g} times its bound (seed {seed}): {drawn}"
    kinds = ", ".join(f"{dtype} {held}: {n}" for (dtype, held), n in sorted(ran.items()))
    return (
        f"{name}: {count} problems, o at most {worst[0]:.3f} of its bound, lse "
        f"{worst_lse[0]:.3f} ({kinds}; seed {seed})"
    )


@pytest.mark.parametrize("seed", range(2))
def test_numpy_path_stays_within_the_bounds(seed):
    """What judges the kernels, on what needs no GPU."""
    assert "50 problems, o at most" in run(np, None, 50, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_judgement_is_that_of_assert_attention_close(dtype):
    """Results are moved away from the exact one until they are refused: by both, or by neither."""
    rng = np.random.default_rng(len(dtype))
    pool = Pool(np, rng)
    judged = Counter()
    while judged.total() < 150:
        drawn = draw(rng, "forward_sm80")
        if drawn.dtype != dtype or drawn.seqlen_q * drawn.seqlen_k > 4096:
            continue
        qkv, options = arrays_of(np, drawn, pool)
        problem = Problem(*qkv, options)
        o, lse = problem.reference
        unit = float(ml_dtypes.finfo(dtype).eps)
        for _ in range(10):
            moved_o, moved_lse = (
                (x + np.nan_to_num(abs(x), posinf=0) * rng.standard_normal(x.shape) * size)
                for x, size in (
                    (o, unit * 10 ** rng.uniform(-2, 2)),
                    (lse, 1e-14 if dtype == "float64" else 10 ** rng.uniform(-8, -3)),
                )
            )
            result = moved_o.astype(dtype), moved_lse
            worst = judge(np, qkv, options, *result).max()
            if 0.99 < worst < 1.01:  # rounding decides
                continue
            try:
                assert_attention_close(result, problem)
            except AssertionError:
                assert worst > 1, drawn
                judged["refused"] += 1
            else:
                assert worst < 1, drawn
                judged["taken"] += 1
    assert min(judged["refused"], judged["taken"]) > 15


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "count"),
    [
        pytest.param("forward_sm90", 10_000, marks=pytest.mark.kernel("forward_sm90")),
        pytest.param(
            "forward_sm90_float32",
            2_000,
            marks=pytest.mark.kernel("forward_sm90_float32", "combine"),
        ),
        pytest.param("forward_sm80", 2_000, marks=pytest.mark.kernel("forward_sm80", "combine")),
    ],
)
def test_random_problems(cupy, kernel, count, record_property):
    device = devices.current_device(0)
    if kernel.startswith("forward_sm90") and device.compute_capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, {device.name} has another")
    if device.compute_capability < (8, 0):
        pytest.skip(f"needs compute capability 8.0, {device.name} has less")
    build_all(kernel, device.architecture)
    seed = int(np.random.SeedSequence().entropy % 2**32)
    record_property("random problems", run(cupy, kernel, count, seed))
