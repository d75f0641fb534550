# SPDX-License-Identifier: MIT
"""From a plan and arrays to launch records.

A record says everything of one launch and needs no CUDA: ``_call`` puts device addresses into it
and launches, a host harness interprets it over numpy arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash import _params, _simt, _sm80, _sm90, _sm90_float32
from cupyflash._params import Pointer
from cupyflash._tensormap import TensorMap

if TYPE_CHECKING:
    from cupyflash._problem import AttentionProblem
    from cupyflash.plan import Plan

MAX_GRID_X = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """One launch of ``kernels/<kernel>.cu``: its entry has the same name and one parameter struct.

    ``params`` is that struct with null pointers; ``pointers`` says whose address goes where, and
    ``tensor_maps`` the same of tensor maps, of which the GPU path makes the driver's bytes.
    ``waits_itself``: it may begin while the launch before it ends, for which the kernel waits.
    """

    kernel: str
    options: tuple[str, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    params: bytes
    pointers: tuple[Pointer, ...]
    tensor_maps: tuple[TensorMap, ...] = ()
    waits_itself: bool = False


class Described:
    """Workspaces that are not allocated: of their shapes and dtypes, with no memory behind them."""

    @staticmethod
    def empty(shape: Any, dtype: Any) -> np.ndarray:
        """As ``numpy.empty``, to be described only."""
        return np.broadcast_to(np.empty((), dtype), shape)

    zeros = empty


def prepare(
    plan: Plan,
    problem: AttentionProblem,
    out: Any,
    return_lse: bool,
    xp: Any,
    workspaces: Any = None,
) -> tuple[Any, Any, list[LaunchRecord]]:
    """Allocate the results with ``xp`` (numpy or CuPy); describe the launches.

    ``workspaces`` has ``empty`` and ``zeros`` for what kernels use beside them; default: ``xp``.
    """
    workspaces = xp if workspaces is None else workspaces
    o = xp.empty(problem.out_shape, problem.dtype) if out is None else out
    lse = xp.empty(problem.out_shape[:-1], problem.acc_dtype) if return_lse else None
    if problem.batch * problem.heads_q * problem.seqlen_q == 0:
        return o, lse, []
    # With the head axis that the result of 2-D arrays lacks.
    o_heads = o[None] if problem.flat else o
    lse_heads = lse[None] if problem.flat and lse is not None else lse
    for divided in (_sm80, _simt, _sm90_float32):
        if plan.kernel == divided.KERNEL:
            records = divided.records(
                problem, plan.tiles, plan.parts, o_heads, lse_heads, workspaces
            )
            return o, lse, list(records)
    if plan.kernel == _sm90.KERNEL:
        records = _sm90.records(problem, plan.tiles, plan.device, o_heads, lse_heads, workspaces)
        return o, lse, list(records)
    return o, lse, list(_fa1_records(plan, problem, o_heads, lse_heads, workspaces))


def _fa1_records(
    plan: Plan, problem: AttentionProblem, o: Any, lse: Any, xp: Any
) -> Iterator[LaunchRecord]:
    tiling = plan.tiling
    rows = (problem.heads_q, problem.seqlen_q)
    for sizes, views in launch_batches(problem, o, lse):
        batch = math.prod(sizes)
        l, m = (xp.empty((batch, *rows), problem.acc_dtype) for _ in range(2))
        O = views["o.data"]
        if problem.dtype != problem.acc_dtype:
            O = xp.empty((batch, *rows, problem.head_dim_v), problem.acc_dtype)
        fields = views | scalar_fields(problem, sizes)
        params, pointers = _params.pack(
            _params.FA1_FIELDS,
            {f"problem.{name}": value for name, value in fields.items()}
            | {"O": O, "l": l, "m": m}
            | {"Br": tiling.Br, "Bc": tiling.Bc, "chunks": plan.chunks},
        )
        blocks = batch * problem.heads_q * plan.chunks
        yield LaunchRecord(
            kernel=plan.kernel,
            options=plan.options,
            grid=(min(blocks, MAX_GRID_X), 1, 1),
            block=plan.block,
            smem_bytes=plan.smem_bytes,
            params=params,
            pointers=pointers,
        )


# The axes behind the batch axes, as struct TensorView names them.
_AXES = {
    **dict.fromkeys(("q", "k", "v", "o", "bias", "mask"), ("head", "row", "col")),
    "lse": ("head", "row"),
    "alibi_slopes": ("head",),
    "seqlens_k": (),
}


def scalar_fields(problem: AttentionProblem, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The fields of ``struct Problem`` that are no arrays."""
    fields: dict[str, Any] = {f"batch[{axis}]": size for axis, size in enumerate(sizes)}
    for name in (
        *("heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
        *("softmax_scale", "softcap", "window_left", "window_right"),
    ):
        fields[name] = getattr(problem, name)
    fields["top_left"] = int(problem.top_left)
    fields["bias_is_float"] = int(problem.bias_dtype == np.float32 and problem.dtype != np.float32)
    fields["seqlens_are_int32"] = int(problem.has_seqlens and problem.seqlens_k.dtype == np.int32)
    return fields


def launch_batches(
    problem: AttentionProblem, o: Any, lse: Any, walked: int = _params.BATCH_AXES
) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Batch axes for a kernel to walk, with the TensorView fields of every array.

    Neighbouring axes that every array strides through as one are merged; each entry of what is
    left beyond ``walked`` axes is a launch of its own. There are ``BATCH_AXES`` sizes, 1 in front.
    """
    arrays = {name: getattr(problem, name) for name in _AXES if name not in ("o", "lse")}
    arrays = {name: x for name, x in (arrays | {"o": o, "lse": lse}).items() if x is not None}
    axes = len(problem.batch_shape)
    sizes, strides = merge_axes(problem.batch_shape, [x.strides[:axes] for x in arrays.values()])
    outer = max(len(sizes) - walked, 0)
    padding = _params.BATCH_AXES - len(sizes) + outer
    for index in itertools.product(*map(range, sizes[:outer])):
        fields = {}
        for (name, array), s in zip(arrays.items(), strides, strict=True):
            offset = sum(map(operator.mul, index, s))
            walked_strides = (0,) * padding + s[outer:]
            fields |= _params.view_fields(name, array, offset, walked_strides, *_AXES[name])
        yield (1,) * padding + sizes[outer:], fields


def merge_axes(
    sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes that every array walks through with one stride.

    Axes of size 1 are dropped.

    Examples
    --------
    >>> merge_axes((2, 3, 4), [(96, 32, 8), (0, 0, 8)])
    ((6, 4), [(32, 8), (0, 8)])
    """
    merged: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if merged and all(k[-1] == s[axis] * size for k, s in zip(kept, strides, strict=True)):
            merged[-1] *= size
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[axis]
        else:
            merged.append(size)
            for k, s in zip(kept, strides, strict=True):
                k.append(s[axis])
    return tuple(merged), [tuple(k) for k in kept]
