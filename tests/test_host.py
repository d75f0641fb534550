# SPDX-License-Identifier: MIT
"""The numpy path: the oracle's answers, bits that depend on one head only, outputs."""

import math

import numpy as np
import pytest
from host_calls import attend, tiling
from hypothesis import given, settings
from paths import assert_same_bits, normal, qkv

from cupyflash import _dtypes
from cupyflash.reference import attention_reference
from cupyflash.testing import (
    DTYPES,
    LAYOUTS,
    Problem,
    arrange,
    assert_attention_close,
    attention_problems,
    error,
    guarded_empty,
    poison,
    tile_edges,
)

pytestmark = pytest.mark.filterwarnings("error")


# --- Against the oracle ------------------------------------------------------------------------


@settings(max_examples=150)
@given(problem=attention_problems(max_options=6))
def test_agrees_with_the_oracle(problem):
    assert_attention_close(attend(*problem.qkv, **problem.kwargs), problem)


@settings(max_examples=150)
@given(problem=attention_problems(lengths=tile_edges(8, 16), max_options=6))
def test_agrees_with_the_oracle_across_tiles_and_threads(problem):
    with tiling(pytest.MonkeyPatch(), threads=3):
        assert_attention_close(attend(*problem.qkv, **problem.kwargs), problem)


@settings(max_examples=20)
@given(
    problem=attention_problems(
        lengths=(1, 255, 256, 257, 511, 513, 700), head_dims=(1, 64, 80), max_scores=2**19
    )
)
def test_agrees_with_the_oracle_at_the_edges_of_real_tiles(problem):
    assert_attention_close(attend(*problem.qkv, **problem.kwargs), problem)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_long_rows_keep_full_precision(dtype, bound):
    q, k, v = qkv(1, 1, 4, 64, seqlen_k=50_000, dtype=dtype)
    v += 1  # a mean that is not 0: every error of the sums shows
    o, lse = attend(q, k, v)
    expected_o, expected_lse = attention_reference(q, k, v)
    assert error(o, expected_o) < bound
    assert np.abs(lse - expected_lse).max() < bound * np.abs(expected_lse).max()


@pytest.mark.parametrize("head_dim", [1, 300, 5000])
def test_any_head_dim(head_dim):
    q, k, v = qkv(2, 2, 9, head_dim, seqlen_k=70)
    assert_attention_close(attend(q, k, v[..., :3]), attention_reference(q, k, v[..., :3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_scale_and_softcap_of_any_size(dtype):
    dtype = _dtypes.named(dtype)
    q, k, v = qkv(3, 1, 4, 8, dtype=dtype)
    for options in (
        {"softmax_scale": 1e-35},
        {"softmax_scale": -0.5},
        {"softcap": 1e-37},
        {"softcap": 1e-9},
        {"softcap": 3e38},
        {"softcap": 1e33},
    ):
        actual = attend(q, k, v, **options)
        expected = attention_reference(q, k, v, **options)
        assert np.isfinite(actual[0].astype(np.float64)).all()
        assert error(actual[1], expected[1]) < 1e-6
        assert_attention_close(actual, expected)


def test_low_scores_after_a_hidden_tile(monkeypatch):
    q, k, v = qkv(53, 2, 88, 64, seqlen_k=448)
    q[..., 0], k[..., 0] = 40, -40
    band = np.tril(np.ones((88, 448), np.bool_), 360) & ~np.tril(np.ones((88, 448), np.bool_), 200)
    with tiling(monkeypatch, rows=16, keys=64):
        actual = attend(q, k, v, mask=band)
    expected = attention_reference(q, k, v, mask=band)
    assert_attention_close(actual, expected, max_score=300)


@pytest.mark.parametrize(
    ("dtype", "softmax_scale", "q_size", "k_size"),
    [
        ("float32", 1e38, 1e3, 1e-40),
        ("float32", 3e38, 1e-19, 1e-19),
        ("float64", 1.7e308, 1, 1e-308),
    ],
)
def test_a_scale_under_which_q_alone_would_overflow(dtype, softmax_scale, q_size, k_size):
    q, k, v = (normal((47, n), 1, 20, 8, dtype=dtype) for n in range(3))
    q, k = q * q.dtype.type(q_size), k * k.dtype.type(k_size)
    k[0, 3] = 0
    problem = Problem(q, k, v, {"softmax_scale": softmax_scale})
    assert_attention_close(attend(q, k, v, **problem.kwargs), problem)


# --- Bits that depend on one head only ---------------------------------------------------------


@pytest.mark.parametrize(("dtype", "large"), [("float32", 1e37), ("float64", 1e307)])
@pytest.mark.parametrize("score", [0, 1, 14, 15, 80, -80])
@pytest.mark.parametrize("keys", [1, 3, 100])
def test_values_at_the_end_of_their_range(dtype, large, score, keys):
    """Weights above 1, which m at 0 allows, must not make a result overflow that is in range."""
    q, k = (np.full((1, n, 1), x, dtype) for n, x in ((2, score), (keys, 1)))
    v = np.full((1, keys, 2), large / keys, dtype)
    v[..., 1] *= -1
    v[0, 0] *= keys / 2
    options = {"softmax_scale": 1.0}
    assert_attention_close(attend(q, k, v, **options), Problem(q, k, v, options))


def test_values_too_large_for_the_weights_of_one_row_alone():
    q = np.array([[[14.0], [0.0], [-3.0], [14.5]]], np.float32)
    k = np.linspace(-1, 1, 700, dtype=np.float32).reshape(1, 700, 1)
    v = np.where(np.arange(700) % 2, 1e34, -0.9e34).astype(np.float32).reshape(1, 700, 1)
    options = {"softmax_scale": 1.0}
    assert_attention_close(attend(q, k, v, **options), Problem(q, k, v, options))


def test_batch_entries_and_heads_are_independent():
    q, k, v = qkv(4, 3, 8, 150, 64, seqlen_k=1100, heads_k=2)
    lengths = [1100, 0, 517]
    bias = normal(5, 8, 150, 1100)
    together = attend(q, k, v, bias=bias, seqlens_k=lengths, window=(300, 40))
    for b in range(3):
        for h in range(8):
            alone = attend(
                q[b, h],
                k[b, h // 4],
                v[b, h // 4],
                bias=bias[h],
                seqlens_k=lengths[b],
                window=(300, 40),
            )
            assert_same_bits([x[b, h] for x in together], alone)


@pytest.mark.parametrize("seqlen_q", [1, 2, 40])
def test_heads_that_share_a_call_of_numpy_are_independent(seqlen_q):
    q, k, v = qkv(6, 12, seqlen_q, 33, seqlen_k=75, heads_k=4)
    together = attend(q, k, v, causal=True)
    for h in range(12):
        alone = attend(q[h], k[h // 3], v[h // 3], causal=True)
        assert_same_bits([x[h] for x in together], alone)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_threads_change_nothing(monkeypatch, dtype):
    q, k, v = qkv(7, 2, 4, 70, 24, heads_k=2, dtype=dtype)
    mask = np.random.default_rng(8).random((70, 70)) < 0.5
    results = []
    for threads in (1, 2, 5):
        with tiling(monkeypatch, threads=threads):
            results.append(attend(q, k, v, mask=mask, window=(30, 9)))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_future_keys_change_no_earlier_row():
    q, k, v = qkv(9, 2, 700, 64)
    before = attend(q, k, v, causal=True)
    k[:, 300:], v[:, 300:] = 100, math.inf
    after = attend(q, k, v, causal=True)
    # Rows of the tile on the diagonal meet the infinities of v as 0 * inf, like numpy's.
    assert_same_bits([x[:, :256] for x in after], [x[:, :256] for x in before])
    v[:, 300:] = -7
    after = attend(q, k, v, causal=True)
    assert_same_bits([x[:, :300] for x in after], [x[:, :300] for x in before])


def test_scores_that_rise_from_tile_to_tile(monkeypatch):
    q, k, v = qkv(59, 2, 64, 8, seqlen_k=200)
    q[..., 0], k[..., 0] = 1, np.arange(200)  # up to 200 nats, 16 more in every tile
    q[:, 7, 0] = -1  # one row falls instead
    with tiling(monkeypatch, rows=32, keys=16):
        actual = attend(q, k, v, softmax_scale=1.0)
        assert_attention_close(
            actual, attention_reference(q, k, v, softmax_scale=1.0), max_score=210
        )
        before = attend(q, k, v, causal="top_left", softmax_scale=1.0)
        k[:, 50:, 0] = 1e6
        after = attend(q, k, v, causal="top_left", softmax_scale=1.0)
    # Rows of the block in which others had to move m.
    assert_same_bits([x[:, :50] for x in after], [x[:, :50] for x in before])
    assert (after[1][:, 50:] > 1e5).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [1, 20])
@pytest.mark.parametrize("seqlen_q", [1, 37])
def test_strides_change_nothing(layout, head_dim, seqlen_q):
    q, k, v = qkv(10, 2, 3, seqlen_q, head_dim, seqlen_k=50)
    for n in range(3):
        arrays = [q, k, v]
        arrays[n] = arrange(arrays[n], layout)
        contiguous = [np.array(x, order="C") for x in arrays]
        assert_same_bits(attend(*arrays), attend(*contiguous))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_slots_that_no_query_sees_changes_nothing(dtype, garbage):
    q, k, v = qkv(11, 2, 4, 5, 16, seqlen_k=600, heads_k=2, dtype=dtype)
    bias = normal(12, 600)
    bias[[5, 590]] = -math.inf
    mask = np.random.default_rng(13).random((4, 5, 600)) < 0.5
    mask[:2, :, 40:70] = False  # both heads of key head 0
    mask[2, :, 80:90] = False  # one of the two heads that share key head 1
    hides = {
        "seqlens_k": ({"seqlens_k": [600, 100]}, (1, slice(None), slice(100, None))),
        "window": ({"window": (3, 2)}, (slice(None), slice(None), slice(0, 592))),
        "causal": ({"causal": "top_left"}, (slice(None), slice(None), slice(5, None))),
        "mask": ({"mask": mask}, (slice(None), 0, slice(40, 70))),
        "bias": ({"bias": bias}, (slice(None), slice(None), [5, 590])),
    }
    for name, (options, slots) in hides.items():
        k2, v2 = k.copy(), v.copy()
        k2[slots] = v2[slots] = garbage
        actual, expected = attend(q, k2, v2, **options), attend(q, k, v, **options)
        assert np.isfinite(expected[0].astype(np.float32)).all(), name
        assert_same_bits(actual, expected)
    # Head 2 does not see these keys, its neighbour head 3 on the same key head does.
    k2, v2 = k.copy(), v.copy()
    k2[:, 1, 80:90] = v2[:, 1, 80:90] = garbage
    poisoned, clean = attend(q, k2, v2, mask=mask), attend(q, k, v, mask=mask)
    assert_same_bits([x[:, 2] for x in poisoned], [x[:, 2] for x in clean])
    assert np.isnan(poisoned[0][:, 3].astype(np.float32)).any()


def test_nan_in_a_slot_that_is_seen_shows():
    q, k, v = qkv(14, 1, 6, 4)
    v[0, 3, 1] = math.nan
    o, lse = attend(q, k, v)
    assert np.isnan(o[..., 1]).all()
    assert np.isfinite(o[..., [0, 2, 3]]).all()
    k[0, 2, 0] = math.inf
    o, lse = attend(q, k, v)
    assert np.isnan(o[lse != lse]).all()
    assert np.isnan(lse).any()


def test_two_calls_give_equal_bits_and_touch_no_input():
    arrays = qkv(15, 4, 300, 64)
    copies = [x.copy() for x in arrays]
    assert_same_bits(attend(*arrays, causal=True), attend(*arrays, causal=True))
    for array, copy in zip(arrays, copies, strict=True):
        assert array.tobytes() == copy.tobytes()


@pytest.mark.parametrize(("heads_q", "heads_k"), [(12, 2), (64, 8), (3, 1)])
def test_query_heads_read_key_heads_in_blocks(heads_q, heads_k):
    q, k, v = qkv(54, heads_q, 1, 16, seqlen_k=300, heads_k=heads_k)
    group = heads_q // heads_k
    repeated = attend(q, k.repeat(group, axis=0), v.repeat(group, axis=0))
    assert_same_bits(attend(q, k, v), repeated)


# --- Outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_every_element_of_out_and_nothing_else(dtype):
    dtype = _dtypes.named(dtype)
    q, k, v = qkv(16, 2, 3, 70, 16, seqlen_k=20, dtype=dtype)  # causal: rows 0-49 see nothing
    expected = attend(q, k, v, causal=True)
    guarded = guarded_empty((2, 3, 70, 16), dtype)
    result = attend(q, k, v, causal=True, out=guarded.array)
    assert result[0] is guarded.array
    assert_same_bits(result, expected)
    guarded.check()
    wide = np.empty((3, 70, 2, 40), dtype)
    poison(wide)
    before = wide.copy()
    view = wide.transpose(2, 0, 1, 3)[..., 33:1:-2]
    attend(q, k, v, causal=True, out=view)
    assert view.tobytes() == expected[0].tobytes()
    wide[..., 33:1:-2] = before[..., 33:1:-2]
    assert wide.tobytes() == before.tobytes()


def test_dtypes_and_shapes_of_results():
    for name in DTYPES:
        dtype = _dtypes.named(name)
        x = normal(17, 5, 4, dtype=dtype)
        o, lse = attend(x, x, x[:, :3])
        assert (o.dtype, o.shape, lse.shape) == (dtype, (5, 3), (5,))
        assert lse.dtype == (np.float64 if name == "float64" else np.float32)


@pytest.mark.parametrize("zero", ["batch", "heads", "seqlen_q", "seqlen_k", "head_dim_v", "none"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_axes_of_length_zero(zero, dtype):
    size = {"batch": 2, "heads": 3, "seqlen_q": 4, "seqlen_k": 5, "head_dim_v": 6}
    size[zero] = 0
    q = np.ones((size["batch"], size["heads"], size["seqlen_q"], 8), dtype)
    k = np.ones((size["batch"], size["heads"], size["seqlen_k"], 8), dtype)
    v = np.ones((size["batch"], size["heads"], size["seqlen_k"], size["head_dim_v"]), dtype)
    mask = np.ones((size["seqlen_q"], size["seqlen_k"]), np.bool_)
    for options in ({}, {"causal": True}, {"mask": mask, "seqlens_k": size["seqlen_k"]}):
        o, lse = attend(q, k, v, **options)
        assert o.shape == (*q.shape[:-1], size["head_dim_v"])
        assert lse.shape == q.shape[:-1]
        assert (o == (0 if zero == "seqlen_k" else 1)).all()
        assert (np.isneginf(lse) if zero == "seqlen_k" else np.isfinite(lse)).all()


def test_out_may_be_a_matrix():
    q, k, v = (x[0] for x in qkv(46, 1, 9, 4))
    buffer = poison(np.empty_like(q))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(buffer, copy=False)
    o, _ = attend(q, k, v, out=matrix)
    assert o is matrix
    np.testing.assert_array_equal(buffer, attend(q, k, v)[0])
