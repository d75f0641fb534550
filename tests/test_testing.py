# SPDX-License-Identifier: MIT
"""What cupyflash.testing draws, and that its bounds pass what is right and nothing else."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.vendor.pretty import pretty

from cupyflash.reference import _evaluate, _per_query_head, attention_reference
from cupyflash.testing import (
    DTYPES,
    MAGNITUDES,
    Problem,
    arrange,
    assert_attention_close,
    attention_problems,
    error,
    guarded_empty,
    tile_edges,
)

many = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NUMPY_DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def low_precision(problem):
    """Attention as a kernel computes it: float32 (or float64) inside, P and o rounded to dtype."""
    dtype = problem.q.dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    q, k, v = _per_query_head(*problem.qkv)
    shown = _evaluate(*problem.qkv, **problem.kwargs).shown
    used = shown.any(-2)[..., None]
    q, k, v = (x.astype(wide) for x in (q, np.where(used, k, 0), np.where(used, v, 0)))
    kwargs = problem.kwargs
    s = wide(kwargs.get("softmax_scale", q.shape[-1] ** -0.5)) * (q @ k.swapaxes(-1, -2))
    if "softcap" in kwargs:
        s = wide(kwargs["softcap"]) * np.tanh(s / wide(kwargs["softcap"]))
    if "bias" in kwargs:
        s = s + kwargs["bias"].astype(wide)
    if "alibi_slopes" in kwargs:
        seqlen_q, seqlen_k = s.shape[-2:]
        length = np.asarray(kwargs.get("seqlens_k", seqlen_k))[..., None, None, None]
        offset = 0 if kwargs.get("causal") == "top_left" else length - seqlen_q
        distance = np.abs(np.arange(seqlen_q)[:, None] + offset - np.arange(seqlen_k))
        s = s - (kwargs["alibi_slopes"][..., None, None] * distance).astype(wide)
    s = np.where(shown, s, wide(-np.inf))
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(m), wide(0), m))
    l = p.sum(-1, keepdims=True)
    one = np.where(l == 0, wide(1), l)
    o = ((p.astype(dtype).astype(wide) @ v) / one).astype(dtype)
    lse = (m + np.log(one))[..., 0]
    shape = problem.reference[0].shape
    return o.reshape(shape), lse.reshape(shape[:-1])


def plain_problem(dtype=np.float32, seqlen_q=33, seqlen_k=65, **kwargs):
    rng = np.random.default_rng(0)
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    return Problem(*(rng.standard_normal((2, n, 16)).astype(dtype) for n in lengths), kwargs)


# ---- what is drawn


@many
@given(attention_problems())
def test_every_problem_is_one_that_the_oracle_solves(problem):
    o, lse = problem.reference
    two_d = all(x.ndim == 2 for x in problem.qkv)
    assert o.ndim == (2 if two_d else max(3, *(x.ndim for x in problem.qkv)))
    assert lse.shape == o.shape[:-1]
    assert np.isfinite(o).all(), "NaN in unused keys has leaked, or the data is not finite"
    assert not np.isnan(lse).any()
    assert {x.dtype.name for x in problem.qkv} <= set(DTYPES)
    assert len({x.dtype for x in problem.qkv}) == 1


@many
@given(attention_problems())
def test_bounds_accept_low_precision_arithmetic(problem):
    assert_attention_close(low_precision(problem), problem)


def strides(x):
    return tuple(s // x.itemsize for s in x.strides)


def key_layout(test):
    return lambda p: p.k.size > 8 and min(p.k.shape) > 1 and test(p.k)


WANTED = {
    **{f"dtype {d}": lambda p, d=d: p.q.dtype.name == d for d in DTYPES},
    **{f"magnitude {m}": lambda p, m=m: p.note.startswith(m) for m in MAGNITUDES},
    **{
        f"option {name}": lambda p, name=name: name in p.kwargs
        for name in ("window", "softmax_scale", "softcap", "bias", "mask", "alibi_slopes")
    },
    "transposed": key_layout(lambda k: k.ndim > 2 and strides(k)[-2] > strides(k)[-3]),
    "sliced": key_layout(lambda k: strides(k)[-1] == 1 and strides(k)[-2] > k.shape[-1]),
    "strided": key_layout(lambda k: strides(k)[-1] == 2),
    "broadcast": key_layout(lambda k: 0 in strides(k)),
    "negative": key_layout(lambda k: strides(k)[-2] < 0),
    "misaligned": key_layout(lambda k: k.flags.c_contiguous and k.ctypes.data % 16 == k.itemsize),
    "causal": lambda p: p.kwargs.get("causal") is True,
    "top left": lambda p: p.kwargs.get("causal") == "top_left",
    "negative scale": lambda p: p.kwargs.get("softmax_scale", 1) < 0,
    "group of 3": lambda p: p.q.ndim > 2 and p.q.shape[-3] == 3 * p.k.shape[-3],
    "two key heads under twelve": lambda p: p.q.ndim > 2 and p.k.shape[-3] * 6 == p.q.shape[-3] > 6,
    "other head_dim_v": lambda p: p.v.shape[-1] != p.k.shape[-1],
    "2-D": lambda p: p.q.ndim == 2,
    "two batch axes": lambda p: p.q.ndim == 5,
    "keys without q's batch axes": lambda p: p.q.ndim > p.k.ndim,
    "batch of v alone": lambda p: p.v.ndim == 4 and p.q.ndim == p.k.ndim == 3,
    "no queries": lambda p: p.q.shape[-2] == 0 < p.k.shape[-2],
    "no keys": lambda p: p.k.shape[-2] == 0 < p.q.shape[-2],
    "no batch entries": lambda p: 0 in p.q.shape[:-3],
    "empty row beside a full one": lambda p: (
        (p.reference[1] == -np.inf).any() and np.isfinite(p.reference[1]).any()
    ),
    "row emptied by the mask": lambda p: (
        "mask" in p.kwargs
        and p.kwargs["mask"].ndim == 2
        and any(p.kwargs["mask"].any(-1))
        and not all(p.kwargs["mask"].any(-1))
    ),
    "-inf in bias": lambda p: (p.kwargs.get("bias", np.zeros(1)) == -np.inf).any(),
    "float32 bias of bfloat16": lambda p: (
        p.q.dtype == ml_dtypes.bfloat16 and p.kwargs.get("bias", p.q).dtype == np.float32
    ),
    "expanded bias": lambda p: "bias" in p.kwargs and 0 in p.kwargs["bias"].strides,
    "different seqlens_k": lambda p: len(np.unique(p.kwargs.get("seqlens_k", 0))) > 1,
    "NaN in unused keys": lambda p: np.isnan(p.k).any() and not np.isnan(p.k).all(),
}


@pytest.fixture(scope="module")
def drawn():
    """A thousand and a half problems, the same in every run."""
    problems = []

    @settings(many, max_examples=1500, derandomize=True, database=None, phases=[Phase.generate])
    @given(attention_problems(lengths=[0, 1, 8, 9], head_dims=[1, 4, 8]))
    def draw(problem):
        problems.append(problem)

    draw()
    return problems


@pytest.mark.parametrize("kind", WANTED)
def test_each_kind_is_drawn(kind, drawn):
    assert sum(bool(WANTED[kind](problem)) for problem in drawn) >= 3


@settings(many, max_examples=60)
@given(
    attention_problems(
        dtypes=["float64"],
        lengths=[5],
        head_dims=[4],
        options=["causal"],
        layouts=["negative"],
        magnitudes=["unit"],
    )
)
def test_restrictions_hold(problem):
    assert problem.q.dtype == np.float64
    assert problem.q.shape[-2:] == problem.k.shape[-2:] == (5, 4)
    assert set(problem.kwargs) <= {"causal"}
    assert problem.v.strides[-2] < 0


@settings(many, max_examples=60)
@given(attention_problems(lengths=[64], max_scores=4096))
def test_max_scores_holds(problem):
    assert problem.reference[1].size * 64 <= 4096


@pytest.mark.parametrize(
    ("restriction", "message"),
    [
        ({"dtypes": ["int8"]}, "dtypes has 'int8'"),
        ({"options": ["rope"]}, "options has 'rope'"),
        ({"layouts": ["fortran"]}, "layouts has 'fortran'"),
        ({"magnitudes": []}, "magnitudes is empty"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [3, -1]}, "lengths has -1; expected at least 0"),
        ({"head_dims": [0, 8]}, "head_dims has 0; expected at least 1"),
        ({"max_options": -1}, "max_options is -1; expected 0 or more"),
        ({"max_scores": -1}, "max_scores is -1; expected 0 or more"),
    ],
)
def test_unknown_restrictions_are_refused(restriction, message):
    with pytest.raises(ValueError, match=message):
        attention_problems(**restriction)


@pytest.mark.parametrize(
    ("restriction", "message"),
    [
        ({"lengths": [3, 1.5]}, "an entry of lengths is 1.5; expected an integer"),
        ({"head_dims": ["8"]}, "an entry of head_dims is '8'"),
        ({"max_options": 1.5}, "max_options is 1.5"),
        ({"max_scores": None}, "max_scores is None"),
    ],
)
def test_restrictions_in_numbers_are_integers(restriction, message):
    with pytest.raises(TypeError, match=f"attention_problems: {message}"):
        attention_problems(**restriction)


@settings(many, max_examples=30)
@given(attention_problems(options=[]))
def test_no_options_is_plain_attention(problem):
    assert problem.kwargs == {}
    assert problem.q.ndim <= 3


def test_repr_names_shapes_dtypes_strides_and_options():
    v = arrange(np.ones((2, 3, 4), np.float32), "misaligned")
    problem = Problem(
        np.ones((2, 5, 4), np.float32),
        np.broadcast_to(np.ones((1, 4), np.float32), (2, 3, 4)),
        v,
        {"window": (3, None), "mask": np.ones((5, 3), bool), "seqlens_k": np.array(2)},
        "unit scores",
    )
    assert pretty(problem) == repr(problem)  # what hypothesis prints
    assert repr(problem) == (
        "Problem(q=float32(2, 5, 4), k=float32(2, 3, 4) strides (0, 0, 1), "
        "v=float32(2, 3, 4) at 16n+4 bytes, window=(3, None), mask=bool(5, 3), seqlens_k=2; "
        "unit scores)"
    )


def test_tile_edges():
    assert tile_edges(8) == [0, 1, 7, 8, 9, 17]
    with pytest.raises(ValueError, match="tiles are \\(8, 0\\); expected sizes of at least 1"):
        tile_edges(8, 0)
    with pytest.raises(TypeError, match=r"tile_edges: a tile is 1.5; expected an integer"):
        tile_edges(1.5)


def test_cupyflash_imports_without_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None; import cupyflash, cupyflash.reference, "
        "cupyflash.online_softmax; assert 'cupyflash.testing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_problem_on_a_module_keeps_layouts_and_options():
    x = np.ones((4, 3))
    problem = Problem(x[::-1], x, x, {"causal": True, "mask": np.ones((1, 4), bool)}, "note")
    moved = problem.on(np)
    assert moved.q.strides == problem.q.strides
    assert not np.shares_memory(moved.k, x)
    assert repr(moved) == repr(problem)
    np.testing.assert_array_equal(moved.reference[0], problem.reference[0])


@pytest.mark.gpu
@settings(many, max_examples=50)
@given(attention_problems())
def test_problems_move_to_cupy(problem):
    cupy = pytest.importorskip("cupy")
    moved = problem.on(cupy)
    for ours, theirs in zip(problem.qkv, moved.qkv, strict=True):
        # Bytes: NaN differs from itself, and not every numpy knows bfloat16's.
        assert theirs.get().tobytes() == ours.tobytes()
        if ours.size:
            assert theirs.strides == ours.strides
            assert theirs.data.ptr % 256 == ours.ctypes.data % 256
    out, check = guarded_empty((3, 5), np.float32, xp=cupy)
    out[...] = 1
    check()


# ---- bounds


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_accepts_o_alone_and_plain_references(dtype):
    problem = plain_problem(dtype)
    o, lse = low_precision(problem)
    assert_attention_close(o, problem)
    assert_attention_close(o, problem.reference[0])
    assert_attention_close((o, lse), problem.reference)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("against", ["problem", "reference"])
@pytest.mark.parametrize(
    "fault",
    ["scale", "one nan", "inf", "row off by one", "missing key", "causal off by one", "unwritten"],
)
def test_rejects_planted_faults(fault, against, dtype):
    problem = plain_problem(dtype, causal=True)
    q, k, v = problem.qkv
    faulty = problem
    if fault == "scale":
        faulty = Problem(q, k, v, {"causal": True, "softmax_scale": 0.27})
    elif fault == "missing key":
        faulty = Problem(q, k, v, {"causal": True, "mask": np.arange(65) != 40})
    elif fault == "causal off by one":
        faulty = Problem(q, k, v, {"window": (-1, 1)})
    o, lse = low_precision(faulty)
    if fault == "one nan":
        o[1, 7, 3] = np.nan
    elif fault == "inf":
        o[1, 7, 3] = np.inf
    elif fault == "row off by one":
        o[1, 1:] = o[1, :-1].copy()
    elif fault == "unwritten":
        o[0, 30:] = 0
    expected = problem if against == "problem" else problem.reference
    with pytest.raises(AssertionError, match=r"o(:| has)"):
        assert_attention_close(o, expected if against == "problem" else expected[0])
    with pytest.raises(AssertionError):
        assert_attention_close((o, lse), expected)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("fault", ["base 2", "nan", "finite for an empty row", "shifted"])
def test_rejects_a_wrong_lse(fault, dtype):
    problem = plain_problem(dtype, 5, 3, causal=True)  # two empty rows
    o, lse = low_precision(problem)
    assert_attention_close((o, lse), problem)
    if fault == "base 2":
        lse = lse * 1.4427
    elif fault == "nan":
        lse[0, 4] = np.nan
    elif fault == "finite for an empty row":
        lse[0, 0] = -5e4
    else:
        lse = lse + 1e-3
    with pytest.raises(AssertionError, match="lse"):
        assert_attention_close((o, lse), problem)


def test_rejects_anything_but_zero_in_an_empty_row():
    problem = plain_problem(np.float16, 5, 3, causal=True)
    o, lse = low_precision(problem)
    o[0, 0, 0] = 1e-7
    with pytest.raises(AssertionError, match="not 0 in a row that sees no key"):
        assert_attention_close((o, lse), problem)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_scores_at_the_limit_still_bound_the_output(dtype):
    """Rounding may give a row to another key, but no average leaves the range of the values."""
    problem = plain_problem(dtype)
    q, k, v = problem.qkv
    problem = Problem((1e4 * q).astype(dtype), (1e4 * k).astype(dtype), v)
    o, lse = low_precision(problem)
    assert_attention_close((o, lse), problem)
    with pytest.raises(AssertionError):
        assert_attention_close((o + dtype(20), lse), problem)


@pytest.mark.parametrize("against", ["problem", "reference"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
class TestNumbersBelowTheSmallestNormalOne:
    """They are rounded, or flushed, absolutely: no arithmetic is accurate relative to them."""

    def scaled(self, dtype, against, factor):
        q, k, v = plain_problem(dtype).qkv
        problem = Problem(q, k, (v.astype(np.float64) * factor).astype(dtype))
        return problem, problem if against == "problem" else problem.reference

    @pytest.mark.parametrize("steps", [2, 64])
    def test_rounding_them_is_no_error(self, dtype, against, steps):
        smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        problem, expected = self.scaled(dtype, against, steps * smallest)
        o, lse = problem.reference
        if dtype != np.float64:  # which the oracle itself rounds to
            assert error(o.astype(dtype), o) > 1e-6
        lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
        assert_attention_close((o.astype(dtype), lse), expected)
        if dtype != np.float16:  # arithmetic of 32 or 64 bits flushes below its smallest
            assert_attention_close((np.zeros_like(o, dtype), lse), expected)

    def test_above_them_nothing_is_forgiven(self, dtype, against):
        smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
        factor = 2.0**8 if dtype == np.float16 else smallest * 2.0**60
        problem, expected = self.scaled(dtype, against, factor)
        o, lse = problem.reference
        lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
        assert_attention_close((o.astype(dtype), lse), expected)
        unit = max(float(ml_dtypes.finfo(dtype).eps), 1e-14 if dtype == np.float64 else 1e-6)
        with pytest.raises(AssertionError, match=r"^o: "):
            assert_attention_close(((o * (1 + 8 * unit)).astype(dtype), lse), expected)


def tf32(x):
    """float32 cut off to TF32's 11 bits."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def scores_of_split_products(q, k, dropped=False):
    """q k^T of float32 as forward_sm80 makes it, eight terms at a time, sums cut off to float32.

    dropped: one of the two correcting products is left out.
    """
    high_q, high_k = (tf32(x) for x in (q, k))
    low_q, low_k = (tf32((x - tf32(x)) * np.float32(1 + 2.4 / 4096)) for x in (q, k))

    def added(sums, a, b):
        exact = sums + a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)
        rounded = exact.astype(np.float32)
        outward = np.abs(rounded.astype(np.float64)) > np.abs(exact)
        return np.where(outward, np.nextafter(rounded, np.float32(0)), rounded)

    main = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
    correction = main
    for first in range(0, q.shape[-1], 8):
        terms = (..., slice(first, first + 8))
        if not dropped:
            correction = added(correction, low_q[terms], high_k[terms])
        correction = added(correction, high_q[terms], low_k[terms])
        main = added(main, high_q[terms], high_k[terms])
    return main + correction


@pytest.mark.parametrize("keys", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [1, 8, 64, 128, 200, 256])
@pytest.mark.parametrize("values", ["normal", "of one sign", "equal"])
def test_split_products_pass_and_without_a_correction_they_do_not(values, head_dim, keys):
    """A lone key's lse is its score: nothing averages what the products of it leave out."""
    rng = np.random.default_rng((head_dim, keys))
    caught = 0
    for _ in range(50):
        q, k, v = (rng.standard_normal((4, n, head_dim)) for n in (3, keys, keys))
        if values == "of one sign":
            q, k = 1 + q / 10, 1 + k / 10
        elif values == "equal":
            q, k = (np.broadcast_to(x[..., :1, :1], x.shape) for x in (q, k))
        problem = Problem(*(np.ascontiguousarray(x, np.float32) for x in (q, k, v)))
        for dropped in (False, True):
            products = scores_of_split_products(*problem.qkv[:2], dropped).astype(np.float64)
            s = products * head_dim**-0.5
            p = np.exp(s - s.max(-1, keepdims=True))
            o = p @ problem.v.astype(np.float64) / p.sum(-1, keepdims=True)
            lse = s.max(-1) + np.log(p.sum(-1))
            result = o.astype(np.float32), lse.astype(np.float32)
            if dropped:
                try:
                    assert_attention_close(result, problem)
                except AssertionError:
                    caught += 1
            else:
                assert_attention_close(result, problem)
    assert caught >= 45


def test_message_names_the_worst_element_and_the_problem():
    problem = plain_problem(np.float16)
    o, _ = low_precision(problem)
    o[1, 7, 3] += np.float16(0.5)
    with pytest.raises(AssertionError) as caught:
        assert_attention_close(o, problem)
    message = str(caught.value)
    assert "1 of 1056 elements are past their bound; worst at [1, 7, 3]: got " in message
    assert "off by 0.5" in message
    assert "Problem(q=float16(2, 33, 16)" in message


def test_shape_and_dtype_are_checked():
    problem = plain_problem()
    o, lse = low_precision(problem)
    with pytest.raises(AssertionError, match=r"o has shape \(2, 32, 16\), expected \(2, 33, 16\)"):
        assert_attention_close(o[:, 1:], problem)
    with pytest.raises(AssertionError, match="lse has shape"):
        assert_attention_close((o, lse[:, 1:]), problem)
    with pytest.raises(TypeError, match="o is int64"):
        assert_attention_close(np.ones(3, np.int64), np.ones(3))
    with pytest.raises(ValueError, match="lse is given on one side only"):
        assert_attention_close((o, lse), problem.reference[0])


def test_elements_that_the_reference_leaves_undefined_are_not_compared():
    problem = plain_problem(np.float32, causal=True)
    problem.v[0, 64] = np.nan  # the last key, which only the last query sees
    o, lse = low_precision(problem)
    o[0, :-1] = attention_reference(*(x[:, :-1] for x in problem.qkv), causal=True)[0][0]
    assert_attention_close((o, lse), problem)
    o[1, 0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"o\[1, 0, 0\] = nan"):
        assert_attention_close((o, lse), problem)


class OnDevice:
    """As much of a CuPy array as the assertion uses."""

    def __init__(self, array):
        self.get = lambda: array


def test_arrays_on_a_device_are_fetched():
    problem = plain_problem()
    o, lse = low_precision(problem)
    assert_attention_close((OnDevice(o), OnDevice(lse)), problem)
    assert error(OnDevice(o), OnDevice(o)) == 0


def test_error():
    assert error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    assert error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert error(np.zeros(2), np.zeros(2)) == 0
    assert error(np.ones(2), np.zeros(2)) == np.inf
    assert error(np.array([1.0, 7.0]), np.array([1.0, np.nan])) == 0
    with pytest.raises(ValueError, match="shape"):
        error(np.ones(2), np.ones((2, 1)))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_an_output_of_another_dtype_is_not_close(dtype):
    x = np.random.default_rng(0).standard_normal((2, 4, 8), np.float32)
    problem = Problem(x, x, x, {})
    o, _ = problem.reference
    assert_attention_close(o.astype(np.float32), problem)
    with pytest.raises(TypeError, match=f"o is {dtype} where the inputs are float32"):
        assert_attention_close(o.astype(dtype), problem)
