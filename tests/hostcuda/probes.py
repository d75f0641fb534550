# SPDX-License-Identifier: MIT
"""Tiny kernels for the tests of the host layer, and the launch records that run them."""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from hostcuda.toolchain import unavailable

REASON = unavailable()
REQUIRED = os.environ.get("CUPYFLASH_REQUIRE_HOSTCUDA") == "1"
MARKS = [
    pytest.mark.hostcuda,
    pytest.mark.skipif(bool(REASON) and not REQUIRED, reason=REASON or ""),
]

# Every kernel here takes the same parameters; `fault` = 1 plants its fault.
_HEADER = """
struct Params { float* x; float* y; long long n; long long fault; };
using int64 = long long;
extern "C" __global__ void probe(const __grid_constant__ Params p) {
  float* const x = p.x; float* const y = p.y;
  const int64 n = p.n; const bool fault = p.fault; const int t = threadIdx.x;
"""


def kernel(body: str) -> str:
    """A kernel named probe with this body; see _HEADER for what it may use."""
    return _HEADER + body + "\n}\n"


def record(x, y, *, n=0, fault=0, threads=64, grid=(1, 1, 1), smem=0, options=(), name="probe"):
    """A launch of it."""
    return SimpleNamespace(
        kernel=name,
        options=options,
        grid=grid,
        block=threads if isinstance(threads, tuple) else (threads, 1, 1),
        smem_bytes=smem,
        params=struct.pack("<QQqq", 0, 0, n, fault),
        pointers=(
            SimpleNamespace(offset=0, name="x", array=x),
            SimpleNamespace(offset=8, name="y", array=y),
        ),
        tensor_maps=(),
    )


def floats(n, fill=None):
    """0, 1, 2, ..., or n times the same."""
    return np.arange(n, dtype=np.float32) if fill is None else np.full(n, fill, np.float32)
