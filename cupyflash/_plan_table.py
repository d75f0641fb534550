# SPDX-License-Identifier: MIT
"""A plan as a table that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyflash import _simt, _sm80, _sm90, io_model, tiling
from cupyflash.devices import Device
from cupyflash.plan import resident

if TYPE_CHECKING:
    from cupyflash._problem import AttentionProblem
    from cupyflash.plan import Plan


def table(p: Plan) -> list[str]:
    """The lines of the table."""
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
        divided = isinstance(p.tiles, _sm80.Tiles)
        if p.not_sm90 is not None:
            rows.insert(1, ("", f"not forward_sm90, which {p.not_sm90}"))
        rows += _divided_rows(p, p.tiles, p.device) if divided else _sm90_rows(p, p.tiles, p.device)
        return _aligned(rows + _traffic_rows(p))
    assert p.tiling is not None
    t, device = p.tiling, p.device
    acc = problem.acc_dtype.name
    wanted = tiling.block_sizes(t.M, problem.head_dim, problem.head_dim_v)
    traffic = p.traffic
    assert traffic is not None
    estimate = io_model.notes_estimate(problem, t.M_used) if t.M_used else 0.0
    capacity = device.multiprocessors * resident(device, p.smem_bytes)
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
        ("grid", f"{p.grid}: {_plural(p.chunks, 'chunk')} of T_r for each of the batch's heads"),
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
        _standard_row(problem),
    ]
    return _aligned(rows)


def _standard_row(problem: AttentionProblem) -> tuple[str, str]:
    standard = io_model.standard_attention(problem)
    return "HBM, standard", f"{_bytes(standard.bytes)} with S and P in HBM"


def _traffic_rows(p: Plan) -> list[tuple[str, str]]:
    traffic = p.traffic
    assert traffic is not None
    return [
        (
            "HBM, at most",
            f"{_bytes(traffic.bytes)}: {_bytes(traffic.bytes_read)} read, "
            f"{_bytes(traffic.bytes_written)} written; less what the L2 cache holds",
        ),
        _standard_row(p.problem),
    ]


def _divided_rows(p: Plan, tiles: _sm80.Tiles, device: Device) -> list[tuple[str, str]]:
    problem, parts = p.problem, p.parts
    assert parts is not None
    Tr = tiling.ceil_div(problem.seqlen_q * parts.pack, tiles.Br)
    heads = problem.batch * problem.heads_q // parts.pack
    grid = f"{p.grid}: {_plural(Tr, 'block')} of queries of {_plural(heads, 'head')}"
    if parts.slices > 1:
        grid += f", {parts.slices} slices of head_dim_v"
    chunks = "any in chunks of " if p.kernel == _simt.KERNEL else ""
    merger = "the last block of a tile" if parts.merges else _sm80.COMBINE
    rows = [
        (
            "device",
            f"{device.name} ({device.architecture}), {device.multiprocessors} multiprocessors",
        ),
        ("B_r, B_c", f"{tiles.Br}, {tiles.Bc}"),
        ("T_r, T_c", f"{Tr}, {tiling.ceil_div(problem.seqlen_k, tiles.Bc)}"),
        ("tiles hold", f"head_dim {chunks}{tiles.head_dim}, head_dim_v {tiles.head_dim_v}"),
        ("SRAM in all", f"{p.smem_bytes} of {device.smem_block_bytes} bytes"),
        ("grid", grid),
        ("block", f"{p.block}: {tiles.Br // tiles.warps} queries a warp"),
        ("key splits", f"{parts.splits}" + (f", merged by {merger}" if parts.splits > 1 else "")),
    ]
    if p.kernel != _simt.KERNEL:
        rows.append(("heads at a time", f"{parts.bunch} of {heads}, for the L2 cache"))
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
        ("stages", f"{tiles.stages} tiles each of K and V" + _score_stages(tiles)),
        ("SRAM in all", f"{p.smem_bytes} of {device.smem_block_bytes} bytes"),
        ("grid", f"{p.grid}: persistent, for {_plural(heads * Tr, 'block')} of queries"),
        ("block", f"{p.block}: a producer warpgroup, and one for each 64 queries"),
        ("heads at a time", f"{_sm90.bunch(problem, device)} of {heads}, for the L2 cache"),
    ]


def _score_stages(tiles: _sm90.Tiles) -> str:
    return f", {tiles.score_stages} of {tiles.score_array}" if tiles.score_array else ""


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
    if problem.tf32:
        names.append("TF32 products")
    for name in ("mask", "alibi", "seqlens"):
        if getattr(problem, f"has_{name}"):
            names.append(name)
    return names


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _count(n: float) -> str:
    return f"{n:.4g}" if n < 1e4 else f"{n:.3e}"


def _bytes(n: int) -> str:
    """In powers of ten, as bandwidths are given; exact below a kilobyte."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3f} {unit}"
    return f"{n} bytes"
