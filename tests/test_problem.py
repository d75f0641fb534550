# SPDX-License-Identifier: MIT
"""What is accepted, how arguments are made canonical, and questions without arrays."""

from fractions import Fraction

import numpy as np
import pytest
from problem_calls import F32, Exported, call, zeros

from cupyflash import _dtypes, attention, plan
from cupyflash._problem import from_arrays

# ---- what is accepted, and its canonical form ----------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [2, 2.0, np.float32(2), np.float64(2), np.float16(2), np.int8(2), np.array(2.0), Fraction(2)],
    ids=lambda x: type(x).__name__,
)
def test_scalars_of_any_type_are_one_number(scale):
    problem = call(softmax_scale=scale, softcap=scale)
    assert (problem.softmax_scale, problem.softcap) == (2.0, 2.0)
    assert {type(problem.softmax_scale), type(problem.softcap)} == {float}
    assert problem == call(softmax_scale=2.0, softcap=2.0)


def test_a_negative_scale_is_legal():
    assert call(softmax_scale=-0.5).softmax_scale == -0.5
    assert call().softmax_scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize("slopes", [[0.1, 0.2], 0.1])
def test_slopes_given_as_numbers_keep_the_precision_of_q(slopes):
    q = zeros(2, 3, 1, dtype=np.float64)
    problem = from_arrays("attention", q, q, q, alibi_slopes=slopes)
    np.testing.assert_array_equal(problem.alibi_slopes, np.broadcast_to(slopes, 2))


@pytest.mark.parametrize(
    ("dtype", "softcap", "used"),
    [
        (np.float32, 1e-20, 1e-12),
        (np.float64, 1e-50, 1e-30),
        (np.float32, 1e38, 0),
        (np.float64, 1e300, 0),
        (np.float32, 30, 30),
    ],
)
def test_a_softcap_whose_reciprocal_leaves_the_range(dtype, softcap, used):
    x = zeros(3, 4, dtype=dtype)
    problem = from_arrays("attention", x, x, x, softcap=softcap)
    assert (problem.softcap, problem.general) == (used, used != 0)


def test_scale_is_held_to_the_dtype_of_the_scores():
    x = zeros(3, 4, dtype=float)
    assert from_arrays("attention", x, x, x, softmax_scale=1e39, softcap=1e-20).softcap == 1e-20


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, (-1, -1)),
        ((None, -1), False, (-1, -1)),
        ([3, 4], False, (3, 4)),
        ((np.int64(3), None), True, (3, 0)),
        ((3, 5), True, (3, 0)),
        ((0, 0), False, (0, 0)),
        # 6 queries and 10 keys: no distance is 16 or more.
        ((15, 2**31 - 1), False, (15, -1)),
        ((2**64, 16), False, (-1, -1)),
        ((1, 2), "top_left", (1, 0)),
    ],
)
def test_windows_become_two_numbers(window, causal, expected):
    problem = call(window=window, causal=causal)
    assert (problem.window_left, problem.window_right) == expected
    assert problem.top_left is (causal == "top_left")
    assert problem.diagonal_offset == (0 if problem.top_left else 4)


def test_arrays_become_views_of_full_shape():
    q, k, v = zeros(3, 1, 4, 6, 8), zeros(2, 10, 8), zeros(5, 2, 10, 3)
    bias, mask = zeros(6, 1), zeros(10, dtype=bool)
    problem = call(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        alibi_slopes=[1, 2, 3, 4],
        seqlens_k=np.uint16([[1], [2], [3]]),
    )
    assert problem.batch_shape == (3, 5)
    assert (problem.batch, problem.group, problem.out_shape) == (15, 2, (3, 5, 4, 6, 3))
    for name, given, shape in (
        ("q", q, (3, 5, 4, 6, 8)),
        ("k", k, (3, 5, 2, 10, 8)),
        ("v", v, (3, 5, 2, 10, 3)),
        ("bias", bias, (3, 5, 4, 6, 10)),
        ("mask", mask, (3, 5, 4, 6, 10)),
    ):
        view = getattr(problem, name)
        assert view.shape == shape
        assert np.shares_memory(view, given), f"{name} was copied"
    assert problem.alibi_slopes.shape == (3, 5, 4)
    assert problem.alibi_slopes.dtype == F32
    assert problem.seqlens_k.shape == (3, 5)
    assert problem.seqlens_k[:, 0].tolist() == [1, 2, 3]
    assert problem.seqlens_k.dtype in (np.int32, np.int64)


def test_two_axes_are_one_head():
    x = zeros(5, 8)
    assert call(x, x, x).out_shape == (5, 8)
    assert call(x, x[None], x).out_shape == (1, 5, 8)


def test_a_question_equals_its_call_and_keeps_no_array():
    problem = call(mask=zeros(6, 10, dtype=bool), seqlens_k=3)
    question = problem.without_arrays()
    assert question == problem
    assert hash(question) == hash(call(mask=zeros(6, 10, dtype=bool), seqlens_k=4))
    assert (question.q, question.mask, question.seqlens_k) == (None, None, None)
    assert question != call()


def test_objects_of_other_libraries_are_taken_without_a_copy():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 5, 8))
    problem = call(Exported(q), Exported(k), Exported(v))
    assert np.shares_memory(problem.q, q)
    assert np.shares_memory(problem.v, v)
    mask = rng.random((5, 5)) < 0.7
    answer = attention(Exported(q), Exported(k), Exported(v), mask=Exported(mask))
    assert type(answer) is np.ndarray
    np.testing.assert_array_equal(answer, attention(q, k, v, mask=mask))


# ---- axes without elements -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", _dtypes.DTYPES)
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((0, 2, 3, 4), (0, 2, 5, 4), (0, 2, 5, 4)),
        ((0, 3, 4), (0, 5, 4), (0, 5, 4)),
        ((0, 3, 4), (2, 5, 4), (2, 5, 4)),
        ((2, 0, 4), (2, 5, 4), (2, 5, 4)),
        ((2, 3, 4), (1, 0, 4), (1, 0, 6)),
        ((2, 3, 4), (2, 5, 4), (2, 5, 0)),
        ((0, 4), (0, 4), (0, 4)),
    ],
    ids=("batch", "heads", "query heads", "queries", "keys", "head_dim_v", "rows of one head"),
)
def test_axes_of_length_zero_are_no_errors(q, k, v, dtype):
    arrays = (np.ones(shape, dtype) for shape in (q, k, v))
    o, lse = attention(*arrays, causal=True, return_lse=True)
    assert o.shape == (*np.broadcast_shapes(q[:-3], k[:-3]), *q[-3:-1], v[-1])
    assert o.dtype == dtype
    assert lse.shape == o.shape[:-1]
    assert (o == 0).all()
    assert np.isneginf(lse).all() == (k[-2] == 0 or lse.size == 0)


# ---- questions without arrays --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ({"dtype": "int8"}, TypeError, "dtype is 'int8'; expected float16, bfloat16"),
        ({"dtype": "float12"}, TypeError, "dtype is 'float12'"),
        ({"dtype": None}, TypeError, "dtype is None"),
        ({"head_dim": 0}, ValueError, "head_dim is 0; expected a positive number"),
        ({"seqlen_q": -1}, ValueError, "seqlen_q is -1"),
        ({"seqlen_q": 2.5}, TypeError, "seqlen_q is 2.5; expected an integer"),
        ({"heads_q": 3, "heads_k": 2}, ValueError, "q has 3 heads and k has 2"),
        ({"bias_dtype": "float64"}, TypeError, "bias_dtype is 'float64'; expected q's dtype"),
        ({"mask": np.ones((4, 4), bool)}, TypeError, "mask is a ndarray; expected True or False"),
        ({"bias_dtype": "float12"}, TypeError, "bias_dtype is 'float12'; expected q's dtype"),
        ({"seqlen_k": 2**31}, ValueError, r"seqlen_k is 2147483648; expected a number below 2\^31"),
        ({"window": (-3, 0)}, ValueError, "window left is -3"),
        ({"causal": "right"}, ValueError, "causal is 'right'"),
        ({"softcap": 0}, ValueError, "softcap is 0.0"),
    ],
)
def test_questions_are_refused_as_calls_are(sizes, error, match):
    with pytest.raises(error, match=f"^plan: {match}"):
        plan(**({"seqlen_q": 4, "head_dim": 8, "device": "cpu"} | sizes))
