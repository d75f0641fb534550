# SPDX-License-Identifier: MIT
"""What the tests of the numpy path share: calls, inputs, comparison of bits, small tiles."""

import contextlib

import numpy as np

from cupyflash import _host_schedule, _problem, host


def attend(q, k, v, *, out=None, progress=None, **options):
    return host.run(_problem.from_arrays("attention", q, k, v, **options), out, progress=progress)


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(seed, *shape, seqlen_k=None, heads_k=None, dtype=np.float32):
    *batch, heads, seqlen_q, head_dim = shape
    key = (*batch, heads_k or heads, seqlen_k or seqlen_q, head_dim)
    return tuple(normal((seed, n), *s, dtype=dtype) for n, s in enumerate((shape, key, key)))


def assert_same_bits(actual, expected):
    for name, a, e in zip(("o", "lse"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        assert a.tobytes() == e.tobytes(), f"{name} differs"


@contextlib.contextmanager
def tiling(monkeypatch, *, rows=8, keys=16, threads=None):
    """Tiles so small that small problems have many, on so many threads."""
    with monkeypatch.context() as patch:
        patch.setattr(_host_schedule, "_MAX_ROWS", rows)
        patch.setattr(_host_schedule, "_MAX_KEYS", keys)
        if threads:
            patch.setattr(_host_schedule, "_THREAD_WORK", 0)
            of = _host_schedule.Schedule.of
            patch.setattr(host.Schedule, "of", lambda problem, allowed: of(problem, threads))
        yield
