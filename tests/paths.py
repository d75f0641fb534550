# SPDX-License-Identifier: MIT
"""The ways that one call of attention can go, behind one function, for tests of the contract.

Each way takes numpy arrays and gives numpy arrays (o, lse), with outputs that were NaN before:
``host``, numpy on the CPU; ``hostcuda``, a kernel compiled for the CPU; ``gpu``, a kernel on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import hostcuda
import hypothesis
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA

import cupyflash
from cupyflash import Algorithm1, _launch, _problem, devices
from cupyflash.plan import KERNELS as _ALL_KERNELS
from cupyflash.plan import make_plan
from cupyflash.testing import DTYPES, copy_with_layout, guarded_empty, poison

KERNELS = tuple(name for name in _ALL_KERNELS if name != "host")
_ARRAYS = ("bias", "mask", "alibi_slopes", "seqlens_k")
_DRAWS = {
    "forward_sm90": {
        "dtypes": ("float16", "bfloat16"),
        "head_dims": (8, 64, 72, 96, 128, 192, 256),
        "layouts": ("contiguous", "transposed", "broadcast"),
        "options": (
            *("batch", "gqa", "head_dim_v", "causal", "top_left", "window"),
            *("softcap", "bias", "mask", "alibi_slopes", "seqlens_k", "poisoned"),
        ),
        "magnitudes": ("unit", "tiny", "large", "shifted"),
    },
    "forward_sm90_float32": {"dtypes": ("float32",), "head_dims": (1, 7, 33, 64, 72, 96, 128)},
}
_WRITTEN = {"problem.o.data", "problem.lse.data", "O", "lse", "l", "m", "counter", "counts"}


def launches(q, k, v, *, kernel="fa1_forward", device="H200", num_splits=None, out=None, **options):
    """(o, lse, launch records) of a call, by the very steps of the GPU path; o and lse are NaN."""
    problem = _problem.from_arrays("attention", q, k, v, **options).aligned()
    if out is not None:
        _problem.check_out("attention", problem, poison(out))
    plan = make_plan("attention", problem, kernel, devices.named_device(device), num_splits)
    return _launch.prepare(plan, problem, out, True, hostcuda)


def run_on_host_cuda(
    q,
    k,
    v,
    *,
    kernel="fa1_forward",
    device="H200",
    num_splits=None,
    out=None,
    kernels=None,
    schedules=None,
    **options,
) -> tuple[np.ndarray, np.ndarray]:
    """A kernel on the CPU under AddressSanitizer; under each of ``schedules`` if these are given.

    ``device`` is whose shared memory the plan may take, ``kernels`` another root of the sources.
    """
    how = {"kernel": kernel, "device": device, "num_splits": num_splits, "out": out}
    o, lse, records = launches(q, k, v, **how, **options)
    for record in records:
        if schedules is None:
            hostcuda.run(record, writes=_WRITTEN, kernels=kernels)
        else:
            hostcuda.run_schedules(record, schedules=schedules, writes=_WRITTEN, kernels=kernels)
    return o, lse


def run_on_gpu(
    q, k, v, *, kernel=None, num_splits=None, out=None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """``cupyflash.attention`` on CuPy arrays that lie in memory as the numpy arrays do."""
    cupy = sys.modules["cupy"]
    q, k, v = (copy_with_layout(np.asarray(x), cupy) for x in (q, k, v))
    for name in _ARRAYS:
        if isinstance(options.get(name), np.ndarray):
            options[name] = copy_with_layout(options[name], cupy)
    if out is None:
        problem = _problem.from_arrays("attention", q, k, v, **options)
        target, check_guards = guarded_empty(problem.out_shape, problem.dtype, xp=cupy)
    else:
        target = poison(copy_with_layout(out, cupy))
    how = {"kernel": kernel, "num_splits": num_splits, "out": target}
    o, lse = cupyflash.attention(q, k, v, **how, return_lse=True, **options)
    assert o is target
    if out is None:
        check_guards()
        return cupy.asnumpy(o), cupy.asnumpy(lse)
    out[...] = cupy.asnumpy(o)
    return out, cupy.asnumpy(lse)


def run_on_host(q, k, v, *, kernel=None, out=None, **options) -> tuple[np.ndarray, np.ndarray]:
    """``cupyflash.attention`` on numpy arrays."""
    if out is None:
        problem = _problem.from_arrays("attention", q, k, v, **options)
        out, check_guards = guarded_empty(problem.out_shape, problem.dtype)
    else:
        poison(out)
        check_guards = None
    o, lse = cupyflash.attention(q, k, v, kernel=kernel, out=out, return_lse=True, **options)
    assert o is out
    if check_guards is not None:
        check_guards()
    return o, lse


def _tma_reads(x: np.ndarray) -> bool:
    """Contiguous columns; the address and all other steps at multiples of 16 bytes, none back."""
    steps = [step for step, n in zip(x.strides, x.shape, strict=True) if n > 1]
    columns = x.shape[-1] == 1 or x.strides[-1] == x.itemsize
    others = steps[:-1] if x.shape[-1] > 1 else steps
    return columns and all(s >= 0 and s % 16 == 0 for s in (*others, x.ctypes.data % 16))


@dataclass(frozen=True)
class Path:
    """One way; calling it runs attention. ``kernel`` may be replaced by settings of that kernel."""

    place: str
    kernel: str

    def __call__(self, q, k, v, *, kernel: Any = None, **options):
        run = {"host": run_on_host, "hostcuda": run_on_host_cuda, "gpu": run_on_gpu}[self.place]
        try:
            return run(q, k, v, kernel=self.kernel if kernel is None else kernel, **options)
        except ValueError as error:
            if "leave kernel=None" not in str(error) or not self.may_decline(q, k, v, **options):
                raise
            reason = str(error)
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(reason)

    def may_decline(self, q, k, v, **options) -> bool:
        """Whether the kernel's documented limits exclude a call; Algorithm 1 and the host take all.

        By the arguments and not by the kernel's own words: what it declines beside these is a bug.
        """
        capability = (9, 0)
        if self.place == "gpu":
            device = sys.modules["cupy"].cuda.Device().id
            capability = devices.current_device(device).compute_capability
        if self.kernel == "forward_sm80":
            large = q.dtype == np.float64 and abs(options.get("softmax_scale") or 1) > 2.0**100
            return capability < (8, 0) or q.shape[-1] > 256 or large
        if self.kernel == "forward_sm90_float32":
            return capability != (9, 0) or q.dtype != np.float32 or q.shape[-1] > 128
        given = {name for name, value in options.items() if value is not None}
        scales = [options[name] for name in given & {"softmax_scale", "softcap"}]
        if "softcap" in given:
            default = q.shape[-1] ** -0.5
            scales.append(options.get("softmax_scale", default) / options["softcap"])
        limit = 2.0**20 if "alibi_slopes" in given else 2.0**100
        return self.kernel == "forward_sm90" and (
            capability != (9, 0)
            or q.dtype.itemsize != 2
            or max(q.shape[-1], v.shape[-1]) > 256
            or 0 in (*q.shape, *k.shape, *v.shape)
            or given >= {"bias", "mask"}
            or ("bias" in given and options["bias"].dtype != q.dtype)
            or not all(1 / limit < float(scale) < limit for scale in scales)
            or not all(map(_tma_reads, (q, k, v)))
            or not all(
                _tma_reads(np.broadcast_to(options[name], (*options[name].shape[:-1], k.shape[-2])))
                for name in given & {"bias", "mask"}
            )
        )

    @property
    def draws(self) -> dict[str, Any]:
        """Arguments of ``attention_problems`` for problems that the kernel takes."""
        return _DRAWS.get(self.kernel, {})

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that the kernel takes."""
        return self.draws.get("dtypes", DTYPES)

    def size(self, full: int, reduced: int) -> int:
        """``full``, or ``reduced`` where a kernel runs thread by thread on the CPU."""
        return reduced if self.place == "hostcuda" else full

    def small_tiles(self, head_dim: int, keys: int, chunks: int | None = None) -> Any:
        """What to pass as ``kernel`` for tiles of so many keys, where the kernel lets one ask."""
        if self.kernel != "fa1_forward":
            return self.kernel
        return Algorithm1(sram_elements=4 * head_dim * keys, chunks=chunks)


def readable_by_tma(x: np.ndarray, seqlen_k: int) -> np.ndarray:
    """A bias or mask with the same entries, in rows of ``seqlen_k`` at multiples of 16 bytes.

    Axes of stride 0 keep it; what lies behind a row is NaN, or True.
    """
    axes = tuple(
        0 if step == 0 and n > 1 else slice(None)
        for step, n in zip(x.strides[:-1], x.shape[:-1], strict=True)
    )
    one = x[axes]
    width = -(-seqlen_k * x.itemsize // 16) * 16 // x.itemsize
    wide = poison(np.empty((*one.shape[:-1], width), x.dtype))
    wide[..., :seqlen_k] = one
    wide = wide[..., :seqlen_k]
    for axis, at in enumerate(axes):
        if at == 0:
            wide = np.expand_dims(wide, axis)
    return np.broadcast_to(wide, (*x.shape[:-1], seqlen_k))


HOST = [pytest.param(Path("host", "host"), id="host")]
ON_HOST_CUDA = [
    pytest.param(Path("hostcuda", name), id=f"hostcuda-{name}", marks=HOSTCUDA) for name in KERNELS
]
ON_GPU = [
    pytest.param(Path("gpu", name), id=f"gpu-{name}", marks=pytest.mark.gpu) for name in KERNELS
]

every_kernel = pytest.mark.parametrize("path", ON_HOST_CUDA + ON_GPU)
every_path = pytest.mark.parametrize("path", HOST + ON_HOST_CUDA + ON_GPU)


def a_dtype(kernel: str | Algorithm1 | None) -> str:
    """One that the kernel takes."""
    return _DRAWS[kernel]["dtypes"][0] if kernel in _DRAWS else "float16"


def normal(seed, *shape, dtype=np.float32) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(seed, *shape, seqlen_k=None, heads_k=None, dtype=np.float32) -> tuple[np.ndarray, ...]:
    """q of this shape, (..., heads_q, seqlen_q, head_dim), and k and v to go with it."""
    *batch, heads, seqlen_q, head_dim = shape
    key = (*batch, heads_k or heads, seqlen_k or seqlen_q, head_dim)
    return tuple(normal((seed, n), *s, dtype=dtype) for n, s in enumerate((shape, key, key)))


def assert_same_bits(actual, expected) -> None:
    """o and lse are equal bit for bit."""
    for name, a, e in zip(("o", "lse"), actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert a.tobytes() == e.tobytes(), f"{name} differs"
