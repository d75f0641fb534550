# SPDX-License-Identifier: MIT
"""The workbench of ``bench``: inputs, candidates and clocks on one GPU.

CuPy makes the inputs, and torch, where it can be imported, shares their memory. Both work on one
stream, so that one pair of events times either.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash import (
    __version__,
    _arrays,
    _bench,
    _bench_torch,
    _compile,
    _dtypes,
    _problem,
    devices,
)
from cupyflash._bench import Candidate
from cupyflash._bench_grids import HOST, Row, rotations
from cupyflash._messages import one_line
from cupyflash.attention import attention
from cupyflash.plan import make_plan

_HOST_CALLS = 100
_SPIN_LIMIT = 0.02
_SPIN_CLOCK = 2e9  # cycles a second: no GPU's clock is much faster
_CHECKED_ROWS = 128
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}"""
# splitmix64 of the index, and Box and Muller's method.
_NORMAL = """
unsigned long long z = seed + 0x9E3779B97F4A7C15ull * (unsigned long long)(i + 1);
z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
z ^= z >> 31;
const float u = ((float)(unsigned int)(z >> 32) + 1.0f) * 2.3283064e-10f;
const float turn = (float)(unsigned int)z * 4.6566129e-10f;
x = sqrtf(-2.0f * logf(u)) * cospif(turn);
"""


class GpuWorkbench:
    """A :class:`cupyflash._bench.Workbench` on CuPy's current device.

    Parameters
    ----------
    kernels : sequence of (str or None)
        Which of our kernels to time: None is the plan's choice. The first is "ours".
    peers : sequence of str
        Values of :data:`cupyflash._bench.PEERS`.
    """

    def __init__(self, kernels: Sequence[str | None], peers: Sequence[str]) -> None:
        self._cupy = _arrays.import_cupy()
        self._torch, self._no_torch = _bench_torch.import_torch()
        self._kernels, self._peers = kernels, peers
        self._device = devices.current_device(self._cupy.cuda.Device().id)
        self._spin_kernel = self._cupy.RawKernel(_SPIN, "spin")
        self._normal_kernel = self._cupy.ElementwiseKernel(
            "uint64 seed", "float32 x", _NORMAL, "cupyflash_normal"
        )
        self._seed = 0
        self._sets: list[tuple[Any, Any, Any]] = []
        self._options: dict[str, Any] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[GpuWorkbench]:
        """Make one stream the current one of CuPy and of torch."""
        cupy, torch = self._cupy, self._torch
        with contextlib.ExitStack() as stack:
            if torch is None:
                stack.enter_context(cupy.cuda.Stream(non_blocking=True))
            else:
                stack.enter_context(torch.cuda.device(cupy.cuda.Device().id))
                stream = torch.cuda.Stream()
                stack.enter_context(torch.cuda.stream(stream))
                with warnings.catch_warnings():
                    # CuPy 14 would have the stream protocol, which older torch and CuPy lack.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    external = cupy.cuda.ExternalStream(stream.cuda_stream)
                stack.enter_context(external)
            yield self

    def machine(self) -> dict[str, str]:
        """Names and versions of what computes."""
        runtime, torch = self._cupy.cuda.runtime, self._torch
        texts = {
            "GPU": self._device.name,
            "compute capability": "{}.{}".format(*self._device.compute_capability),
            "driver": _driver_version(),
            "CUDA": f"driver {_cuda_version(runtime.driverGetVersion())}, "
            f"runtime {_cuda_version(runtime.runtimeGetVersion())}, NVRTC {_nvrtc_version()}",
            "cupyflash": __version__,
            "CuPy": self._cupy.__version__,
            "torch": self._no_torch if torch is None else torch.__version__,
        }
        if torch is not None:
            texts["cuDNN"] = _bench_torch.cudnn_version(torch.backends.cudnn.version())
        return texts

    def matmul(self, dtype: str, n: int | None = None) -> float | None:
        """TFLOP/s of a square matrix product, by torch if it is there; None where none can run."""
        n = n or (8192 if _dtypes.named(dtype).itemsize == 2 else 4096)
        try:
            a, b = (self._normal((n, n), dtype) for _ in range(2))
            multiply = self._cupy.matmul
            if self._torch is not None:
                a, b, multiply = self._to_torch(a), self._to_torch(b), self._torch.mm
            sample = self._gpu_timer(Candidate("matmul", lambda i: multiply(a, b)))
            sample(0, 20)  # until the clock has settled
            return 2 * n**3 / float(np.median([sample(0, 5) for _ in range(7)])) * 1e-12
        except Exception:  # no cuBLAS, a dtype that CuPy can't multiply: the rate is a by-product
            return None

    def finish(self) -> None:
        """Wait for what was enqueued, and raise what went wrong in it."""
        self._cupy.cuda.get_current_stream().synchronize()

    # ---- inputs ----------------------------------------------------------------------------------

    def _normal(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Standard normal numbers; no generator of a library is needed."""
        x = self._floats(shape)
        if dtype == "float64":  # all of its bits
            return x.astype(np.float64) + self._floats(shape).astype(np.float64) * 2.0**-24
        return x if dtype == "float32" else x.astype(_dtypes.named(dtype))

    def _floats(self, shape: tuple[int, ...]) -> Any:
        self._seed += 1
        x = self._cupy.empty(shape, np.float32)
        self._normal_kernel(np.uint64(self._seed << 40), x)
        return x

    def _make_inputs(self, row: Row) -> None:
        self._sets, self._options = [], {}
        self._cupy.get_default_memory_pool().free_all_blocks()
        if self._torch is not None:
            self._torch.cuda.empty_cache()
        for _ in range(rotations(row, self._device.l2_bytes)):
            lengths = (
                (row.heads_q, row.seqlen_q),
                (row.heads_k, row.seqlen_k),
                (row.heads_k, row.seqlen_k),
            )
            self._sets.append(
                tuple(self._normal((row.batch, *n, row.head_dim), row.dtype) for n in lengths)
            )
        options: dict[str, Any] = {"causal": row.causal}
        if row.window:
            options["window"] = row.window
        if row.softcap:
            options["softcap"] = row.softcap
        if row.option == "alibi":
            exponents = np.arange(1, row.heads_q + 1) * (-8.0 / row.heads_q)
            options["alibi_slopes"] = self._cupy.asarray(np.exp2(exponents).astype(np.float32))
        if row.extra_shape is not None:
            if row.option.startswith("mask"):  # nine in ten are visible
                options["mask"] = self._floats(row.extra_shape) > np.float32(-1.28)
            else:
                options["bias"] = self._normal(row.extra_shape, row.dtype)
        self._options = options

    # ---- candidates ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def row(self, row: Row) -> Iterator[list[Candidate]]:
        """Make the inputs of a row, and its candidates."""
        self._make_inputs(row)
        try:
            yield self._candidates(row)
        finally:
            self._sets, self._options = [], {}

    def _candidates(self, row: Row) -> list[Candidate]:
        candidates = []
        for number, kernel in enumerate(self._kernels):
            name = kernel if number and kernel else _bench.OURS
            candidates.append(self._ours(name, kernel, self._options))
        if row.option:
            plain = {"causal": row.causal}
            candidates.append(self._ours(_bench.PLAIN, self._kernels[0], plain))
        for peer in self._peers:
            if peer == _bench.CUPY:
                if not row.option:
                    candidates.append(self._plain_cupy(row))
            elif self._torch is not None and _concerns(peer, row):
                candidates.append(self._sdpa(row, peer))
        return candidates

    def _ours(self, name: str, kernel: str | None, options: dict[str, Any]) -> Candidate:
        sets = self._sets
        try:
            problem = _problem.from_arrays("attention", *sets[0], **options)
            plan = make_plan("attention", problem, kernel)
        except (TypeError, ValueError) as error:
            return Candidate(name, reason=one_line(error), kernel=kernel or "")
        tiles = plan.tiling or plan.tiles
        return Candidate(
            name,
            lambda i: attention(*sets[i % len(sets)], **options, kernel=kernel),
            kernel=plan.kernel,
            tile=None if tiles is None else (tiles.Br, tiles.Bc),
        )

    def _plain_cupy(self, row: Row) -> Candidate:
        cupy, sets, hidden = self._cupy, self._sets, None
        free, _ = cupy.cuda.runtime.memGetInfo()
        if 1.25 * row.score_bytes > free:
            return Candidate(
                _bench.CUPY,
                reason=f"the scores take {row.score_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
                "free",
            )
        if row.causal:
            positions = cupy.arange(row.seqlen_k, dtype=np.int32)
            later = positions > positions[-row.seqlen_q :, None]
            hidden = cupy.where(later, np.float32(-np.inf), np.float32(0))
            hidden = hidden.astype(_dtypes.named(row.dtype))
        return Candidate(_bench.CUPY, lambda i: plain_attention(cupy, *sets[i % len(sets)], hidden))

    def _to_torch(self, array: Any) -> Any:
        """A tensor on the same memory; as integers, since not all know bfloat16."""
        torch = self._torch
        name = "bool" if array.dtype == bool else array.dtype.name
        integers = array.view(f"i{array.dtype.itemsize}")
        return torch.as_tensor(integers, device="cuda").view(getattr(torch, name))

    def _sdpa(self, row: Row, peer: str) -> Candidate:
        torch, options = self._torch, self._options
        for option, text in (
            ("window", "window"),
            ("softcap", "softcap"),
            ("alibi_slopes", "ALiBi slopes"),
        ):
            if option in options:
                return Candidate(peer, reason=f"scaled_dot_product_attention has no {text}")
        if peer == _bench.UNFUSED:
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            if 3 * row.score_bytes > free:
                return Candidate(peer, reason="its score matrices don't fit the memory")
        given: dict[str, Any] = {"is_causal": row.causal}
        if row.heads_q != row.heads_k:
            given["enable_gqa"] = True
        extra = options.get("bias", options.get("mask"))
        if extra is not None:
            shape = (row.batch, row.heads_q, row.seqlen_q, row.seqlen_k)
            given["attn_mask"] = self._to_torch(extra).expand(shape)
        sets = [tuple(map(self._to_torch, arrays)) for arrays in self._sets]
        function = torch.nn.functional.scaled_dot_product_attention
        return Candidate(
            peer,
            lambda i: function(*sets[i % len(sets)], **given),
            around=lambda: _bench_torch.only_backend(torch, *_bench_torch.BACKENDS[peer]),
        )

    # ---- clocks and errors -----------------------------------------------------------------------

    def timer(self, row: Row, candidate: Candidate) -> Callable[[int, int], float]:
        """The GPU's clock, or the host's for rows that measure what a call takes the host."""
        return self._host_timer(candidate) if row.unit == HOST else self._gpu_timer(candidate)

    def _gpu_timer(self, candidate: Candidate) -> Callable[[int, int], float]:
        """Between events.

        The GPU is first kept busy for as long as the host takes to enqueue the calls, as the last
        sample had it: what is measured is then the GPU's work and no gaps between launches.
        """
        cuda, call = self._cupy.cuda, candidate.call
        host_seconds = 0.0

        def sample(first: int, calls: int) -> float:
            nonlocal host_seconds
            start, end = cuda.Event(), cuda.Event()
            with candidate.around():
                spin = min(1.3 * calls * host_seconds + 20e-6, _SPIN_LIMIT)
                self._spin_kernel((1,), (1,), (np.int64(spin * _SPIN_CLOCK),))
                start.record()
                begin = time.perf_counter()
                for i in range(first, first + calls):
                    call(i)
                host_seconds = (time.perf_counter() - begin) / calls
                end.record()
            end.synchronize()
            return cuda.get_elapsed_time(start, end) * 1e-3 / calls

        return sample

    def _host_timer(self, candidate: Candidate) -> Callable[[int, int], float]:
        """Calls enqueued back to back on an idle GPU, however many are asked for."""
        call = candidate.call

        def sample(first: int, calls: int) -> float:
            self.finish()
            with candidate.around():
                begin = time.perf_counter()
                for i in range(_HOST_CALLS):
                    call(i)
                seconds = time.perf_counter() - begin
            self.finish()
            return seconds / _HOST_CALLS

        return sample

    def error(self, row: Row, output: Any) -> float:
        """Against float64, on the first and last head of the last batch entry, and some rows."""
        step = max(row.seqlen_q // _CHECKED_ROWS, 1)
        heads = sorted({0, row.heads_q - 1})
        o = _arrays.adopt("bench", "o", output)
        squares = [0.0, 0.0]
        for head in heads:
            expected = reference_rows(self._cupy, row, self._sets[0], self._options, head, step)
            difference = float64(o[-1, head, ::step]) - expected
            for n, x in enumerate((difference, expected)):
                squares[n] += float((x * x).sum())
        return math.sqrt(squares[0] / squares[1])


def _concerns(peer: str, row: Row) -> bool:
    if peer == _bench.UNFUSED:
        return row.dtype in ("float32", "float64") and not row.option
    return row.unit == HOST if peer == _bench.TORCH else True


def plain_attention(xp: Any, q: Any, k: Any, v: Any, hidden: Any = None) -> Any:
    """Attention as one writes it in array operations, the scores in memory.

    Query heads that share a key head are taken together, so that k and v are not repeated; then
    ``hidden``, which is added to the scores, must be None.
    """
    batch, heads_q, seqlen_q, d = q.shape
    heads_k = k.shape[1]
    q = q.reshape(batch, heads_k, heads_q // heads_k * seqlen_q, d)
    s = xp.matmul(q * d**-0.5, k.swapaxes(-1, -2))
    if hidden is not None:
        s += hidden
    s -= s.max(axis=-1, keepdims=True)
    xp.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return xp.matmul(s, v).reshape(batch, heads_q, seqlen_q, v.shape[-1])


def float64(x: Any) -> Any:
    """A copy in float64; bfloat16 by its bits, since not every operation knows that dtype."""
    if x.dtype == _dtypes.named("bfloat16"):
        x = (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float64)


def reference_rows(
    xp: Any, row: Row, arrays: Sequence[Any], options: dict[str, Any], head: int, step: int
) -> Any:
    """Every ``step``-th row of one head of the last batch entry, in float64 with ``xp``."""
    key_head = head // (row.heads_q // row.heads_k)
    q = float64(arrays[0][-1, head, ::step])
    k, v = (float64(x[-1, key_head]) for x in arrays[1:])
    s = q @ k.T * row.head_dim**-0.5
    if "softcap" in options:
        s = options["softcap"] * xp.tanh(s / options["softcap"])
    i = xp.arange(0, row.seqlen_q, step)[:, None] + (row.seqlen_k - row.seqlen_q)
    j = xp.arange(row.seqlen_k)[None, :]
    if "bias" in options:
        s += float64(_rows_of(options["bias"], head, step))
    if "alibi_slopes" in options:
        s -= options["alibi_slopes"][head].astype(np.float64) * abs(i - j)
    visible = xp.ones(s.shape, bool)
    if "mask" in options:
        visible &= _rows_of(options["mask"], head, step)
    if options.get("causal"):
        visible &= j <= i
    if "window" in options:
        left, right = options["window"]
        visible &= (j >= i - left) & (j <= i + right)
    s = xp.where(visible, s, -np.inf)
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


def _rows_of(extra: Any, head: int, step: int) -> Any:
    """The rows of a bias or mask (1 or batch, 1 or heads, seqlen_q, seqlen_k)."""
    return extra[-1, head if extra.shape[1] > 1 else 0, ::step]


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"Kernel Module\D.*?\s(\d+\.[\d.]+)\s", text)
    return found[1] if found else "unknown"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvrtc_version() -> str:
    try:
        return "{}.{}".format(*_compile.nvrtc_version())
    except Exception:  # every kernel may come from the cache
        return "unknown"
