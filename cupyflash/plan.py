# SPDX-License-Identifier: MIT
"""Which kernel runs a call, with what tiles, on what grid; and what that costs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cupyflash import _problem, _sm80, _sm90, devices, io_model, tiling
from cupyflash._launch import MAX_GRID_X
from cupyflash._problem import AttentionProblem
from cupyflash.devices import Device
from cupyflash.tiling import Tiling

KERNELS = ("host", "fa1_forward", _sm80.KERNEL, _sm90.KERNEL)
# What a plan chooses by itself. The other kernels are asked for by name until their present text
# has passed all tests on a GPU.
AUTOMATIC = ("host", "fa1_forward")


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
            value = _problem._integer("Algorithm1", name, value)
            if value < 1:
                raise ValueError(f"Algorithm1: {name} is {value}; expected a positive integer")
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call runs; printing it explains the call.

    ``device`` is None for the host. ``tiling`` (of ``fa1_forward``) or ``tiles`` (of the kernels
    that have theirs at compile time), ``parts`` (of ``forward_sm80``), ``grid``, ``block``,
    ``smem_bytes`` and ``options`` are those of the launch (None, empty or 0 for the host).
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

    @property
    def blocks(self) -> int:
        """Pieces of work: one thread block each, unless the grid is at its limit."""
        return self.problem.batch * self.problem.heads_q * self.chunks

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
        """HBM traffic of the kernel, array by array; None for the host."""
        if self.tiling is None:
            return None
        return io_model.algorithm1(self.problem, self.tiling.Br, self.tiling.Bc, self.chunks)

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes that the kernel reads from and writes to HBM; None for the host."""
        return None if self.traffic is None else self.traffic.bytes

    def __str__(self) -> str:
        return "\n".join(_table(self))


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
    softcap: float | None = None,
    bias_dtype: Any = None,
    mask: bool = False,
    alibi: bool = False,
    seqlens: bool = False,
    device: str | int | Device | None = None,
    kernel: str | Algorithm1 | None = None,
) -> Plan:
    """Explain how ``attention`` would run a call of these sizes, without arrays or a GPU.

    Block sizes are those of Algorithm 1, line 1 (arXiv:2205.14135): ``B_c = ceil(M / 4d)``,
    ``B_r = min(B_c, d)``, for the M that the device's shared memory holds.

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
    causal, window, softcap
        As for ``attention``.
    bias_dtype : dtype, optional
        Plan for a bias of this dtype.
    mask, alibi, seqlens : bool
        Plan for a mask, ALiBi slopes, lengths of the keys in use.
    device : str, int or Device, optional
        "cpu", the name of a GPU ("H200", "RTX 4090", ...), the number of a GPU that is there, or
        a Device. Default: GPU 0 if CuPy and a GPU are there, else "cpu".
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
        softcap=softcap,
        bias_dtype=bias_dtype,
        mask=mask,
        alibi=alibi,
        seqlens=seqlens,
    )
    return _plan("plan", problem, _device(device), kernel, _sm90.takes_arrays(problem))


def make_plan(
    function: str,
    problem: AttentionProblem,
    kernel: str | Algorithm1 | None,
    device: Device | None = None,
) -> Plan:
    """The plan of a call with arrays, on their own device unless another is given."""
    if device is None and problem.device is not None:
        device = devices.current_device(problem.device)
    tma = device is not None and _sm90.takes_arrays(problem)
    return _plan(function, problem.without_arrays(), device, kernel, tma)


def _device(device: str | int | Device | None) -> Device | None:
    if device is None:
        count = _gpu_count()
        return devices.current_device(0) if count else None
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        return None if device.lower() == "cpu" else devices.named_device(device)
    number = _problem._integer("plan", "device", device)
    if not 0 <= number < _gpu_count():
        raise ValueError(f"plan: device is {number}; this machine has {_gpu_count()} GPUs")
    return devices.current_device(number)


def _gpu_count() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # CuPy or the driver is missing, broken or too old: no GPU then
        return 0


def _plan(
    function: str, problem: AttentionProblem, device: Device | None, kernel: Any, tma: bool
) -> Plan:
    if not (kernel is None or isinstance(kernel, (str, Algorithm1))):
        raise TypeError(
            f"{function}: kernel is a {type(kernel).__name__}; expected a name or an Algorithm1"
        )
    return _cached_plan(function, problem, device, kernel, tma)


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    function: str,
    problem: AttentionProblem,
    device: Device | None,
    kernel: str | Algorithm1 | None,
    tma: bool,
) -> Plan:
    settings = kernel if isinstance(kernel, Algorithm1) else Algorithm1()
    name = "fa1_forward" if isinstance(kernel, Algorithm1) else kernel
    if name not in (None, *KERNELS):
        raise ValueError(f"{function}: kernel is {name!r}; expected one of {', '.join(KERNELS)}")
    if device is None:
        if name not in (None, "host"):
            raise ValueError(
                f"{function}: kernel {name!r} runs on a GPU; pass CuPy arrays, or leave kernel=None"
            )
        return Plan("host", problem)
    if name == "host":
        raise ValueError(
            f"{function}: kernel 'host' takes numpy arrays; leave kernel=None for arrays on a GPU"
        )
    if name == _sm90.KERNEL or (kernel is None and _sm90.KERNEL in AUTOMATIC):
        refusal = _sm90.refusal(problem, device, tma)
        if refusal is None and (chosen := _plan_sm90(problem, device, asked=name is not None)):
            return chosen
        if name == _sm90.KERNEL:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
    if name == _sm80.KERNEL or (kernel is None and _sm80.KERNEL in AUTOMATIC):
        refusal = _sm80.refusal(problem, device)
        if refusal is None:
            return _plan_sm80(problem, device)
        if name == _sm80.KERNEL:
            raise ValueError(
                f"{function}: kernel {name!r} {refusal}; leave kernel=None to let the plan choose"
            )
    return _plan_fa1(function, problem, device, settings)


def _plan_sm90(problem: AttentionProblem, device: Device, asked: bool) -> Plan | None:
    """None where another kernel is to be preferred."""
    tiles = _sm90.tiles_for(problem.head_dim, problem.head_dim_v, problem.seqlen_k)
    assert tiles is not None
    if not asked and _sm90.few_works(problem, tiles, device):
        return None
    works = problem.batch * problem.heads_q * tiling.ceil_div(problem.seqlen_q, tiles.Br)
    return Plan(
        kernel=_sm90.KERNEL,
        problem=problem,
        device=device,
        tiles=tiles,
        grid=(min(works, device.multiprocessors), 1, 1),
        block=(tiles.threads, 1, 1),
        smem_bytes=tiles.smem_bytes,
        options=tiles.options(problem.dtype.name),
    )


def _plan_sm80(problem: AttentionProblem, device: Device) -> Plan:
    tiles = _sm80.tiles_for(problem, device)
    assert tiles is not None
    parts = _sm80.parts(problem, tiles, device)
    heads = problem.batch * problem.heads_q // parts.pack
    return Plan(
        kernel=_sm80.KERNEL,
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
    slots = device.multiprocessors * _resident(device, smem_bytes)
    if heads == 0 or Tr <= 1:
        return 1
    most = min(Tr, max(1, 8 * slots // heads))

    def steps(chunks: int) -> int:
        return tiling.ceil_div(heads * chunks, slots) * tiling.ceil_div(Tr, chunks)

    return min(range(1, most + 1), key=lambda chunks: (steps(chunks), chunks))


def _resident(device: Device, smem_bytes: int) -> int:
    """Thread blocks of fa1_forward on one multiprocessor, at most one by its registers."""
    return max(1, device.resident_blocks(tiling.FA1_THREADS, 255, smem_bytes))


def _table(p: Plan) -> list[str]:
    problem = p.problem
    rows: list[tuple[str, str]] = [
        ("kernel", p.kernel),
        (
            "problem",
            f"{problem.dtype.name}, batch {problem.batch}, heads {problem.heads_q}/"
            f"{problem.heads_k}, seqlen {problem.seqlen_q} x {problem.seqlen_k}, head_dim "
            f"{problem.head_dim}, head_dim_v {problem.head_dim_v}",
        ),
        ("options", ", ".join(_options(problem)) or "none"),
        ("FLOPs", _count(p.flops)),
    ]
    score_bytes = (
        problem.batch
        * problem.heads_q
        * problem.seqlen_q
        * problem.seqlen_k
        * problem.acc_dtype.itemsize
    )
    rows.append(("score matrix", f"{_bytes(score_bytes)}, never made"))
    if p.device is None:
        rows.append(("device", "cpu: numpy, tiled, products through BLAS"))
        return _aligned(rows)
    if p.tiles is not None:
        if isinstance(p.tiles, _sm80.Tiles):
            return _aligned(rows + _sm80_rows(p, p.tiles, p.device))
        return _aligned(rows + _sm90_rows(p, p.tiles, p.device))
    assert p.tiling is not None
    t, device = p.tiling, p.device
    acc = problem.acc_dtype.name
    wanted = tiling.block_sizes(t.M, problem.head_dim, problem.head_dim_v)
    traffic = p.traffic
    assert traffic is not None
    standard = io_model.standard_attention(problem)
    estimate = io_model.notes_estimate(problem, t.M_used) if t.M_used else 0.0
    capacity = device.multiprocessors * _resident(device, p.smem_bytes)
    fill = min(p.blocks / capacity, 1.0)
    rows += [
        (
            "device",
            f"{device.name} ({device.architecture}), {device.multiprocessors} multiprocessors, "
            f"{device.smem_block_bytes} bytes of shared memory a block",
        ),
        ("M", f"{t.M} {acc} elements: B_c = ceil(M/4d) = {wanted[1]}, B_r = {wanted[0]}"),
        ("M used", f"{t.M_used}" + ("" if t.M_used == t.M else ", the largest that fits")),
        ("B_r, B_c", f"{t.Br}, {t.Bc}"),
        ("T_r, T_c", f"{t.Tr}, {t.Tc}"),
        *(
            (f"SRAM {name}" if n == 0 else f"     {name}", f"{elements} elements")
            for n, (name, elements) in enumerate(t.terms)
        ),
        ("SRAM in all", f"{p.smem_bytes} of {device.smem_block_bytes} bytes"),
        ("grid", f"{p.grid}: {p.chunks} chunks of T_r for each of the batch's heads"),
        ("block", f"{p.block}"),
        (
            "blocks",
            f"{p.blocks} for {capacity} places"
            + ("" if fill == 1.0 else f": too few to fill the device, {fill:.0%} of it works"),
        ),
        (
            "HBM, exact",
            f"{_bytes(traffic.bytes)}: {_bytes(traffic.bytes_read)} read, "
            f"{_bytes(traffic.bytes_written)} written",
        ),
        ("HBM, notes", f"16 N^2 d^2 / M = {_count(estimate)} elements"),
        ("HBM, standard", f"{_bytes(standard.bytes)} with S and P in HBM"),
    ]
    return _aligned(rows)


def _sm80_rows(p: Plan, tiles: _sm80.Tiles, device: Device) -> list[tuple[str, str]]:
    problem, parts = p.problem, p.parts
    assert parts is not None
    Tr = tiling.ceil_div(problem.seqlen_q * parts.pack, tiles.Br)
    heads = problem.batch * problem.heads_q // parts.pack
    grid = f"{p.grid}: {Tr} blocks of queries of {heads} heads"
    if parts.slices > 1:
        grid += f", {parts.slices} slices of head_dim_v"
    rows = [
        (
            "device",
            f"{device.name} ({device.architecture}), {device.multiprocessors} multiprocessors",
        ),
        ("B_r, B_c", f"{tiles.Br}, {tiles.Bc}"),
        ("T_r, T_c", f"{Tr}, {tiling.ceil_div(problem.seqlen_k, tiles.Bc)}"),
        ("tiles hold", f"head_dim {tiles.head_dim}, head_dim_v {tiles.head_dim_v}"),
        ("SRAM in all", f"{p.smem_bytes} of {device.smem_block_bytes} bytes"),
        ("grid", grid),
        ("block", f"{p.block}: {tiles.Br // tiles.warps} queries a warp"),
        ("key splits", f"{parts.splits}" + (", merged by combine" if parts.splits > 1 else "")),
        ("heads at a time", f"{parts.bunch} of {heads}, for the L2 cache"),
    ]
    if parts.pack > 1:
        rows.append(("heads a tile", f"{parts.pack}, which share a key head"))
    if problem.dtype.name == "float64" and device.compute_capability in _sm80.SLOW_FLOAT64:
        rows.append(("note", f"{device.name} has no fast float64"))
    return rows


def _sm90_rows(p: Plan, tiles: _sm90.Tiles, device: Device) -> list[tuple[str, str]]:
    problem = p.problem
    Tr, Tc = (
        tiling.ceil_div(problem.seqlen_q, tiles.Br),
        tiling.ceil_div(problem.seqlen_k, tiles.Bc),
    )
    heads = problem.batch * problem.heads_q
    return [
        (
            "device",
            f"{device.name} ({device.architecture}), {device.multiprocessors} multiprocessors",
        ),
        ("B_r, B_c", f"{tiles.Br}, {tiles.Bc}"),
        ("T_r, T_c", f"{Tr}, {Tc}"),
        ("tiles hold", f"head_dim {tiles.head_dim}, head_dim_v {tiles.head_dim_v}"),
        ("stages", f"{tiles.stages} tiles each of K and V"),
        ("SRAM in all", f"{p.smem_bytes} of {device.smem_block_bytes} bytes"),
        ("grid", f"{p.grid}: persistent, for {heads * Tr} blocks of queries"),
        ("block", f"{p.block}: a producer warpgroup, and one for each 64 queries"),
        ("heads at a time", f"{_sm90.bunch(problem, device)} of {heads}, for the L2 cache"),
    ]


def _options(problem: AttentionProblem) -> list[str]:
    left, right = problem.window_left, problem.window_right
    names = []
    if right == 0:
        names.append("causal" + (" (top left)" if problem.top_left else ""))
    if left >= 0 or right > 0:
        names.append(f"window ({left}, {right})")
    if problem.softcap:
        names.append(f"softcap {problem.softcap:g}")
    if problem.bias_dtype is not None:
        names.append(f"bias {problem.bias_dtype.name}")
    for name in ("mask", "alibi", "seqlens"):
        if getattr(problem, f"has_{name}"):
            names.append(name)
    return names


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _count(n: float) -> str:
    return f"{n:.4g}" if n < 1e4 else f"{n:.3e}"


def _bytes(n: int) -> str:
    """In powers of ten, as bandwidths are given; exact below a kilobyte."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3f} {unit}"
    return f"{n} bytes"
