# SPDX-License-Identifier: MIT
"""The oracle against numbers worked by hand, pictures of masks, and finite differences."""

import math
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.reference import attention_reference, attention_reference_grad, visible


def picture(*rows):
    """["1 0", "1 1"] as a boolean matrix."""
    return np.array([[int(c) for c in row.split()] for row in rows], dtype=bool)


# ---- numbers written out


def test_two_by_two_by_hand():
    # Scores ln 1, ln 3 in row 0 and ln 1, ln 1 in row 1: weights 1/4, 3/4 and 1/2, 1/2.
    q = [[1.0], [0.0]]
    k = [[0.0], [math.log(3.0)]]
    v = [[4.0, 8.0], [0.0, 16.0]]
    o, lse = attention_reference(q, k, v)
    np.testing.assert_allclose(o, [[1.0, 14.0], [2.0, 12.0]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(4.0), math.log(2.0)], rtol=1e-15)


def test_two_by_two_causal_by_hand():
    o, lse = attention_reference(
        [[1.0], [0.0]], [[math.log(5.0)], [7.0]], [[2.0], [6.0]], causal=True
    )
    np.testing.assert_allclose(o, [[2.0], [4.0]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(5.0), math.log(2.0)], rtol=1e-15)


def test_default_scale_is_one_over_sqrt_head_dim():
    q, k = np.ones((1, 16)), np.ones((1, 16))
    assert attention_reference(q, k, [[1.0]])[1] == [4.0]
    assert attention_reference(q, k, [[1.0]], softmax_scale=-0.5)[1] == [-8.0]


def test_scores_pass_softcap_then_bias_then_alibi():
    # One query level with the last of two keys; product 3, cap 2, bias 0.25 and 0.5, slope 0.125.
    _, lse = attention_reference(
        [[3.0]],
        [[1.0], [1.0]],
        [[0.0], [0.0]],
        softcap=2.0,
        bias=[0.25, 0.5],
        alibi_slopes=[0.125],
    )
    s = [2 * math.tanh(1.5) + 0.25 - 0.125, 2 * math.tanh(1.5) + 0.5]
    assert lse[0] == pytest.approx(math.log(math.exp(s[0]) + math.exp(s[1])), rel=1e-15)


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({}, [[1, 0, 1], [2, 1, 0]]),
        ({"seqlens_k": 2}, [[0, 1, None], [1, 0, None]]),
        ({"causal": "top_left"}, [[0, None, None], [1, 0, None]]),
    ],
)
def test_alibi_distance_is_aligned_as_the_mask_is(options, distance):
    _, lse = attention_reference(
        np.zeros((2, 1)), np.zeros((3, 1)), np.zeros((3, 1)), alibi_slopes=[0.5], **options
    )
    direct = [math.log(sum(math.exp(-0.5 * d) for d in row if d is not None)) for row in distance]
    np.testing.assert_allclose(lse, direct, rtol=1e-15)


def test_gradients_two_by_two_by_hand():
    # P = [[1/4, 3/4]], v = (1, 5), o = 4, dO = 1: dS = P (v - o) = (-3/4, 3/4).
    k = np.array([[0.0], [math.log(3.0)]])
    grads = attention_reference_grad(
        [[1.0]], [[1.0]], k, [[1.0], [5.0]], bias=np.zeros(2, np.float32)
    )
    np.testing.assert_allclose(grads.dq, [[0.75 * math.log(3.0)]], rtol=1e-15)
    np.testing.assert_allclose(grads.dk, [[-0.75], [0.75]], rtol=1e-15)
    np.testing.assert_allclose(grads.dv, [[0.25], [0.75]], rtol=1e-15)
    np.testing.assert_allclose(grads.dbias, [-0.75, 0.75], rtol=1e-15)


# ---- pictures of masks


@pytest.mark.parametrize(
    ("lengths", "options", "rows"),
    [
        ((2, 4), {"causal": True}, ["1 1 1 0", "1 1 1 1"]),
        ((4, 2), {"causal": True}, ["0 0", "0 0", "1 0", "1 1"]),
        ((2, 4), {"causal": "top_left"}, ["1 0 0 0", "1 1 0 0"]),
        ((4, 2), {"causal": "top_left"}, ["1 0", "1 1", "1 1", "1 1"]),
        ((2, 4), {"window": (1, 0)}, ["0 1 1 0", "0 0 1 1"]),
        ((4, 2), {"window": (1, 1)}, ["0 0", "1 0", "1 1", "1 1"]),
        ((2, 4), {"window": (None, 1)}, ["1 1 1 1", "1 1 1 1"]),
        ((3, 3), {"window": (0, -1)}, ["1 1 1", "0 1 1", "0 0 1"]),
        ((3, 3), {"window": (1, 2), "causal": True}, ["1 0 0", "1 1 0", "0 1 1"]),
        ((2, 4), {"window": (0, None), "causal": "top_left"}, ["1 0 0 0", "0 1 0 0"]),
        ((2, 4), {"seqlens_k": 2}, ["1 1 0 0", "1 1 0 0"]),
        ((2, 4), {"seqlens_k": 3, "causal": True}, ["1 1 0 0", "1 1 1 0"]),
        ((2, 4), {"seqlens_k": 1, "causal": True}, ["0 0 0 0", "1 0 0 0"]),
        ((2, 3), {"seqlens_k": 0}, ["0 0 0", "0 0 0"]),
    ],
)
def test_visible_as_drawn(lengths, options, rows):
    np.testing.assert_array_equal(visible(*lengths, **options), picture(*rows))


def test_visible_has_the_batch_axes_of_seqlens_k():
    got = visible(2, 3, causal=True, seqlens_k=np.array([[3], [1]]))
    assert got.shape == (2, 1, 2, 3)
    np.testing.assert_array_equal(got[0, 0], picture("1 1 0", "1 1 1"))
    np.testing.assert_array_equal(got[1, 0], picture("0 0 0", "1 0 0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "bottom_left"}, "causal is 'bottom_left'"),
        ({"window": (-1, -3)}, r"window is \(-1, -3\)"),
        ({"seqlens_k": [5]}, r"seqlens_k is \[5\]; expected 0 .. 4"),
        ({"seqlens_k": [-1]}, "seqlens_k"),
    ],
)
def test_visible_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        visible(2, 4, **options)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ((2.0, 4), {}, "visible: seqlen_q is 2.0; expected an integer"),
        ((2, 4), {"seqlens_k": 2.7}, "visible: seqlens_k is 2.7; expected 64-bit integers"),
        ((2, 4), {"seqlens_k": True}, "seqlens_k is True"),
        ((2, 4), {"window": (1.5, 0)}, "visible: an entry of window is 1.5; expected an integer"),
        ((2, 4), {"window": ()}, r"window is \(\); expected \(left, right\)"),
        ((2, 4), {"window": (1,)}, r"window is \(1,\)"),
        ((2, 4), {"window": 5}, "window is 5"),
    ],
)
def test_visible_refuses_what_is_no_integer(lengths, options, message):
    with pytest.raises(TypeError, match=message):
        visible(*lengths, **options)


# ---- shapes


def test_two_d_is_one_head_and_leading_axes_broadcast():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 3, 8))
    k = rng.standard_normal((5, 2, 6, 8))
    v = rng.standard_normal((2, 1, 2, 6, 7))
    o, lse = attention_reference(q, k, v)
    assert (o.shape, lse.shape) == ((2, 5, 4, 3, 7), (2, 5, 4, 3))
    one, one_lse = attention_reference(q[1, 0, 3], k[4, 1], v[1, 0, 1])
    np.testing.assert_allclose(o[1, 4, 3], one, rtol=1e-13)
    np.testing.assert_allclose(lse[1, 4, 3], one_lse, rtol=1e-13)


@pytest.mark.parametrize("shape", [(0, 2, 3), (3, 2, 0), (0, 2, 0)])
def test_empty_lengths(shape):
    seqlen_q, heads, seqlen_k = shape
    o, lse = attention_reference(
        np.ones((heads, seqlen_q, 4)), np.ones((heads, seqlen_k, 4)), np.ones((heads, seqlen_k, 5))
    )
    np.testing.assert_array_equal(o, np.zeros((heads, seqlen_q, 5)))
    assert lse.shape == (heads, seqlen_q)
    assert seqlen_k or np.all(lse == -np.inf)


def test_low_precision_inputs_are_computed_in_float64():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 5, 8)).astype(ml_dtypes.bfloat16)
    o, lse = attention_reference(q, k, v)
    wide = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    assert o.dtype == lse.dtype == np.float64
    np.testing.assert_array_equal(o, wide[0])
    np.testing.assert_array_equal(lse, wide[1])


def test_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="q has 33 heads, k has 2"):
        attention_reference(np.ones((33, 1, 4)), np.ones((2, 1, 4)), np.ones((2, 1, 4)))
    with pytest.raises(ValueError, match="v has 1"):
        attention_reference(np.ones((2, 1, 4)), np.ones((2, 1, 4)), np.ones((1, 1, 4)))


def test_refuses_a_mask_of_numbers():
    x = np.ones((2, 4))
    with pytest.raises(TypeError, match="mask is float64; expected bool"):
        attention_reference(x, x, x, mask=np.ones((2, 2)))


def test_refuses_what_is_no_number():
    x = np.ones((2, 4))
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(TypeError, match=f"{name} is a str; expected a real number"):
            attention_reference(x, x, x, **{name: "1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": 0}, "softmax_scale is 0.0; expected a finite non-zero number"),
        ({"softmax_scale": math.nan}, "softmax_scale is nan"),
        ({"softcap": 0}, "softcap is 0.0; expected a finite positive number"),
        ({"softcap": -1}, "softcap is -1.0"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"alibi_slopes": [1, 2]}, r"alibi_slopes.shape is \(2,\); .* broadcasts to \(1,\)"),
        ({"bias": np.zeros((2, 2, 2))}, r"bias.shape is \(2, 2, 2\)"),
        ({"mask": np.ones(3, bool)}, r"mask.shape is \(3,\)"),
        ({"seqlens_k": [1, 2]}, r"seqlens_k.shape is \(2,\)"),
    ],
)
def test_refuses_options_that_do_not_fit(options, message):
    x = np.ones((2, 4))
    for refuses in (attention_reference, partial(attention_reference_grad, x)):
        with pytest.raises(ValueError, match=f"attention_reference: {message}"):
            refuses(x, x, x, **options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4,), (2, 4), (2, 4)), r"at least 2 axes \(q.shape=\(4,\)"),
        (((2, 3), (2, 4), (2, 4)), "q and k must agree in head_dim"),
        (((2, 4), (3, 4), (1, 4)), "k and v in seqlen_k"),
        (((2, 1, 2, 4), (3, 1, 2, 4), (1, 2, 4)), "the leading axes of q, k and v must broadcast"),
    ],
)
def test_refuses_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention_reference(*map(np.ones, shapes))


# ---- public failures


def test_h01_row_that_the_mask_empties():
    rng = np.random.default_rng(2)
    q, dout = rng.standard_normal((2, 1, 2, 6, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 2, 10, 8)).astype(np.float32)
    mask = np.tri(6, 10, dtype=bool)
    mask[5] = False
    options = {"softmax_scale": 0.125, "mask": mask[None, None]}
    o, lse = attention_reference(q, k, v, **options)
    for i in range(5):
        row, row_lse = attention_reference(
            q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], softmax_scale=0.125
        )
        np.testing.assert_allclose(o[:, :, i : i + 1], row, rtol=1e-13)
        np.testing.assert_allclose(lse[:, :, i : i + 1], row_lse, rtol=1e-13)
    assert np.all(o[:, :, 5] == 0)
    assert np.all(lse[:, :, 5] == -np.inf)
    grads = attention_reference_grad(dout, q, k, v, **options)
    assert np.all(grads.dq[:, :, 5] == 0)
    assert all(np.isfinite(g).all() for g in grads[:3])


@pytest.mark.parametrize("right", [7, 2**31 - 1, 2**63 - 1, 2**70])
def test_h07_wide_right_window_hides_nothing(right):
    assert visible(8, 4, window=(-1, right)).all()


def test_h08_left_window_is_inclusive():
    # q = 0 and v one-hot: o counts the keys that each row sees.
    v = np.broadcast_to(np.eye(64), (4, 64, 64))
    o, lse = attention_reference(
        np.zeros((4, 64, 64)), np.zeros((4, 64, 64)), v, window=(16, 0), softmax_scale=1.0
    )
    seen = np.minimum(np.arange(64), 16) + 1
    np.testing.assert_array_equal((o > 0).sum(-1), np.broadcast_to(seen, (4, 64)))
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(seen), (4, 64)), rtol=1e-15)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e10])
@pytest.mark.parametrize("hide_by", ["mask", "bias"])
def test_h10_garbage_in_a_hidden_key(garbage, hide_by):
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4).swapaxes(1, 2)
    q, k, v = x.copy(), x.copy(), x.copy()
    k[0, 0, 1, 0] = garbage
    v[0, 0, 1, 2] = garbage
    mask = np.array([True, False])
    hide = {"mask": mask} if hide_by == "mask" else {"bias": np.where(mask, 0.0, -np.inf)}
    o, lse = attention_reference(q, k, v, **hide)
    np.testing.assert_array_equal(o, [[[[0, 1, 2, 3], [0, 1, 2, 3]]]])
    np.testing.assert_array_equal(lse, [[[7, 19]]])
    grads = attention_reference_grad(np.ones_like(q), q, k, v, **hide)
    assert all(np.isfinite(g).all() for g in grads[:3])
    assert np.all(grads.dk[..., 1, :] == 0)
    assert np.all(grads.dv[..., 1, :] == 0)


def test_garbage_past_seqlens_k_and_in_empty_rows_does_not_leak():
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 2, 1, 5, 4))
    clean = attention_reference(q, k, v, causal=True, seqlens_k=[2, 5])
    k[0, :, 2:], v[0, :, 2:], q[0, :, :3] = np.nan, np.inf, np.nan
    dirty = attention_reference(q, k, v, causal=True, seqlens_k=[2, 5])
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    grads = attention_reference_grad(np.ones_like(v), q, k, v, causal=True, seqlens_k=[2, 5])
    assert all(np.isfinite(g).all() for g in grads[:3])


def test_h17_scores_below_a_finite_minus_infinity():
    q = np.full((32, 1, 128), 64, ml_dtypes.bfloat16)
    o, lse = attention_reference(q, -q, np.ones_like(q))
    assert np.all(o == 1)
    np.testing.assert_allclose(lse, -524288 / math.sqrt(128), rtol=1e-15)
    # The same far below and a long row: nothing but the shift is seen.
    o, lse = attention_reference([[1.0]], np.full((1000, 1), -2.45e5), np.ones((1000, 1)))
    np.testing.assert_allclose(o, [[1.0]], rtol=1e-13)
    np.testing.assert_allclose(lse, [-2.45e5 + math.log(1000)], rtol=1e-15)


@pytest.mark.parametrize(("heads_q", "heads_k"), [(12, 2), (64, 8), (3, 1), (4, 4)])
def test_h22_query_head_h_reads_key_head_h_over_group(heads_q, heads_k):
    # v of key head n is the constant n, its only key scores n.
    head = np.arange(heads_k, dtype=float)[:, None, None]
    o, lse = attention_reference(np.ones((heads_q, 1, 1)), head, head)
    expected = np.repeat(np.arange(heads_k), heads_q // heads_k)
    np.testing.assert_array_equal(o[:, 0, 0], expected)
    np.testing.assert_array_equal(lse[:, 0], expected)


def test_h24_softcap_saturates():
    s = np.array([1000.0, 4400.0, 5000.0, 10000.0, -10000.0])
    for product, capped in zip(s, [50, 50, 50, 50, -50], strict=True):
        _, lse = attention_reference([[product]], [[1.0]], [[1.0]], softcap=50.0)
        assert lse[0] == pytest.approx(capped, abs=1e-12)
    grads = attention_reference_grad([[1.0]], [[1.0]], s[:, None], s[:, None], softcap=50.0)
    np.testing.assert_array_equal(grads.dq, [[0.0]])


def test_h37_band_as_mask_as_bias_and_as_window():
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 640, 4)).astype(np.float32)
    i, j = np.arange(640)[:, None], np.arange(640)
    band = (j <= i) & (j > i - 10)
    windowed = attention_reference(q, k, v, window=(9, 0))
    assert np.isfinite(windowed[0]).all()
    for options in ({"mask": band}, {"bias": np.where(band, np.float32(0), -np.inf)}):
        hidden = attention_reference(q, k, v, **options)
        np.testing.assert_array_equal(hidden[0], windowed[0])
        np.testing.assert_array_equal(hidden[1], windowed[1])


# ---- gradients


def finite_difference(f, x, step=1e-5):
    grad = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        grad[index] = (f(up) - f(down)) / (2 * step)
    return grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "window": (1, None)},
        {"window": (1, 1), "softcap": 1.5},
        {"softmax_scale": -0.7, "alibi_slopes": np.array([0.1, 0.2, 0.4, 0.8])},
        {"seqlens_k": np.array([3, 0]), "causal": True},
        {"mask": np.tri(3, 4, -1, dtype=bool)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("bias_shape", [(3, 4), (2, 1, 1, 4), (1, 4, 3, 1)])
def test_gradients_against_finite_differences(options, bias_shape):
    rng = np.random.default_rng(5)
    arrays = {
        "q": rng.standard_normal((2, 4, 3, 2)),
        "k": rng.standard_normal((1, 2, 4, 2)),  # broadcast over the batch
        "v": rng.standard_normal((2, 4, 3)),  # no batch axis at all
        "bias": rng.standard_normal(bias_shape),
    }
    dout = rng.standard_normal((2, 4, 3, 3))

    def loss(**changed):
        return np.sum(dout * attention_reference(**{**arrays, **changed}, **options)[0])

    grads = attention_reference_grad(dout, **arrays, **options)
    for name, array in arrays.items():
        expected = finite_difference(lambda x, name=name: loss(**{name: x}), array)
        got = getattr(grads, f"d{name}")
        assert got.shape == array.shape
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8, err_msg=name)


def test_gradient_of_a_bias_of_minus_infinity_is_zero():
    rng = np.random.default_rng(6)
    q, k, v, dout = rng.standard_normal((4, 3, 3))
    bias = np.where(np.tri(3, dtype=bool), 0.5, -np.inf)
    bias[0] = -np.inf
    grads = attention_reference_grad(dout, q, k, v, bias=bias)
    assert np.all(grads.dbias[bias == -np.inf] == 0)
    assert np.all(grads.dq[0] == 0)
    np.testing.assert_allclose(grads.dbias.sum(-1), 0, atol=1e-14)  # a row's shift changes nothing


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(-1, 10),
    st.integers(-1, 10),
    st.integers(0, 9),
)
def test_visible_matches_its_rule_pair_by_pair(seqlen_q, seqlen_k, left, right, length):
    length = min(length, seqlen_k)
    got = visible(seqlen_q, seqlen_k, window=(left, right), seqlens_k=length)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            diagonal = i + length - seqlen_q
            rule = (left == -1 or diagonal - left <= j) and (right == -1 or j <= diagonal + right)
            assert got[i, j] == (rule and j < length)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u4", "u8"])
def test_lengths_of_any_integer_dtype(dtype):
    q, k, v = np.random.default_rng(3).standard_normal((3, 1, 2, 130, 8))
    lengths = np.array([7], dtype)
    options = {"alibi_slopes": [0.1, 2.0], "causal": True}
    for actual, expected in zip(
        attention_reference(q, k, v, seqlens_k=lengths, **options),
        attention_reference(q, k, v, seqlens_k=7, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)
