# SPDX-License-Identifier: MIT
"""Which kernel runs a call, with what tiles, on what grid; and what that costs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cupyflash import (
    _checks,
    _gpu,
    _problem,
    _simt,
    _sm80,
    _sm90,
    _sm90_float32,
    devices,
    io_model,
    tiling,
)
from cupyflash._launch import MAX_GRID_X
from cupyflash._problem import AttentionProblem
from cupyflash.devices import Device
from cupyflash.tiling import Tiling

__all__ = ["KERNELS", "Algorithm1", "Plan", "plan"]

_DIVIDING = (_sm80.KERNEL, _sm90_float32.KERNEL, _simt.KERNEL)  # keys, where asked to
KERNELS = ("host", "fa1_forward", _simt.KERNEL, _sm80.KERNEL, _sm90.KERNEL, _sm90_float32.KERNEL)


@dataclasses.dataclass(frozen=True)
class Algorithm1:
    """Settings of ``fa1_forward``, to be passed as ``kernel``.

    Parameters
    ----------
    sram_elements : int, optional
        M of the notes: B_c = ceil(M / 4d) and B_r = min(B_c, d) to the letter. Default: the
        largest M that the device's shared memory can hold, rounded to whole warps of work.
    chunks : int, optional
        Thread blocks that share the T_r query blocks of one head; 1 is the paper's loop. Default:
        what keeps the device busiest.

    Raises
    ------
    TypeError, ValueError
        A setting that is no integer, or not positive.

    Examples
    --------
    >>> from cupyflash import plan
    >>> p = plan(seqlen_q=1024, head_dim=64, dtype="float32", device="H200",
    ...          kernel=Algorithm1(sram_elements=16384, chunks=1))
    >>> p.tiling.Br, p.tiling.Bc, p.grid
    (64, 64, (1, 1, 1))
    """

    sram_elements: int | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("sram_elements", "chunks"):
            value = getattr(self, name)
            if value is None:
                continue
            value = _checks.integer("Algorithm1", name, value)
            if value < 1:
                raise ValueError(f"Algorithm1: {name} is {value}; expected a positive integer")
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call runs, as :func:`plan` finds it; printing it explains the call.

    Attributes
    ----------
    kernel : str
        One of ``KERNELS``.
    problem : AttentionProblem
        Sizes and options of the call, without arrays.
    device : Device or None
        None for the host, which has none of what follows either.
    tiling : Tiling or None
        M, B_r, B_c and the SRAM of ``fa1_forward``.
    tiles : Tiles or None
        Tiles of the kernels that are compiled for them, all but ``fa1_forward``: ``Br``, ``Bc``,
        ``head_dim``, ``head_dim_v`` and more.
    parts : Parts or None
        How ``forward_sm80``, ``forward_sm90_float32`` or ``forward_simt`` divides the work:
        ``splits`` of the keys and more.
    chunks : int
        Thread blocks of ``fa1_forward`` that share a head.
    grid, block : tuple of 3 int
        Thread blocks of the launch, and threads of one. Batch axes that can't be walked as one are
        launches of their own, each with a grid of its part.
    smem_bytes : int
        Dynamic shared memory of a thread block.
    options : tuple of str
        The -D macros that make the specialisation.
    not_sm90 : str or None
        Why the plan passed over ``forward_sm90`` on a device that has it.

    Examples
    --------
    >>> p = plan(seqlen_q=4096, head_dim=128, heads_q=16, dtype="bfloat16", device="H200")
    >>> p.kernel, p.tiles.Br, p.tiles.Bc, f"{p.flops:.3g}"
    ('forward_sm90', 128, 176, '1.37e+11')
    """

    kernel: str
    problem: AttentionProblem
    device: Device | None = None
    tiling: Tiling | None = None
    tiles: _sm80.Tiles | _sm90.Tiles | None = None
    parts: _sm80.Parts | None = None
    chunks: int = 1
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    smem_bytes: int = 0
    options: tuple[str, ...] = ()
    not_sm90: str | None = None

    @property
    def blocks(self) -> int:
        """Pieces of work: one thread block each, unless the grid is at its limit or persistent."""
        heads = self.problem.batch * self.problem.heads_q
        if self.parts is not None:
            return heads // self.parts.pack * self.parts.blocks_a_head
        if self.tiles is not None:
            return heads * tiling.ceil_div(self.problem.seqlen_q, self.tiles.Br)
        return heads * self.chunks

    @functools.cached_property
    def flops(self) -> int:
        """Floating-point operations of both products over the pairs that see each other.

        ``2 (head_dim + head_dim_v)`` a pair; ``4 N^2 d`` a head without causal or window. What
        ``mask``, ``bias`` and ``seqlens_k`` hide is not known to a plan and is counted.
        """
        p = self.problem
        pairs = io_model.visible_pairs(p) * p.batch * p.heads_q
        return 2 * (p.head_dim + p.head_dim_v) * pairs

    @functools.cached_property
    def traffic(self) -> io_model.Traffic | None:
        """HBM traffic of the kernel, array by array; None for the host.

        Exact for ``fa1_forward``; for the others an upper bound, since the L2 cache serves much of
        what their thread blocks read of K and V.
        """
        if self.tiling is not None:
            return io_model.algorithm1(self.problem, self.tiling.Br, self.tiling.Bc, self.chunks)
        if self.tiles is None:
            return None
        parts = self.parts
        division = (
            {}
            if parts is None
            else {"pack": parts.pack, "splits": parts.splits, "slices": parts.slices}
        )
        streams_q = self.kernel == _simt.KERNEL
        Br, Bc = self.tiles.Br, self.tiles.Bc
        return io_model.q_outer(self.problem, Br, Bc, **division, streams_q=streams_q)

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes that the kernel reads from and writes to HBM, by ``traffic``; None for the host."""
        return None if self.traffic is None else self.traffic.bytes

    def __str__(self) -> str:
        from cupyflash._plan_table import table

        return "\n".join(table(self))


def plan(
    *,
    seqlen_q: int,
    head_dim: int,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    batch: int = 1,
    heads_q: int = 1,
    heads_k: int | None = None,
    dtype: Any = "float16",
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias_dtype: Any = None,
    mask: bool = False,
    alibi: bool = False,
    seqlens: bool = False,
    precision: str | None = None,
    device: str | int | Device | None = None,
    num_splits: int | None = None,
    kernel: str | Algorithm1 | None = None,
) -> Plan:
    """Explain how ``attention`` would run a call of these sizes, without arrays or a GPU.

    Block sizes come from the kernel's tile table; those of ``fa1_forward`` from Algorithm 1, line
    1 (arXiv:2205.14135): ``B_c = ceil(M / 4d)``, ``B_r = min(B_c, d)``, for the M that the device's
    shared memory holds.

    Parameters
    ----------
    seqlen_q, head_dim : int
        Rows and columns of q.
    seqlen_k, head_dim_v : int, optional
        Default: as q's.
    batch, heads_q, heads_k : int, optional
        Default: 1, 1 and ``heads_q``.
    dtype : dtype, default "float16"
        float16, bfloat16, float32 or float64.
    causal, window, softmax_scale, softcap
        As for ``attention``.
    bias_dtype : dtype, optional
        Plan for a bias of this dtype.
    mask, alibi, seqlens : bool
        Plan for a mask, ALiBi slopes, lengths of the keys in use.
    precision : {None, "full", "tf32"}
        As for ``attention``.
    device : str, int or Device, optional
        "cpu", the name of a GPU ("H200", "RTX 4090", ...), the number of a GPU that is there, or
        a Device. Default: GPU 0 if CuPy and a GPU are there, else "cpu".
    num_splits : int, optional
        As for ``attention``.
    kernel : str or Algorithm1, optional
        As for ``attention``.

    Returns
    -------
    Plan
        ``print(plan(...))`` gives a table.

    Raises
    ------
    TypeError, ValueError
        As ``attention`` would, and for an unknown device.

    Examples
    --------
    >>> p = plan(seqlen_q=4096, head_dim=64, dtype="float32", device="H200",
    ...          kernel="fa1_forward")
    >>> p.tiling.M, p.tiling.Br, p.tiling.Bc, p.tiling.Tr, p.tiling.Tc
    (58112, 64, 224, 64, 19)
    """
    problem = _problem.from_sizes(
        "plan",
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        seqlen_k=seqlen_k,
        head_dim_v=head_dim_v,
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        dtype=dtype,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias_dtype=bias_dtype,
        mask=mask,
        alibi=alibi,
        seqlens=seqlens,
        precision=precision,
    )
    unreadable = _sm90.not_read_by_tma(problem)
    return _plan("plan", problem, _device(device), kernel, num_splits, unreadable)


def make_plan(
    function: str,
    problem: AttentionProblem,
    kernel: str | Algorithm1 | None,
    device: Device | None = None,
    num_splits: int | None = None,
) -> Plan:
    """The plan of a call with arrays, on their own device unless another is given."""
    if device is None and problem.device is not None:
        device = devices.current_device(problem.device)
    unreadable = () if device is None else _sm90.not_read_by_tma(problem)
    return _plan(function, problem.without_arrays(), device, kernel, num_splits, unreadable)


def _device(device: str | int | Device | None) -> Device | None:
    if device is None:
        return devices.current_device(0) if _gpu.gpu_count() else None
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        return None if device.lower() == "cpu" else devices.named_device(device)
    number = _checks.integer("plan", "device", device)
    count = _gpu.gpu_count()
    if not 0 <= number < count:
        reason = "" if count else f" ({_gpu.gpu_obstacle()})"
        raise ValueError(f"plan: device is {number}; this machine has {count} GPUs{reason}")
    return devices.current_device(number)


def _plan(
    function: str,
    problem: AttentionProblem,
    device: Device | None,
    kernel: Any,
    num_splits: Any,
    unreadable: tuple[str, ...],
) -> Plan:
    if not (kernel is None or isinstance(kernel, (str, Algorithm1))):
        raise TypeError(
            f"{function}: kernel is a {type(kernel).__name__}; expected a name or an Algorithm1"
        )
    if num_splits is not None:
        num_splits = _checks.integer(function, "num_splits", num_splits)
        if not 1 <= num_splits <= _sm80.MAX_SPLITS:
            raise ValueError(
                f"{function}: num_splits is {num_splits}; expected 1 to {_sm80.MAX_SPLITS}, or "
                "None to let the plan choose"
            )
    return _cached_plan(function, problem, device, kernel, num_splits, unreadable)


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    function: str,
    problem: AttentionProblem,
    device: Device | None,
    kernel: str | Algorithm1 | None,
    num_splits: int | None,
    unreadable: tuple[str, ...],
) -> Plan:
    name = "fa1_forward" if isinstance(kernel, Algorithm1) else kernel
    if name not in (None, *KERNELS):
        raise ValueError(f"{function}: kernel is {name!r}; expected one of {', '.join(KERNELS)}")
    divided = num_splits is not None and num_splits > 1
    if divided and name not in (None, *_DIVIDING):
        raise ValueError(
            f"{function}: num_splits is {num_splits}, but kernel {name!r} does not divide keys; "
            f"expected 1 or None, or kernel {' or '.join(map(repr, _DIVIDING))}"
        )
    if device is None:
        if name not in (None, "host"):
            raise ValueError(
                f"{function}: kernel {name!r} runs on a GPU; pass CuPy arrays, or leave kernel=None"
            )
        if divided:
            raise ValueError(
                f"{function}: num_splits is {num_splits}, but numpy's kernel 'host' does not "
                "divide keys; expected 1 or None"
            )
        return Plan("host", problem)
    if name == "host":
        raise ValueError(
            f"{function}: kernel 'host' takes numpy arrays; leave kernel=None for arrays on a GPU"
        )
    not_sm90 = None
    if name == _sm90.KERNEL or (kernel is None and not divided):
        refusal = _sm90.refusal(problem, device, unreadable)
        if name == _sm90.KERNEL and refusal is not None:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
        dividable = num_splits is None
        if refusal is None and name is None and _sm90.few_works(problem, device, dividable):
            refusal = "would leave most of the device idle: queries are few, keys are many"
        if refusal is None:
            return _plan_sm90(problem, device)
        not_sm90 = refusal if device.compute_capability == _sm90.CAPABILITY else None
    chosen = _plan_others(function, problem, device, kernel, num_splits)
    if chosen.kernel == _sm90_float32.KERNEL:
        return chosen
    return dataclasses.replace(chosen, not_sm90=not_sm90)


def _plan_others(
    function: str,
    problem: AttentionProblem,
    device: Device,
    kernel: str | Algorithm1 | None,
    num_splits: int | None,
) -> Plan:
    """The plan of a kernel for GPUs that is not forward_sm90."""
    settings = kernel if isinstance(kernel, Algorithm1) else Algorithm1()
    name = kernel
    divided = num_splits is not None and num_splits > 1
    if name == _sm90_float32.KERNEL or kernel is None:
        refusal = _sm90_float32.refusal(problem, device)
        if refusal is None and not (kernel is None and _sm90_float32.has_better(problem)):
            return _plan_sm90_float32(problem, device, num_splits)
        if name == _sm90_float32.KERNEL:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
    if name == _sm80.KERNEL or kernel is None:
        refusal = _sm80.refusal(problem, device)
        if refusal is None:
            return _plan_sm80(problem, device, num_splits)
        if name == _sm80.KERNEL:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
    if name == _simt.KERNEL or kernel is None:
        refusal = _simt.refusal(problem)
        if refusal is None:
            return _plan_simt(problem, device, num_splits)
        if name == _simt.KERNEL:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
        if divided:
            raise ValueError(
                f"{function}: num_splits is {num_splits}, but {_simt.KERNEL!r}, which divides "
                f"keys, {refusal}; expected 1 or None"
            )
    return _plan_fa1(function, problem, device, settings)


def _plan_sm90(problem: AttentionProblem, device: Device) -> Plan:
    tiles = _sm90.tiles_of(problem)
    assert tiles is not None
    works = problem.batch * problem.heads_q * tiling.ceil_div(problem.seqlen_q, tiles.Br)
    return Plan(
        kernel=_sm90.KERNEL,
        problem=problem,
        device=device,
        tiles=tiles,
        grid=(min(works, device.multiprocessors), 1, 1),
        block=(tiles.threads, 1, 1),
        smem_bytes=tiles.smem_bytes,
        options=tiles.options(problem.dtype.name, problem.general),
    )


def _plan_sm80(problem: AttentionProblem, device: Device, num_splits: int | None) -> Plan:
    tiles = _sm80.tiles_for(problem, device)
    assert tiles is not None
    parts = _sm80.parts(problem, tiles, device, num_splits)
    return _divided_plan(_sm80.KERNEL, problem, device, tiles, parts)


def _plan_sm90_float32(problem: AttentionProblem, device: Device, num_splits: int | None) -> Plan:
    tiles = _sm90_float32.tiles_of(problem)
    assert tiles is not None
    parts = _sm90_float32.parts(problem, tiles, device, num_splits)
    return _divided_plan(_sm90_float32.KERNEL, problem, device, tiles, parts)


def _plan_simt(problem: AttentionProblem, device: Device, num_splits: int | None) -> Plan:
    tiles = _simt.tiles_for(problem)
    parts = _simt.parts(problem, tiles, device, num_splits)
    return _divided_plan(_simt.KERNEL, problem, device, tiles, parts)


def _divided_plan(
    kernel: str,
    problem: AttentionProblem,
    device: Device,
    tiles: _sm80.Tiles,
    parts: _sm80.Parts,
) -> Plan:
    heads = problem.batch * problem.heads_q // parts.pack
    return Plan(
        kernel=kernel,
        problem=problem,
        device=device,
        tiles=tiles,
        parts=parts,
        grid=(min(heads * parts.blocks_a_head, MAX_GRID_X), 1, 1),
        block=(tiles.threads, 1, 1),
        smem_bytes=tiles.smem_bytes,
        options=tiles.options(problem.dtype.name, problem.general),
    )


def _plan_fa1(
    function: str, problem: AttentionProblem, device: Device, settings: Algorithm1
) -> Plan:
    tiles = tiling.algorithm1_tiling(problem, device.smem_block_bytes, settings.sram_elements)
    if tiles is None:
        asked = (
            "one query and one key"
            if settings.sram_elements is None
            else f"the blocks of sram_elements={settings.sram_elements}"
        )
        raise ValueError(
            f"{function}: kernel 'fa1_forward' can't hold {asked} of head_dim {problem.head_dim} "
            f"and head_dim_v {problem.head_dim_v} in the {device.smem_block_bytes} bytes of shared "
            f"memory that a thread block of {device.name} has"
        )
    heads = problem.batch * problem.heads_q
    chunks = min(settings.chunks or 0, max(tiles.Tr, 1)) or _chunks(
        heads, tiles.Tr, device, tiles.smem_bytes
    )
    return Plan(
        kernel="fa1_forward",
        problem=problem,
        device=device,
        tiling=tiles,
        chunks=chunks,
        grid=(min(heads * chunks, MAX_GRID_X), 1, 1),
        block=(tiling.FA1_THREADS, 1, 1),
        smem_bytes=tiles.smem_bytes,
        options=tiling.fa1_options(problem.dtype.name, problem.general),
    )


def _chunks(heads: int, Tr: int, device: Device, smem_bytes: int) -> int:
    """Blocks a head, so that the busiest multiprocessor has least to do.

    More chunks than that would only load K and V more often.
    """
    slots = device.multiprocessors * resident(device, smem_bytes)
    if heads == 0 or Tr <= 1:
        return 1
    most = min(Tr, max(1, 8 * slots // heads))

    def steps(chunks: int) -> int:
        return tiling.ceil_div(heads * chunks, slots) * tiling.ceil_div(Tr, chunks)

    return min(range(1, most + 1), key=lambda chunks: (steps(chunks), chunks))


def resident(device: Device, smem_bytes: int) -> int:
    """Thread blocks of fa1_forward on one multiprocessor, at most one by its registers."""
    return max(1, device.resident_blocks(tiling.FA1_THREADS, 255, smem_bytes))
