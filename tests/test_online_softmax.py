# SPDX-License-Identifier: MIT
"""Pages 2 and 3 of the notes, formula by formula, and the algebra that they stand on."""

import math
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyflash.online_softmax import (
    OutputState,
    Statistics,
    algorithm1_steps,
    finish,
    fold,
    logsumexp,
    merge,
    resume,
    start,
)
from cupyflash.reference import attention_reference, visible

lengths = st.integers(0, 12)
seeds = st.integers(0, 2**32 - 1)
relaxed = settings(deadline=None, max_examples=60)


def block_statistics(x):
    """Steps 1 to 4 of page 2, for one block: m(x), f(x), l(x)."""
    m = x.max()
    f = np.exp(x - m)
    return m, f, f.sum()


def softmax_average(scores, values):
    """The direct definition, and its log-sum-exp; -inf hides."""
    m = scores.max(-1, keepdims=True)
    e = np.exp(scores - m)
    return (e @ values) / e.sum(-1, keepdims=True), (m + np.log(e.sum(-1, keepdims=True)))[..., 0]


def scores_and_values(seed, rows, keys, head_dim_v=3, hidden=0.25):
    rng = np.random.default_rng(seed)
    scores = 10 * rng.standard_normal((rows, keys))
    scores[rng.random((rows, keys)) < hidden] = -np.inf
    return scores, rng.standard_normal((keys, head_dim_v))


def one_pass(scores, values):
    return fold(start(scores.shape[:-1], values.shape[-1]), scores, values)


def assert_same(actual, expected):
    for a, b in zip(finish(actual), finish(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


# ---- page 2


@relaxed
@given(seeds, st.integers(1, 40))
def test_page2_exponents_of_a_block_lie_in_0_1(seed, size):
    x = 100 * np.random.default_rng(seed).standard_normal(size)
    m, f, l = block_statistics(x)
    assert np.all((f >= 0) & (f <= 1))
    assert f.max() == 1
    state = fold(start(()), x)
    assert (state.m, state.l) == (m, l)


@relaxed
@given(seeds, st.integers(1, 20), st.integers(1, 20))
def test_page2_local_max_cancels(seed, size_1, size_2):
    # e^(x - m(x1)) * e^(m(x1) - m(x)) = e^(x - m(x))
    x1, x2 = np.split(3 * np.random.default_rng(seed).standard_normal(size_1 + size_2), [size_1])
    m1, f1, _ = block_statistics(x1)
    m2, f2, _ = block_statistics(x2)
    m, f, _ = block_statistics(np.concatenate([x1, x2]))
    assert m == max(m1, m2)
    rebased = np.concatenate([np.exp(m1 - m) * f1, np.exp(m2 - m) * f2])
    np.testing.assert_allclose(rebased, f, rtol=1e-14)


@relaxed
@given(seeds, st.integers(1, 20), st.integers(1, 20))
def test_page2_merging_two_blocks(seed, size_1, size_2):
    # l(x) = e^(m(x1) - m(x)) l(x1) + e^(m(x2) - m(x)) l(x2)
    x1, x2 = np.split(3 * np.random.default_rng(seed).standard_normal(size_1 + size_2), [size_1])
    m, _, l = block_statistics(np.concatenate([x1, x2]))
    merged = merge(fold(start(()), x1), fold(start(()), x2))
    assert merged.m == m
    assert merged.l == pytest.approx(l, rel=1e-14)


@relaxed
@given(seeds, st.integers(1, 12), st.integers(1, 8))
def test_page2_logic_continues_to_n_over_b_blocks(seed, blocks, size):
    x = 5 * np.random.default_rng(seed).standard_normal((blocks, size))
    state = start(())
    for block in x:
        state = fold(state, block)
    m, f, l = block_statistics(x.ravel())
    assert state.m == m
    assert state.l == pytest.approx(l, rel=1e-14)
    softmax = np.exp(x.ravel() - state.m) / state.l
    np.testing.assert_allclose(softmax, f / l, rtol=1e-13)


# ---- page 3


@relaxed
@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_page3_line_11_updates_m_and_l_per_row(seed, rows, past, block):
    scores, _ = scores_and_values(seed, rows, past + block, hidden=0)
    old = fold(start(rows), scores[:, :past])
    new = fold(old, scores[:, past:])
    m_ij = scores[:, past:].max(axis=1)
    l_ij = np.exp(scores[:, past:] - m_ij[:, None]).sum(axis=1)
    np.testing.assert_array_equal(new.m, np.maximum(old.m, m_ij))
    np.testing.assert_allclose(
        new.l, np.exp(old.m - new.m) * old.l + np.exp(m_ij - new.m) * l_ij, rtol=1e-14
    )
    np.testing.assert_array_equal(new.m, scores.max(axis=1))
    np.testing.assert_allclose(new.l, np.exp(scores - new.m[:, None]).sum(axis=1), rtol=1e-13)


@relaxed
@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_page3_line_12_green_plus_yellow(seed, rows, past, block):
    scores, values = scores_and_values(seed, rows, past + block, hidden=0)
    old = one_pass(scores[:, :past], values[:past])
    new = fold(old, scores[:, past:], values[past:])

    # Green: diag(l_i) undivides O_i, one scalar re-bases it: the numerator over all past keys.
    green = np.exp(old.m - new.m)[:, None] * (np.diag(old.l) @ old.O)
    past_numerator = np.exp(scores[:, :past] - new.m[:, None]) @ values[:past]
    np.testing.assert_allclose(green, past_numerator, rtol=1e-12, atol=1e-13)

    # Yellow: the block in hand against its local max, re-based by one scalar.
    m_ij = scores[:, past:].max(axis=1)
    P_ij = np.exp(scores[:, past:] - m_ij[:, None])
    yellow = np.exp(m_ij - new.m)[:, None] * (P_ij @ values[past:])
    block_numerator = np.exp(scores[:, past:] - new.m[:, None]) @ values[past:]
    np.testing.assert_allclose(yellow, block_numerator, rtol=1e-12, atol=1e-13)

    # Green + yellow over the new normaliser is the new output block.
    np.testing.assert_allclose(new.O, np.diag(1 / new.l) @ (green + yellow), rtol=1e-12, atol=1e-13)


@relaxed
@given(
    seed=seeds,
    seqlen_q=st.integers(0, 9),
    seqlen_k=st.integers(0, 9),
    Br=st.integers(1, 4),
    Bc=st.integers(1, 4),
    causal=st.sampled_from([False, True, "top_left"]),
    hidden=st.sampled_from([0.0, 0.4]),
)
@example(seed=0, seqlen_q=7, seqlen_k=7, Br=3, Bc=3, causal=False, hidden=0.0)
@example(seed=0, seqlen_q=7, seqlen_k=3, Br=2, Bc=2, causal=True, hidden=0.0)
def test_page3_o_is_exact_after_every_step(seed, seqlen_q, seqlen_k, Br, Bc, causal, hidden):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, 4)) for n in (seqlen_q, seqlen_k, seqlen_k))
    mask = rng.random((seqlen_q, seqlen_k)) >= hidden
    bias = np.where(rng.random((seqlen_q, 1)) < hidden, -np.inf, rng.standard_normal((1, seqlen_k)))
    shown = mask & visible(seqlen_q, seqlen_k, causal=causal)

    Tr, Tc = math.ceil(seqlen_q / Br), math.ceil(seqlen_k / Bc)
    expected_order = [(j, i) for j in range(1, Tc + 1) for i in range(1, Tr + 1)]
    walked = []
    for j, i, O, l, m in algorithm1_steps(
        q, k, v, Br=Br, Bc=Bc, softmax_scale=1.5, causal=causal, bias=bias, mask=mask
    ):
        walked.append((j, i))
        for block in range(1, Tr + 1):  # blocks behind i are one key block ahead
            keys = (j if block <= i else j - 1) * Bc
            rows = slice((block - 1) * Br, block * Br)
            o, lse = attention_reference(
                q[rows],
                k[:keys],
                v[:keys],
                softmax_scale=1.5,
                bias=bias[rows, :keys],
                mask=shown[rows, :keys],
            )
            np.testing.assert_allclose(O[rows], o, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(finish(Statistics(m, l))[rows], lse, rtol=1e-12, atol=1e-12)
    assert walked == expected_order


def test_algorithm1_starts_from_line_2_and_keeps_what_it_yields():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 2))
    steps = list(algorithm1_steps(q, k, v, Br=2, Bc=2))
    first = steps[0]
    assert np.all(first.O[2:] == 0)
    assert np.all(first.l[2:] == 0)
    assert np.all(first.m[2:] == -np.inf)
    o, _ = attention_reference(q, k, v)
    assert not np.allclose(first.O, o)
    np.testing.assert_allclose(steps[-1].O, o, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_algorithm1_holds_low_precision_in_float32(dtype):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 20, 8)).astype(dtype)
    *_, last = algorithm1_steps(q, k, v, Br=8, Bc=8, window=(4, 0))
    assert last.O.dtype == last.l.dtype == last.m.dtype == np.float32
    o, _ = attention_reference(q, k, v, window=(4, 0))
    assert np.linalg.norm(last.O - o) <= 1e-6 * np.linalg.norm(o)


@pytest.mark.parametrize(
    ("shapes", "blocks", "message"),
    [
        (((2, 3, 4), (3, 4), (3, 4)), (1, 1), r"q has shape \(2, 3, 4\); expected 2-D"),
        (((3, 4), (3, 5), (3, 4)), (1, 1), r"k.shape=\(3, 5\)"),
        (((3, 4), (3, 4), (2, 4)), (1, 1), r"v.shape=\(2, 4\)"),
        (((3, 4), (3, 4), (3, 4)), (0, 1), "Br is 0; expected 1 or more"),
    ],
)
def test_algorithm1_refuses_before_the_first_step(shapes, blocks, message):
    with pytest.raises(ValueError, match=message):
        algorithm1_steps(*(np.zeros(s) for s in shapes), Br=blocks[0], Bc=blocks[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"Br": 1.5}, TypeError, "Br is 1.5; expected an integer"),
        ({"softmax_scale": 0}, ValueError, "softmax_scale is 0.0; expected a finite non-zero"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str"),
        ({"causal": "bottom"}, ValueError, "causal is 'bottom'"),
        ({"window": (1,)}, TypeError, r"window is \(1,\)"),
        ({"window": (-2, 0)}, ValueError, "window left is -2"),
        ({"bias": np.zeros((2, 2))}, ValueError, r"bias.shape is \(2, 2\)"),
        ({"mask": np.ones((2, 2), bool)}, ValueError, r"mask.shape is \(2, 2\)"),
        ({"mask": np.ones((3, 3))}, TypeError, "mask.dtype is float64; expected bool"),
        ({"mask": np.full((3, 3), 2)}, TypeError, "mask.dtype is int64; expected bool"),
        ({"q": [[1.0] * 4]}, TypeError, "q is a list; expected a numpy or CuPy array"),
    ],
)
def test_algorithm1_refuses_options_before_the_first_step(options, error, message):
    arguments = dict.fromkeys("qkv", np.zeros((3, 4))) | {"Br": 1, "Bc": 1}
    with pytest.raises(error, match=f"algorithm1_steps: {message}"):
        algorithm1_steps(**arguments | options)


# ---- the algebra


@relaxed
@given(seeds, st.integers(1, 4), st.lists(lengths, max_size=5), st.sampled_from([0.0, 0.3, 1.0]))
def test_any_split_of_the_keys_equals_one_pass(seed, rows, sizes, hidden):
    scores, values = scores_and_values(seed, rows, sum(sizes), hidden=hidden)
    whole = one_pass(scores, values)
    cuts = np.cumsum(sizes)[:-1] if sizes else []
    parts = list(zip(np.split(scores, cuts, 1), np.split(values, cuts), strict=True))

    folded = merged = start(rows, values.shape[1])
    for s, v in parts:
        folded = fold(folded, s, v)
        merged = merge(one_pass(s, v), merged)
    tree = [one_pass(s, v) for s, v in parts]
    while len(tree) > 1:
        tree = [merge(*tree[:2]), *tree[2:]]
    for state in (folded, merged, tree[0]):
        assert_same(state, whole)


@relaxed
@given(seeds, st.integers(1, 4), st.integers(1, 20))
def test_permuting_the_keys_changes_nothing(seed, rows, keys):
    scores, values = scores_and_values(seed, rows, keys)
    order = np.random.default_rng(seed).permutation(keys)
    assert_same(one_pass(scores[:, order], values[order]), one_pass(scores, values))


@relaxed
@given(seeds, st.integers(1, 20), st.sampled_from([-1e6, -200.0, 3.0, 1e6]))
def test_shifting_all_scores_shifts_lse_alone(seed, keys, shift):
    scores, values = scores_and_values(seed, 3, keys)
    o, lse = finish(one_pass(scores, values))
    o_shifted, lse_shifted = finish(one_pass(scores + shift, values))
    np.testing.assert_allclose(o_shifted, o, rtol=0, atol=1e-9)
    np.testing.assert_allclose(lse_shifted - shift, lse, rtol=0, atol=1e-9)


def test_against_the_direct_definition():
    scores, values = scores_and_values(7, 5, 30, hidden=0)
    for actual, expected in zip(
        finish(one_pass(scores, values)), softmax_average(scores, values), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-13)


EMPTY_KINDS = {
    "nothing folded": lambda dv: start(2, dv),
    "no keys": lambda dv: fold(
        start(2, dv), np.zeros((2, 0)), None if dv is None else np.ones((0, dv))
    ),
    "only hidden keys": lambda dv: fold(
        start(2, dv), np.full((2, 3), -np.inf), None if dv is None else np.ones((3, dv))
    ),
}


@pytest.mark.parametrize("head_dim_v", [None, 2])
@pytest.mark.parametrize("a", EMPTY_KINDS)
@pytest.mark.parametrize("b", EMPTY_KINDS)
def test_merge_of_two_empty_states_is_empty(a, b, head_dim_v):
    with np.errstate(all="raise", under="ignore"):
        merged = merge(EMPTY_KINDS[a](head_dim_v), EMPTY_KINDS[b](head_dim_v))
        finished = finish(merged)
    assert np.all(merged.m == -np.inf)
    assert np.all(merged.l == 0)
    if head_dim_v is None:
        assert np.all(finished == -np.inf)
    else:
        np.testing.assert_array_equal(finished[0], np.zeros((2, 2)))
        assert np.all(finished[1] == -np.inf)


@pytest.mark.parametrize("empty", EMPTY_KINDS)
def test_empty_is_the_neutral_element(empty):
    scores, values = scores_and_values(8, 2, 5, head_dim_v=2, hidden=0)
    state = one_pass(scores, values)
    with np.errstate(all="raise", under="ignore"):
        for merged in (merge(state, EMPTY_KINDS[empty](2)), merge(EMPTY_KINDS[empty](2), state)):
            for a, b in zip(merged, state, strict=True):
                np.testing.assert_array_equal(a, b)


def test_h21_partial_results_far_apart():
    o_a, o_b = np.full((1, 2), 3, np.float32), np.full((1, 2), 5, np.float32)

    def merged(lse_a, lse_b):
        states = (resume(o, np.array([x], np.float32)) for o, x in ((o_a, lse_a), (o_b, lse_b)))
        with np.errstate(all="raise", under="ignore"):
            o, lse = finish(merge(*states))
        return o[0].tolist(), float(lse[0])

    assert merged(0, 200) == ([5, 5], 200)
    assert merged(200, 0) == ([3, 3], 200)
    assert merged(0, 0) == ([4, 4], pytest.approx(math.log(2)))
    assert merged(-np.inf, -7) == ([5, 5], -7)
    assert merged(-3e38, 3e38) == ([5, 5], np.float32(3e38))
    o, lse = finish(
        merge(
            resume(np.zeros((1, 2)), np.array([-np.inf])),
            resume(np.zeros((1, 2)), np.array([-np.inf])),
        )
    )
    assert (o.tolist(), lse.tolist()) == ([[0, 0]], [-np.inf])


def test_h21_eight_partial_results_of_16_bit_inputs_err_as_one_does():
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((n, 16)).astype(ml_dtypes.bfloat16) for n in (8, 4096, 4096))
    exact, _ = attention_reference(q, k, v)
    scores = q.astype(np.float32) @ k.astype(np.float32).T / 4

    def partial(keys):
        return fold(start(8, 16, dtype=np.float32), scores[:, keys], v[keys])

    ring = partial(slice(0, 512))
    for n in range(512, 4096, 512):
        ring = merge(ring, resume(*finish(partial(slice(n, n + 512)))))
    whole = finish(partial(slice(None)))[0]
    rounding = np.finfo(np.float32).eps * np.abs(exact).max()
    error = np.abs(finish(ring)[0] - exact).max()
    assert error <= np.abs(whole - exact).max() + 8 * rounding


@relaxed
@given(seeds, st.lists(lengths, min_size=1, max_size=6), st.sampled_from([1.0, 1e3, 1e30]))
def test_streaming_logsumexp_against_a_direct_one(seed, sizes, magnitude):
    scores, _ = scores_and_values(seed, 3, sum(sizes), hidden=0.3)
    x = magnitude * scores
    with np.errstate(all="raise", under="ignore"):
        actual = logsumexp(np.split(x, np.cumsum(sizes)[:-1], axis=1))
    expected = np.logaddexp.reduce(x, axis=1, initial=-np.inf)
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "accumulated"),
    [(np.float16, np.float32), (ml_dtypes.bfloat16, np.float32), (np.float64, np.float64)],
)
def test_logsumexp_accumulates_in_float32_or_float64(dtype, accumulated):
    lse = logsumexp([np.zeros((2, 3000), dtype), np.zeros((2, 1000), dtype)])
    assert lse.dtype == accumulated
    np.testing.assert_allclose(lse, math.log(4000), rtol=1e-7)  # the row itself is float16 or so


def test_logsumexp_refuses_no_blocks():
    with pytest.raises(ValueError, match="no blocks"):
        logsumexp([])


@pytest.mark.parametrize("dtype", [int, np.float16, "bool", None, "no dtype"])
def test_start_refuses_what_holds_no_statistics(dtype):
    with pytest.raises(TypeError, match=r"start: dtype is .*; expected float32 or float64"):
        start(2, dtype=dtype)


def test_kinds_of_state_do_not_mix():
    with pytest.raises(TypeError, match="OutputState and values are missing"):
        fold(start(1, 2), np.zeros((1, 3)))
    with pytest.raises(TypeError, match="Statistics and values are given"):
        fold(start(1), np.zeros((1, 3)), np.zeros((3, 2)))
    with pytest.raises(TypeError, match="a is Statistics but b is OutputState"):
        merge(start(1), start(1, 2))


def test_state_keeps_its_dtype_and_the_old_state():
    old = start(2, 3, dtype=np.float32)
    new = fold(old, np.ones((2, 4), np.float16), np.ones((4, 3), ml_dtypes.bfloat16))
    assert all(x.dtype == np.float32 for x in (*new, *merge(old, new), *finish(new)))
    assert np.all(old.m == -np.inf)
    np.testing.assert_array_equal(new.O, np.ones((2, 3)))


def test_batched_rows():
    rng = np.random.default_rng(10)
    scores, values = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 3, 5, 6))
    o, lse = finish(one_pass(scores, values))
    expected = softmax_average(scores, values)
    np.testing.assert_allclose(o, expected[0], rtol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12)


# ---- the array's own namespace


def test_functions_come_from_the_module_of_the_array(monkeypatch):
    """A stand-in for CuPy: an array type of its own, and functions that refuse plain arrays."""

    class ndarray(np.ndarray):
        pass

    calls = set()

    class Module(types.ModuleType):
        def __getattr__(self, name):
            def function(*args, **kwargs):
                calls.add(name)
                return np.asarray(getattr(np, name)(*args, **kwargs)).view(ndarray)

            return function

    module = Module("cupy")
    module.ndarray = ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)
    scores, values = scores_and_values(11, 2, 6)
    like = scores.view(ndarray)
    state = fold(start(2, 3, like=like), like, values.view(ndarray))
    o, lse = finish(merge(state, start(2, 3, like=like)))
    assert {type(x) for x in (*state, o, lse)} == {ndarray}
    assert calls >= {"full", "zeros", "maximum", "exp", "where", "log"}
    assert_same(state, one_pass(scores, values))


def test_numpy_needs_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it now fails
    assert finish(fold(start(()), np.zeros(2))) == pytest.approx(math.log(2))


@pytest.mark.gpu
def test_cupy_in_cupy_out():
    cupy = pytest.importorskip("cupy")
    scores, values = scores_and_values(12, 4, 9)
    gpu_scores, gpu_values = cupy.asarray(scores), cupy.asarray(values)
    state = start(4, 3, like=gpu_scores)
    for keys in (slice(0, 4), slice(4, 4), slice(4, 9)):
        state = fold(state, gpu_scores[:, keys], gpu_values[keys])
    assert all(isinstance(x, cupy.ndarray) for x in state)
    assert_same(OutputState(*(x.get() for x in state)), one_pass(scores, values))
    q, k, v = (cupy.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 7, 4)))
    *_, last = algorithm1_steps(q, k, v, Br=3, Bc=2, causal=True)
    expected, _ = attention_reference(q.get(), k.get(), v.get(), causal=True)
    np.testing.assert_allclose(last.O.get(), expected, rtol=1e-12)
