# SPDX-License-Identifier: MIT
"""Kinds of failure that other attention implementations had, on the numpy path."""

import math

import numpy as np
import pytest
from host_calls import assert_same_bits, attend, normal, qkv, tiling

from cupyflash import _checks
from cupyflash.reference import attention_reference
from cupyflash.testing import assert_attention_close

pytestmark = pytest.mark.filterwarnings("error")


def test_a_row_that_the_mask_hides_wholly():
    q, k, v = qkv(50, 1, 2, 6, 8, seqlen_k=10)
    mask = np.tril(np.ones((6, 10), np.bool_))
    mask[5] = False
    actual = attend(q, k, v, mask=mask, softmax_scale=0.125)
    assert_attention_close(actual, attention_reference(q, k, v, mask=mask, softmax_scale=0.125))
    assert (actual[0][..., 5, :] == 0).all()
    assert np.isneginf(actual[1][..., 5]).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 100), (2048, 1024)])
def test_causal_with_more_queries_than_keys(seqlen_q, seqlen_k):
    q, k, v = qkv(51, 2, seqlen_q, 64, seqlen_k=seqlen_k, dtype=np.float16)
    out = np.full_like(q, math.nan)
    o, lse = attend(q, k, v, causal=True, out=out)
    empty = seqlen_q - seqlen_k
    assert (o[:, :empty] == 0).all()
    assert np.isneginf(lse[:, :empty]).all()
    assert (o[:, empty] == v[:, 0]).all()
    assert_attention_close((o, lse), attention_reference(q, k, v, causal=True))


@pytest.mark.parametrize("right", [7, 2**31 - 1])
def test_a_wide_right_window_hides_nothing(right):
    q, k, v = qkv(52, 1, 8, 4, seqlen_k=4)
    assert_same_bits(attend(q, k, v, window=(-1, right)), attend(q, k, v))


def test_a_left_window_counts_its_end():
    v = np.eye(64, dtype=np.float32)
    o, lse = attend(np.zeros((64, 8), np.float32), np.ones((64, 8), np.float32), v, window=(16, 0))
    counts = np.minimum(np.arange(64), 16) + 1
    assert ((o > 0).sum(axis=1) == counts).all()
    np.testing.assert_allclose(lse, np.log(counts), rtol=1e-6)


def test_top_left_and_bottom_right_alignment():
    q, v = np.zeros((4, 4), np.float32), np.eye(6, dtype=np.float32)
    k = np.zeros((6, 4), np.float32)
    for causal, first in ((True, 3), ("top_left", 1)):
        o, _ = attend(q, k, v, causal=causal)
        assert ((o > 0).sum(axis=1) == np.arange(first, first + 4)).all()


def test_scores_below_any_finite_minus_infinity():
    q = np.full((32, 1, 128), 64, _checks.bfloat16)
    o, lse = attend(q, -q[:1], np.ones_like(q[:1]))
    assert (o == 1).all()
    np.testing.assert_allclose(lse, -524288 / math.sqrt(128), rtol=1e-6)


def test_low_scores_after_a_hidden_tile(monkeypatch):
    q, k, v = qkv(53, 2, 88, 64, seqlen_k=448)
    q[..., 0], k[..., 0] = 40, -40
    band = np.tril(np.ones((88, 448), np.bool_), 360) & ~np.tril(np.ones((88, 448), np.bool_), 200)
    with tiling(monkeypatch, rows=16, keys=64):
        actual = attend(q, k, v, mask=band)
    expected = attention_reference(q, k, v, mask=band)
    assert_attention_close(actual, expected, max_score=300)


@pytest.mark.parametrize("score", [1000, 4400, 5000, 10000, -10000])
def test_softcap_of_large_scores(score):
    one = np.ones((1, 1), np.float32)
    _, lse = attend(one * score, one, one, softmax_scale=1.0, softcap=50.0)
    assert lse.item() == math.copysign(50, score)


def test_lse_is_natural():
    x = np.zeros((1600, 8), np.float32)
    _, lse = attend(x, x, x)
    np.testing.assert_allclose(lse, math.log(1600), rtol=1e-6)


@pytest.mark.parametrize(("heads_q", "heads_k"), [(12, 2), (64, 8), (3, 1)])
def test_query_heads_read_key_heads_in_blocks(heads_q, heads_k):
    q, k, v = qkv(54, heads_q, 1, 16, seqlen_k=300, heads_k=heads_k)
    group = heads_q // heads_k
    repeated = attend(q, k.repeat(group, axis=0), v.repeat(group, axis=0))
    assert_same_bits(attend(q, k, v), repeated)


def test_a_hidden_key_of_nan():
    q = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    k, v = q.reshape(1, 1, 2, 4).copy(), q.reshape(1, 1, 2, 4).copy()
    k[..., 1, 0], v[..., 1, 0] = math.nan, math.inf
    o, lse = attend(q, k, v, mask=np.array([True, False]))
    assert (o == [0, 1, 2, 3]).all()
    np.testing.assert_allclose(lse[0, :, 0], [7, 19], rtol=1e-6)


def test_bias_after_softcap_and_alibi_at_the_bottom_right():
    q, k, v = qkv(55, 2, 5, 8, seqlen_k=9)
    options = {"softcap": 0.5, "bias": normal(56, 5, 9) * 3, "alibi_slopes": [0.25, 2.0]}
    actual = attend(q, k, v, **options)
    s = 0.5 * np.tanh(q @ k.swapaxes(1, 2) / math.sqrt(8) / 0.5) + options["bias"]
    distance = np.abs(np.arange(5)[:, None] + 9 - 5 - np.arange(9))
    s = s - np.array([0.25, 2.0])[:, None, None] * distance
    p = np.exp(s)
    np.testing.assert_allclose(actual[1], np.log(p.sum(-1)), rtol=1e-5)
    np.testing.assert_allclose(actual[0], p / p.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-6)


def test_a_band_as_mask_as_bias_and_as_window():
    q, k, v = qkv(57, 1, 640, 4)
    i, j = np.ogrid[:640, :640]
    band = (j <= i) & (j > i - 10)
    expected = attention_reference(q, k, v, mask=band)
    bias = np.where(band, np.float32(0), np.float32(-np.inf))
    for options in ({"mask": band}, {"bias": bias}, {"window": (9, 0)}):
        assert_attention_close(attend(q, k, v, **options), expected)


def test_scores_of_1e30_stay_finite():
    q, k, v = qkv(58, 2, 20, 16)
    scale = 1e15
    o, lse = attend(q * np.float32(1e8), k * np.float32(1e7), v, softmax_scale=scale)
    expected = attention_reference(q * np.float32(1e8), k * np.float32(1e7), v, softmax_scale=scale)
    assert np.isfinite(o).all()
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)
