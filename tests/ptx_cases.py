# SPDX-License-Identifier: MIT
"""What the probes of ``tests/ptx_probes/`` are given, and what numpy says must come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from ptx_twins import Case, Output

from cupyflash import _tensormap
from cupyflash._params import Pointer


def _words(rng: np.random.Generator, *shape: int, dtype: Any = np.uint32) -> np.ndarray:
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def cp_async(rng: np.random.Generator) -> Case:
    threads = 128
    source = _words(rng, threads, 2, 48, dtype=np.uint8)
    sizes = np.array([16, 8, 4])
    counts = rng.integers(0, np.broadcast_to(sizes, (threads, 2, 3)), endpoint=True)
    counts[0], counts[1] = 0, sizes
    counts = counts.astype(np.int32)
    expected = source.copy()
    for column, begin in enumerate((0, 32, 40)):
        at = np.arange(sizes[column])
        part = expected[..., begin : begin + sizes[column]]
        part[at >= counts[..., column, None]] = 0
    out = np.empty_like(source)
    return Case("cp_async", (source, counts, out), (Output("cp.async", out, expected),),
                block=threads, smem_bytes=threads * 96)  # fmt: skip


def scalar(rng: np.random.Generator) -> Case:
    threads = 256
    tiny = 2.0**-126
    x = np.concatenate([
        rng.uniform(-150, 130, 2048), rng.standard_normal(2048), -rng.exponential(20, 2048),
        2.0 ** rng.uniform(-125, 125, 2048 - 256),
        np.resize([0.0, -0.0, 1, -1, np.inf, -np.inf, 128, -126, -150, 2.0**-30, 1e-40], 256),
    ]).astype(np.float32)  # fmt: skip
    wide = x.astype(np.float64)
    outs = [np.empty_like(x) for _ in range(4)]
    pinned, address = np.empty(x.shape, np.int32), np.empty(x.shape, np.uint32)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        power = np.exp2(wide)
        power[power < tiny] = 0
        power[power >= 2.0**128] = np.inf
        tanh = np.tanh(wide)
        log2 = np.log2(wide)
        reciprocal = 1 / wide
        reciprocal[np.abs(reciprocal) >= 2.0**128] *= np.inf
    bits = x.view(np.int32)
    # PTX manual and CUDA C++ Programming Guide: ex2 and __fdividef 2 units in the last place, tanh
    # 2^-11, __log2f 2^-22 within 0.5 to 2 and 2 units elsewhere; half a unit more for libm.
    with np.errstate(invalid="ignore"):
        near = (wide > 0.5) & (wide < 2)
        log_bound = np.where(near, 2.0**-22, 2.0**-22 * np.abs(log2)) + 2.0**-24 * np.abs(log2)
        bounds = [
            (2.0**-22 + 2.0**-24) * power + tiny,
            2.0**-11 * np.abs(tanh) + 2.0**-149,
            log_bound,
            (2.0**-22 + 2.0**-24) * np.abs(reciprocal),
        ]
    names = ("ex2.approx", "tanh.approx", "__log2f", "__fdividef")
    results = (power, tanh, log2, reciprocal)
    units = ("2 ulp", "2^-11 |tanh x|", "2^-22, or 2 ulp", "2 ulp")
    outputs = [Output(*o) for o in zip(names, outs, results, bounds, units, strict=True)]
    outputs.append(Output("pin", pinned, (bits.astype(np.int64) + 1).astype(np.int32)))
    steps = np.resize(3 * np.arange(threads, dtype=np.uint32), x.shape)
    outputs.append(Output("cvta.to.shared", address, steps))
    return Case("scalar", (x, *outs, pinned, address), tuple(outputs), block=threads,
                grid=(x.size // threads, 1), smem_bytes=3 * threads)  # fmt: skip


def warp(rng: np.random.Generator) -> Case:
    threads = 96
    x = _words(rng, threads)
    x[40] = 64  # one warp has some, the others hardly
    lanes, warps = np.arange(32), x.reshape(3, 32)

    def of_warp(values: Any) -> np.ndarray:
        return np.broadcast_to(np.reshape(values, (3, 1)), (3, 32))

    ballot = ((warps % 3 == 0) * (1 << lanes.astype(np.uint64))).sum(1)
    up = np.where(lanes % 16 >= 5, lanes - 5, lanes)
    down = np.where(lanes % 16 + 5 < 16, lanes + 5, lanes)
    rows = [
        warps[:, lanes ^ 1], warps[:, lanes ^ 2], warps[:, lanes ^ 16], warps[:, lanes ^ 8],
        np.take_along_axis(warps, (warps % 32).astype(np.int64), 1),
        warps[:, lanes // 8 * 8 + 3], warps[:, up], warps[:, down],
        of_warp((warps % 64 == 0).any(1)), of_warp(ballot),
        of_warp(warps.view(np.int32).max(1).view(np.uint32)),
        np.full((3, 32), (x % 5 == 0).sum()),
    ]  # fmt: skip
    expected = np.array([row.astype(np.uint32).reshape(threads) for row in rows])
    out = np.empty_like(expected)
    output = Output("shuffles, votes, reductions", out, expected)
    return Case("warp", (x, out), (output,), block=threads)


def ldmatrix(rng: np.random.Generator) -> Case:
    warps = 8
    rows = _words(rng, warps, 64, 8, dtype=np.uint16)
    order = rng.integers(0, 64, (warps, 32)).astype(np.int32)
    order[0] = np.arange(32)
    matrices = np.take_along_axis(rows, order[..., None].astype(np.int64), 1)
    matrices = matrices.reshape(warps, 4, 8, 8)
    out = np.empty((warps, 2, 32, 4), np.uint32)
    expected = np.empty_like(out)
    for form, m in enumerate((matrices, matrices.swapaxes(2, 3))):
        pairs = np.ascontiguousarray(m).view(np.uint32).reshape(warps, 4, 32)
        expected[:, form] = pairs.swapaxes(1, 2)
    return Case("ldmatrix", (rows, order, out), (Output("ldmatrix.x4", out, expected),),
                block=32 * warps, smem_bytes=warps * 1024)  # fmt: skip


_MMA = {
    "f16": (16, 16, np.dtype(np.float16)),
    "bf16": (16, 16, np.dtype(ml_dtypes.bfloat16)),
    "tf32": (16, 8, np.dtype(np.float32)),
    "f64_m8n8k4": (8, 4, np.dtype(np.float64)),
    "f64_m16n8k8": (16, 8, np.dtype(np.float64)),
    "f64_m16n8k16": (16, 16, np.dtype(np.float64)),
}
# What two results of one product on the tensor cores may differ by, of |c| + sum |a| |b|. The cores
# align all terms to the largest one and cut them off. Where one term outweighs the others, the sum
# of magnitudes is hardly more than that term, and what is cut off 16 others is more of it.
_CUT = {"normal": -22, "special": -22, "spread": -21}


def _cut_off(
    name: str, array: np.ndarray, expected: np.ndarray, magnitude: Any, kind: str
) -> Output:
    power = _CUT[kind]
    unit = f"2^{power} (|c| + sum |a| |b|)"
    return Output(name, array, expected, 2.0**power * magnitude, unit)


def _operand(rng: np.random.Generator, kind: str, dtype: np.dtype, *shape: int) -> np.ndarray:
    """Numbers of one kind.

    "integers" make products and sums exact; "spread" ones differ by many powers of two; "special"
    ones include infinities and NaN.
    """
    if kind == "integers":
        return rng.integers(-8, 9, shape).astype(dtype)
    x = rng.standard_normal(shape)
    if kind == "spread":
        x *= 2.0 ** rng.uniform(-10, 4, shape)
    if kind == "special":
        chosen = rng.random(shape)
        x[chosen < 0.02], x[chosen > 0.98], x[(chosen > 0.9) & (chosen < 0.93)] = np.inf, np.nan, 0
    return x.astype(dtype)


def mma(name: str, kind: str) -> Callable[[np.random.Generator], Case]:
    rows, k, dtype = _MMA[name]
    blocks = 128

    def make(rng: np.random.Generator) -> Case:
        accumulator = np.float64 if dtype == np.float64 else np.float32
        A = _operand(rng, kind, dtype, blocks, rows, k)
        B = _operand(rng, kind, dtype, blocks, k, 8)
        C = _operand(rng, kind, np.dtype(accumulator), blocks, rows, 8)
        bits = np.dtype(f"u{dtype.itemsize}") if dtype != np.float64 else dtype
        words = [x.view(bits).copy() for x in (A, B)]
        if name == "tf32":
            a, b = ((x & 0xFFFFE000).view(np.float32).astype(np.float64) for x in words)
        else:
            a, b = (x.astype(np.float64) for x in (A, B))
        with np.errstate(invalid="ignore"):
            expected = C + (a[..., None] * b[:, None]).sum(2)
            magnitude = np.abs(C) + (np.abs(a)[..., None] * np.abs(b)[:, None]).sum(2)
        D = np.empty_like(C)
        label = f"mma {name.replace('_', ' ')}, {kind}"
        if kind == "integers":
            output = Output(label, D, expected.astype(accumulator))
        elif dtype == np.float64:
            bound = 2.0**-53 * (k + 1) * magnitude
            output = Output(label, D, expected, bound, f"2^-53 {k + 1} (|c| + sum |a| |b|)")
        else:
            output = _cut_off(label, D, expected, magnitude, kind)
        arguments = (*words, C, D, list(_MMA).index(name))
        needs = (9, 0) if name.startswith("f64_m16") else (8, 0)
        return Case("mma", arguments, (output,), block=32, grid=(blocks, 1), capability=needs)

    return make


def named_barrier(rng: np.random.Generator) -> Case:
    x = _words(rng, 20, 64)
    y = np.empty_like(x)
    output = Output("bar.sync, bar.arrive", y, np.ascontiguousarray(x[:, ::-1]))
    return Case("named_barrier", (x, y, len(x)), (output,), block=128, smem_bytes=256)


def mbarrier(rng: np.random.Generator) -> Case:
    x = _words(rng, 21, 32)
    y = np.empty((21, 96), np.uint32)
    lanes, rounds = np.arange(32), np.arange(21, dtype=np.uint32)[:, None]
    expected = np.concatenate([x[:, lanes ^ warp] + rounds for warp in (1, 2, 3)], 1)
    output = Output("mbarrier", y, expected)
    return Case("mbarrier", (x, y, len(x)), (output,), block=128, smem_bytes=512,
                capability=(9, 0))  # fmt: skip


def setmaxnreg(rng: np.random.Generator) -> Case:
    x = _words(rng, 96, 384)
    y = np.empty(384, np.uint32)
    expected = np.zeros(384, np.uint32)
    for row, opposite in zip(x, x[::-1], strict=True):
        expected = (expected ^ row) * (2 * opposite + np.uint32(1))
    expected[:128] = 3 * x[0, :128]
    output = Output("setmaxnreg", y, expected)
    return Case("setmaxnreg", (x, y), (output,), block=384, capability=(9, 0))


def griddepcontrol(rng: np.random.Generator) -> Case:
    x = _words(rng, 4 * 64)
    y = np.empty_like(x)
    output = Output("griddepcontrol", y, 3 * x)
    return Case("griddepcontrol", (x, y), (output,), block=64, grid=(4, 1), capability=(9, 0))


def atom(rng: np.random.Generator) -> Case:
    x = _words(rng, 7, 64)
    parts, sums = np.zeros_like(x), np.empty(64, np.uint32)
    expected = (3 * x.astype(np.uint64)).sum(0).astype(np.uint32)
    count = np.zeros(1, np.uint32)
    output = Output("atom.inc", sums, expected)
    return Case("atom", (x, parts, sums, count), (output,), block=64, grid=(7, 1))


def tma(swizzle: int, box: tuple[int, ...]) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        sizes = (swizzle // 2 + 40, 90, 5, 3, 4)  # the contiguous axis first
        # In memory (batch, rows, heads, columns); a second batch axis has stride 0.
        memory = _words(rng, sizes[3], sizes[1], sizes[2], sizes[0], dtype=np.uint16)
        tensor = np.broadcast_to(memory.swapaxes(1, 2), sizes[::-1])
        corners = [(0, 0, 0, 0, 0), (8, 17, 1, 2, 3), (0, 80, 0, 0, 0), (24, -5, 2, 1, 0),
                   (-16, 3, 1, 1, 1), (40, 88, 4, 2, 3), (0, 0, 5, 0, 0), (0, 0, -1, 0, 0),
                   (0, 0, 0, 3, 0), (0, 0, 0, 0, 4), (0, 0, 0, -1, -1), (0, 200, 0, 0, 0),
                   (1000, 0, 0, 0, 0), (40, 1, 0, 1, 2)]  # fmt: skip
        at = np.array(corners, np.int32)
        elements = int(np.prod(box))
        expected = np.empty((len(at), elements), np.uint16)
        padded = np.pad(tensor, [(n, n) for n in box[::-1]])
        for row, corner in zip(expected, at, strict=True):
            # Beyond the padding lies what the padding holds too.
            begin = [np.clip(c + n, 0, s + n) for c, n, s in zip(corner, box, sizes, strict=True)]
            part = padded[
                tuple(slice(b, b + n) for b, n in zip(begin[::-1], box[::-1], strict=True))
            ]
            row[_swizzled(elements, swizzle)] = part.reshape(-1)
        tensor_map = _tensormap.TensorMap(
            pointer=Pointer(0, "tensor", memory),
            dtype="float16",
            sizes=sizes,
            strides=tensor.strides[3::-1],
            box=box,
            swizzle=swizzle,
        )
        out = np.empty_like(expected)
        output = Output(f"TMA, swizzle {swizzle}, box {'x'.join(map(str, box))}", out, expected)
        arguments = (at, out, len(at), 2 * elements)
        return Case("tma", arguments, (output,), block=128, smem_bytes=4 * elements + 64,
                    tensor_map=tensor_map, capability=(9, 0))  # fmt: skip

    return make


def _swizzled(elements: int, swizzle: int) -> np.ndarray:
    """Where the 16-bit elements of a box lie: units of 16 bytes, permuted by their row of 128."""
    byte = 2 * np.arange(elements)
    return (byte ^ (byte // 128 % (swizzle // 16)) * 16) // 2


def wgmma(name: str, kind: str) -> Callable[[np.random.Generator], Case]:
    dtype = _MMA[name][2]

    def make(rng: np.random.Generator) -> Case:
        A = _operand(rng, kind, dtype, 64, 128)
        B_columns = _operand(rng, kind, dtype, 256, 128)
        B_rows = _operand(rng, kind, dtype, 64, 256)
        C = _operand(rng, kind, np.dtype(np.float32), 64, 256)
        shape = (6, 14, 64, 256)
        D = np.zeros(shape, np.float32)
        expected, magnitude = np.zeros(shape), np.zeros(shape)
        untouched = np.ones(shape, bool)
        for form in range(6):
            by_rows, fresh = form in (2, 3, 4), form in (1, 3)
            for index, n in enumerate((*range(64, 257, 16), 32)):
                if (by_rows and n % 32) or (form > 2 and n not in (32, 64, 96)):
                    continue
                depth = 64 if by_rows else 128 if n % 32 == 0 else 96
                k = (n // 16 + form) % (depth // 16)
                step = slice(16 * k, 16 * k + 16)
                a = A[:, step].astype(np.float64)
                b = (B_rows[step, :n] if by_rows else B_columns[:n, step].T).astype(np.float64)
                c = np.zeros((64, n)) if fresh else C[:, :n].astype(np.float64)
                expected[form, index, :, :n] = a @ b + c
                magnitude[form, index, :, :n] = np.abs(a) @ np.abs(b) + np.abs(c)
                untouched[form, index, :, :n] = False
        untouched_value = np.full(1, 0xAAAAAAAA, np.uint32).view(np.float32)[0]
        expected[untouched] = untouched_value
        label = f"wgmma {name}, {kind}"
        if kind == "integers":
            output = Output(label, D, expected.astype(np.float32))
        else:
            output = _cut_off(label, D, expected, magnitude, kind)
        output = dataclasses.replace(output, computed=int((~untouched).sum()))
        words = [x.view(np.uint16) for x in (A, B_columns, B_rows)]
        return Case("wgmma", (*words, C, D), (output,), block=128, grid=(14, 6),
                    smem_bytes=80 * 1024, options=(f"-DPROBE_TYPE=k{name.capitalize()}",),
                    capability=(9, 0))  # fmt: skip

    return make


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    f.__name__: f for f in (cp_async, scalar, warp, ldmatrix)
}
for _name in _MMA:
    _kinds = ("integers", "normal", "spread", "special")
    CASES |= {f"mma-{_name}-{kind}": mma(_name, kind) for kind in _kinds}
CASES |= {f.__name__: f for f in (atom, named_barrier, mbarrier, setmaxnreg, griddepcontrol)}
for _swizzle in (64, 128):
    for _box in (
        (_swizzle // 2, 64, 1, 1, 1),
        (_swizzle // 2, 80, 1, 1, 1),
        (_swizzle // 2, 8, 2, 2, 2),
    ):
        CASES["tma-" + "-".join(map(str, (_swizzle, *_box)))] = tma(_swizzle, _box)
for _name in ("f16", "bf16"):
    CASES |= {
        f"wgmma-{_name}-{kind}": wgmma(_name, kind) for kind in ("integers", "normal", "spread")
    }


def case(name: str) -> Case:
    """The case of that name, the same at every call."""
    return CASES[name](np.random.default_rng(list(name.encode())))
