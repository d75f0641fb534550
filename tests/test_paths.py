# SPDX-License-Identifier: MIT
"""The ways of the tests themselves: a kernel that declines what it should take is no skip."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from paths import KERNELS, Path, a_dtype, launches, normal, qkv

from cupyflash import plan
from cupyflash.plan import _cached_plan
from cupyflash.testing import attention_problems


@pytest.fixture
def tired(monkeypatch):
    """The kernels that have limits decline everything."""
    for module in ("_sm90", "_sm90_float32", "_sm80"):
        monkeypatch.setattr(f"cupyflash.{module}.refusal", lambda *args: "is tired")
    _cached_plan.cache_clear()
    yield
    _cached_plan.cache_clear()


@pytest.mark.parametrize("kernel", ["forward_sm90", "forward_sm90_float32", "forward_sm80"])
def test_a_refusal_without_a_reason_is_a_failure(tired, kernel):
    q, k, v = qkv(0, 2, 9, 64, dtype=a_dtype(kernel))
    with pytest.raises(ValueError, match=f"kernel '{kernel}' is tired"):
        Path("hostcuda", kernel)(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("forward_sm80", {"head_dim": 257}),
        ("forward_sm90_float32", {"head_dim": 129, "dtype": np.float32}),
        ("forward_sm90_float32", {"dtype": np.float64}),
        ("forward_sm90", {"head_dim": 264}),
        ("forward_sm90", {"head_dim": 60}),
        ("forward_sm90", {"dtype": np.float32}),
        ("forward_sm90", {"seqlen_k": 0}),
        ("forward_sm90", {"softcap": 2.0**101}),
        ("forward_sm90", {"mask": np.ones((9, 9), bool)}),
        ("forward_sm90", {"bias": normal(0, 9, 9, dtype=np.float16)}),
        ("forward_sm90", {"bias": normal(0, 9, dtype=np.float32)}),
        ("forward_sm90", {"bias": normal(0, 9, 1, dtype=np.float16)}),
        ("forward_sm90", {"bias": normal(0, 9, dtype=np.float16), "mask": np.ones(9, bool)}),
        ("forward_sm90", {"alibi_slopes": [1.0, 2.0], "softcap": 2.0**-21}),
        ("forward_sm90", {"alibi_slopes": [1.0, 2.0], "softmax_scale": 2.0**21}),
        ("forward_sm90", {"softmax_scale": -1.0}),
    ],
)
def test_a_refusal_by_a_documented_limit_is_a_skip(kernel, change):
    options = dict(change)
    head_dim, dtype = options.pop("head_dim", 64), options.pop("dtype", np.float16)
    q, k, v = qkv(0, 2, 9, head_dim, dtype=dtype)
    if options.pop("seqlen_k", None) == 0:
        k, v = k[:, :0], v[:, :0]
    with pytest.raises(pytest.skip.Exception, match=f"kernel '{kernel}' "):
        Path("hostcuda", kernel)(q, k, v, **options)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "fa1_forward"])
@given(problem=attention_problems(head_dims=(1, 8, 33, 64, 256, 257)))
def test_limits_are_declined_and_nothing_else(kernel, problem):
    """What Path takes for the limits of a kernel are those that the plan knows."""
    expected = Path("hostcuda", kernel).may_decline(*problem.qkv, **problem.kwargs)
    refused = pytest.raises(ValueError, match="leave kernel=None")
    with refused if expected else contextlib.nullcontext():
        launches(*problem.qkv, kernel=kernel, **problem.kwargs)


def test_what_every_way_takes_is_what_a_plan_can_choose():
    """But for Algorithm 1, which runs by name: it is no device's only answer."""
    assert {*KERNELS} - {"fa1_forward"} == {
        plan(seqlen_q=4096, head_dim=64, heads_q=16, dtype=dtype, device=device).kernel
        for device in ("T4", "A100", "H200")
        for dtype in ("float16", "float32")
    }
