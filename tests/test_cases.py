# SPDX-License-Identifier: MIT
"""Public failures of other attention kernels, each with its right value, on every path.

The number before a title is that of the case among the ones collected for this project; the thread
where the failure was seen stands beside it.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from paths import assert_same_bits, every_path, normal, qkv

from cupyflash import attention
from cupyflash.testing import Problem, assert_attention_close, copy_with_layout, poison

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)


def check(path, q, k, v, **options):
    """Run the path, hold it to the oracle, and return (o, lse)."""
    actual = path(q, k, v, **options)
    assert_attention_close(actual, Problem(q, k, v, options))
    return actual


def assert_empty(o, lse):
    assert (o == 0).all()
    assert np.isneginf(lse).all()


# ---- rows that see no key ------------------------------------------------------------------------


@every_path
def test_h01_a_row_that_the_mask_hides_wholly(path):
    """pytorch/pytorch#103749: NaN there."""
    q, k, v = qkv(1, 1, 2, 6, 8, seqlen_k=10)
    mask = np.tril(np.ones((1, 1, 6, 10), bool))
    mask[..., 5, :] = False
    o, lse = check(path, q, k, v, softmax_scale=0.125, mask=mask)
    assert_empty(o[..., 5, :], lse[..., 5])
    assert np.isfinite(lse[..., :5]).all()


@every_path
@pytest.mark.parametrize("seqlen_q", [76, 34, 146])
def test_h02_many_causal_queries_of_one_key(path, seqlen_q):
    """Dao-AILab/flash-attention#443: NaN. Only the last query sees the key."""
    q, k, v = (3 * x for x in qkv(2, 1, seqlen_q, 32, seqlen_k=1, dtype=F16))
    o, lse = path(q, k, v, causal=True)
    assert_empty(o[:, :-1], lse[:, :-1])
    assert (o[:, -1] == v[:, 0]).all()
    assert np.isfinite(lse[:, -1]).all()


@every_path
def test_h03_lse_of_empty_rows_is_minus_infinity(path):
    """flashinfer-ai/flashinfer#4452: about -5e4."""
    heads = path.size(32, 3)
    q, k, v = (
        np.zeros((heads, 34, 64), BF16),
        normal(3, heads, 1, 64, dtype=BF16),
        np.ones((heads, 1, 64), BF16),
    )
    o, lse = path(q, k, v, causal=True)
    assert_empty(o[:, :-1], lse[:, :-1])
    assert (o[:, -1] == 1).all()
    assert (lse[:, -1] == 0).all()


@every_path
def test_h04_an_entry_without_keys_beside_others(path):
    """Dao-AILab/flash-attention#1537: a shape error where the longest query is 1."""
    q, k, v = qkv(4, 3, 9, 1, 64, seqlen_k=5, heads_k=3, dtype=BF16)
    options = {"softmax_scale": 1.0, "causal": True}
    together = check(path, q, k, v, seqlens_k=np.array([3, 0, 5]), **options)
    assert_empty(together[0][1], together[1][1])
    for entry, length in ((0, 3), (2, 5)):
        alone = path(q[entry], k[entry, :, :length], v[entry, :, :length], **options)
        assert_attention_close(alone, tuple(x[entry].astype(float) for x in together))


@every_path
def test_h05_no_queries_but_keys_and_no_keys_but_queries(path):
    """Dao-AILab/flash-attention#2562: an illegal address."""
    q, k, v = qkv(5, 4, 8, 256, heads_k=1, dtype=BF16)
    o, lse = path(q[:, :0], k, v, causal=True)
    assert (o.shape, lse.shape) == ((4, 0, 256), (4, 0))
    assert_empty(*path(q, k[:, :0], v[:, :0], causal=True))


@every_path
@pytest.mark.parametrize(("full", "reduced"), [((300, 100), (75, 25)), ((2048, 1024), (80, 40))])
def test_h06_causal_with_more_queries_than_keys(path, full, reduced):
    """pytorch/pytorch PR 193632, flash-attention#1778: a mask that went missing, rows unwritten."""
    seqlen_q, seqlen_k = (path.size(f, r) for f, r in zip(full, reduced, strict=True))
    q, k, v = qkv(6, 2, seqlen_q, 64, seqlen_k=seqlen_k, dtype=F16)
    tiles = path.small_tiles(64, 16)
    o, lse = path(q, k, v, causal=True, kernel=tiles)
    empty = seqlen_q - seqlen_k
    assert_empty(o[:, :empty], lse[:, :empty])
    assert (o[:, empty] == v[:, 0]).all()
    assert_attention_close((o, lse), Problem(q, k, v, {"causal": True}))


# ---- windows and alignment -----------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("right", [7, 2**31 - 1, 2**63])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_h07_a_wide_right_window_hides_nothing(path, right, dtype):
    """Dao-AILab/flash-attention#895: early rows lost keys."""
    q, k, v = qkv(7, 1, 8, 16, seqlen_k=4, dtype=dtype)
    assert_same_bits(path(q, k, v, window=(-1, right)), path(q, k, v))


@every_path
def test_h08_both_ends_of_a_window_count(path):
    """NVIDIA/TransformerEngine#1197: the left end was shorter by one."""
    zero, v = np.zeros((4, 64, 64), F16), np.broadcast_to(np.eye(64, dtype=F16), (4, 64, 64))
    i = np.arange(64)
    for window, seen in (
        ((16, 0), np.minimum(i, 16) + 1),
        ((0, 5), np.minimum(63 - i, 5) + 1),
        ((3, 2), np.minimum(i, 3) + np.minimum(63 - i, 2) + 1),
        ((0, 0), np.ones(64)),
    ):
        o, lse = path(zero, zero, v, softmax_scale=1.0, window=window)
        assert ((o > 0).sum(axis=-1) == seen).all()
        np.testing.assert_allclose(
            lse, np.broadcast_to(np.log(seen), lse.shape), rtol=1e-6, atol=1e-7
        )


@every_path
def test_top_left_and_bottom_right(path):
    """The two alignments, of causal, window and ALiBi alike."""
    zero, v = np.zeros((1, 6, 8), F32), np.eye(6, dtype=F32)[None]
    for causal, first in ((True, 3), ("top_left", 1)):
        o, _ = path(zero[:, :4], zero, v, causal=causal)
        assert ((o > 0).sum(axis=-1) == np.arange(first, first + 4)).all()
        o, _ = path(zero[:, :4], zero, v, causal=causal, window=(1, 0))
        assert (o[0].argmax(axis=-1) == np.maximum(np.arange(4) + first - 2, 0)).all()
        _, lse = path(zero[:, :4], zero, v, causal=causal, alibi_slopes=[50.0])
        np.testing.assert_allclose(lse, 0, atol=1e-6)  # each query's own diagonal is at distance 0


# ---- garbage in unused slots ---------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_h09_garbage_past_the_used_length_of_a_cache(path, garbage):
    """Dao-AILab/flash-attention#2374, #1745: 0 * NaN in P V."""
    q, k, v = qkv(9, 4, path.size(8, 2), 1, 64, seqlen_k=128, dtype=BF16)
    lengths = np.array([32, 64, 96, 48])
    unused = np.arange(128) >= lengths[:, None]
    results = []
    for value in (0, garbage):
        for x in (k, v):
            x[np.broadcast_to(unused[:, None], x.shape[:-1])] = value
        results.append(path(q, k, v, seqlens_k=lengths))
    assert_same_bits(results[1], results[0])

    q, k, v = np.full((2, 1, 3, 16), 0.5, F16), *qkv(10, 2, 1, 3, 16, dtype=F16)[1:]
    clean = path(q, k, v, seqlens_k=np.array([1, 3]))
    k[0, :, 1:] = v[0, :, 1:] = garbage
    assert_same_bits(path(q, k, v, seqlens_k=np.array([1, 3])), clean)


@every_path
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e10])
def test_h10_garbage_in_a_key_that_the_mask_hides(path, garbage):
    """pytorch/pytorch#101967: NaN out."""
    q = np.arange(8, dtype=F32).reshape(1, 2, 1, 4).swapaxes(1, 2).copy()
    k, v = q.copy(), q.copy()
    k[..., 1, 0] = v[..., 1, :] = garbage
    o, lse = path(q, k, v, mask=np.array([True, False]))
    assert (o == [0, 1, 2, 3]).all()
    np.testing.assert_allclose(lse[0, 0], [7, 19], rtol=1e-6)


# ---- strides, views, many entries ----------------------------------------------------------------


@every_path
def test_h11_one_key_for_each_of_many_entries(path):
    """Dao-AILab/flash-attention PR 2260: offsets multiplied in 32 bits."""
    batch = {"host": 2000, "gpu": 15000, "hostcuda": 8}[path.place]
    q, k, v = (normal(n, batch, path.size(16, 3), 1, 128, dtype=BF16) for n in (11, 12, 13))
    o, _ = path(q, k, v)
    assert (o == v).all()


@every_path
def test_h14_only_v_is_a_transposed_view(path):
    """ROCm/pytorch#3230: an error of 2 to 3."""
    heads = path.size(16, 3)
    q, k, _ = qkv(14, 1, heads, 62, 128, dtype=BF16)
    v = normal(15, 1, 62, heads * 128, dtype=BF16).reshape(1, 62, heads, 128).swapaxes(1, 2)
    assert_same_bits(path(q, k, v), path(q, k, np.ascontiguousarray(v)))


@every_path
@pytest.mark.parametrize("dtype", [F16, F32])
def test_h15_views_are_not_their_buffers(path, dtype):
    """cupy/cupy#3095, #7267, #9233: data read as if it were contiguous."""
    base = normal(16, 2, 3, 30, 57, dtype=dtype)
    row = normal(17, 2, 3, 1, 40, dtype=dtype)
    views = {
        "one row for all keys": np.broadcast_to(row, (2, 3, 30, 40)),
        "columns of a wider array": base[..., :40],
        "columns from an odd one on": base[..., 3:43],
        "keys backwards": base[:, :, ::-1, :40],
        "columns backwards": base[..., 56:16:-1],
        "heads after keys": normal(18, 2, 30, 3, 40, dtype=dtype).transpose(0, 2, 1, 3),
        "heads backwards": base[:, ::-1, :, :40],
    }
    plain = np.ascontiguousarray(base[..., 5:45])
    for view in views.values():
        copy = np.ascontiguousarray(view)
        assert_same_bits(path(view, plain, plain), path(copy, plain, plain))
        assert_same_bits(path(plain, view, view), path(plain, copy, copy))


@every_path
def test_h28_an_output_of_either_layout(path):
    """flagos-ai/FlagGems#5235: writes past the end, rows unwritten."""
    heads = path.size(8, 4)
    q, k, v = qkv(28, 1, heads, 5, 64, seqlen_k=path.size(4096, 100), heads_k=2, dtype=F16)
    expected = path(q, k, v)
    buffer = poison(np.empty((1, 5, heads + 1, 64), F16))
    view = buffer[:, :, :heads].swapaxes(1, 2)
    o, lse = path(q, k, v, out=view)
    assert o is view
    assert_same_bits((np.ascontiguousarray(view), lse), expected)
    assert np.isnan(buffer[:, :, heads]).all()


@pytest.mark.gpu
@pytest.mark.slow
def test_h12_a_cache_whose_entries_lie_2_to_the_30_elements_apart(cupy):
    """Dao-AILab/flash-attention#772: entry 4 wrapped to entry 0."""
    stride = 2**30
    buffer = cupy.zeros(4 * stride + 2**20, np.float16)
    rows = normal(12, 5, 32, 8, 128, dtype=F16)
    view = cupy.lib.stride_tricks.as_strided(
        buffer, (5, 32, 8, 128), tuple(2 * s for s in (stride, 8 * 128, 128, 1))
    )
    view[...] = cupy.asarray(rows)
    q = cupy.asarray(normal(13, 5, 32, 3, 128, dtype=F16))
    packed = cupy.asarray(rows)
    assert (attention(q, view, view) == attention(q, packed, packed)).all()


# ---- tails of tiles, extreme scores --------------------------------------------------------------


@every_path
@pytest.mark.parametrize("seqlen", [1025, 257])
def test_h16_a_distance_added_to_scores_at_the_tail_of_a_tile(path, seqlen):
    """pytorch/pytorch#153799: NaN past multiples of 128. Slope -1 adds i - j below the diagonal."""
    seqlen = path.size(seqlen, seqlen // 8 + 1)
    q, k, v = qkv(16, 1, seqlen, 64, dtype=BF16)
    check(path, q, k, v, causal=True, alibi_slopes=[-1.0])


@every_path
def test_h17_valid_scores_below_any_finite_minus_infinity(path):
    """flashinfer-ai/flashinfer#4451, #4267: o = 0."""
    q = np.full((32, 1, 128), 64, BF16)
    o, lse = path(q, -q[:1], np.ones_like(q[:1]))
    assert (o == 1).all()
    np.testing.assert_allclose(lse, -524288 / math.sqrt(128), rtol=1e-6)
    # A row of many keys, all near -2.45e5.
    v = normal(17, 1, 200, 128)
    o, lse = path(
        np.full((1, 1, 128), 43.75, F32), np.full((1, 200, 128), -43.75, F32), v, softmax_scale=1.0
    )
    np.testing.assert_allclose(o[0, 0], v[0].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(lse, -245000 + math.log(200), rtol=1e-6)


@every_path
@pytest.mark.parametrize("sign", [-1, 1])
def test_h18_scores_far_from_0_after_a_tile_that_is_hidden(path, sign):
    """Dao-AILab/flash-attention#2082: o about 0, the running maximum having started at 0."""
    heads, heads_k, dim = path.size(14, 2), path.size(2, 1), path.size(128, 16)
    seqlen_q, seqlen_k = path.size(88, 22), path.size(448, 112)
    q, k, v = (
        0.1 * x for x in qkv(18, 1, heads, seqlen_q, dim, seqlen_k=seqlen_k, heads_k=heads_k)
    )
    q[..., 0], k[..., 0] = 14.0, 14.0 * sign * math.sqrt(dim)
    q, k, v = (x.astype(BF16) for x in (q, k, v))
    tiles = path.small_tiles(dim, 16)
    for options in ({"causal": True}, {"window": (seqlen_q, 0)}):
        actual = path(q, k, v, kernel=tiles, **options)
        assert_attention_close(actual, Problem(q, k, v, options))
        assert (np.abs(actual[1] - sign * 196) < 30).all()


@every_path
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_h19_very_low_lse_and_a_ragged_tile(path, dtype):
    """pytorch/pytorch#196678: a padded score of 0 beside an lse of -120."""
    seqlen = path.size(704, 192)
    q, k = (0.1 * x for x in qkv(19, 1, seqlen, 64)[:2])
    q[..., 0], k[..., 0] = 1, -960
    q, k, v = (x.astype(dtype) for x in (q, k, normal(20, 1, seqlen, 64)))
    _, lse = check(path, q, k, v, mask=np.tril(np.ones((seqlen, seqlen), bool)))
    assert -121 < lse.min() < lse.max() < -113


@every_path
def test_h20_lse_is_a_natural_logarithm(path):
    """flashinfer-ai/flashinfer#2113, pytorch/pytorch#181645: of base 2, or ln 2 applied twice."""
    for dtype in (F16, BF16, F32, np.float64):
        x = np.zeros((1, 1600, 8), dtype)
        _, lse = path(x[:, :1], x, x)
        assert lse.dtype == (np.float64 if dtype == np.float64 else F32)
        np.testing.assert_allclose(lse, math.log(1600), rtol=1e-6)


@every_path
@pytest.mark.parametrize("scale", [1e15, -1e15])
def test_scores_of_1e30_stay_finite(path, scale):
    q, k, v = qkv(21, 2, 20, 16)
    q, k = q * F32.type(1e8), k * F32.type(1e7)
    o, lse = check(path, q, k, v, softmax_scale=scale)
    assert np.isfinite(o).all()
    assert np.abs(lse).max() > 1e29


# ---- heads ---------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize(
    ("heads_q", "heads_k", "dtype"),
    [(12, 2, F32), (64, 8, F16), (6, 2, F32), (9, 3, BF16), (5, 1, F32)],
)
def test_h22_query_heads_read_key_heads_in_blocks(path, heads_q, heads_k, dtype):
    """pytorch/pytorch#151359, flash-attention#648: powers of two only, or heads taken in turn."""
    q, k, v = qkv(22, heads_q, 1, 16, seqlen_k=path.size(4096, 40), heads_k=heads_k, dtype=dtype)
    group = heads_q // heads_k
    problem = Problem(q, k.repeat(group, axis=0), v.repeat(group, axis=0), {})
    assert_attention_close(path(q, k, v), problem)


# ---- softcap, bias, ALiBi ------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("score", [1000, 4400, 5000, 10000, -10000])
def test_h24_softcap_of_large_scores(path, score):
    """vllm-project/vllm#56578: tanh from two exponentials is NaN."""
    one = np.ones((1, 1, 1), F32)
    o, lse = path(score * one, one, 3 * one, softmax_scale=1.0, softcap=50)
    assert (o.item(), lse.item()) == (3.0, math.copysign(50, score))


@every_path
@pytest.mark.parametrize("batch_axis", [1, 2])
def test_h25_a_float32_bias_of_16_bit_inputs(path, batch_axis):
    """jax-ml/jax#32242: NaN, or a bias that is refused or absent."""
    seqlen = path.size(128, 24)
    q, k, v = qkv(25, 2, 4, seqlen, 32, dtype=BF16)
    bias = normal(26, batch_axis, 4, seqlen, seqlen)
    o, _ = check(path, q, k, v, bias=bias)
    assert not np.array_equal(o, path(q, k, v)[0])
    # Of q's own dtype it is another bias, rounded.
    check(path, q, k, v, bias=bias.astype(BF16))


@every_path
def test_order_of_softcap_bias_and_alibi(path):
    """Softcap before the bias, ALiBi from the bottom right: by the definition, term by term."""
    q, k, v = qkv(27, 2, 5, 8, seqlen_k=9, dtype=np.float64)
    bias, slopes = normal(28, 5, 9, dtype=np.float64) * 3, [0.25, 2.0]
    s = 0.5 * np.tanh(q @ k.swapaxes(1, 2) / math.sqrt(8) / 0.5) + bias
    s = s - np.array(slopes)[:, None, None] * np.abs(np.arange(5)[:, None] + 9 - 5 - np.arange(9))
    p = np.exp(s)
    o, lse = path(q, k, v, softcap=0.5, bias=bias, alibi_slopes=slopes)
    np.testing.assert_allclose(lse, np.log(p.sum(-1)), rtol=1e-12)
    np.testing.assert_allclose(o, p / p.sum(-1, keepdims=True) @ v, rtol=1e-11, atol=1e-13)


@every_path
def test_h37_a_band_as_mask_as_bias_and_as_window(path):
    """pytorch/pytorch#127055: NaN where the first tiles of a row are hidden."""
    seqlen = path.size(640, 96)
    q, k, v = qkv(37, 1, seqlen, 4)
    i, j = np.ogrid[:seqlen, :seqlen]
    band = (j <= i) & (j > i - 10)
    tiles = path.small_tiles(4, 32)
    forms = (
        {"window": (9, 0)},
        {"mask": band},
        {"bias": np.where(band, F32.type(0), F32.type(-np.inf))},
    )
    for options in forms:
        actual = path(q, k, v, kernel=tiles, **options)
        assert_attention_close(actual, Problem(q, k, v, {"window": (9, 0)}))


# ---- arguments -----------------------------------------------------------------------------------


@every_path
def test_h36_scalars_of_other_types(path):
    """cupy/cupy#8485: a Python float that lands in a parameter of another type is garbage."""
    q, k, v = qkv(36, 2, 5, 8)
    expected = path(q, k, v, softmax_scale=2.0, softcap=2.0, seqlens_k=4)
    for number in (2, np.float32(2), np.float64(2), np.float16(2), np.array(2.0), np.int64(2)):
        for length in (4, np.int8(4), np.array(4, np.int32)):
            actual = path(q, k, v, softmax_scale=number, softcap=number, seqlens_k=length)
            assert_same_bits(actual, expected)


@every_path
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_h36_lengths_of_other_types(path, kind):
    q, k, v = qkv(36, 3, 1, 5, 8)
    check(path, q, k, v, seqlens_k=np.array([1, 5, 0], kind))
    check(path, q, k, v, seqlens_k=np.array([[9, 1], [9, 5], [9, 0]], kind)[:, 1])


@every_path
def test_h39_sizes_that_do_not_fit_are_refused(path):
    """flash-linear-attention#1029, xformers#1122, flash-attention#1116: taken as they were."""
    q, k, v = normal(1, 33, 4, 8), normal(2, 2, 17, 8), normal(3, 2, 17, 8)
    with pytest.raises(ValueError, match="q has 33 heads and k has 2"):
        path(q, k, v)
    with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
        path(q[:3], k, v)
    with pytest.raises(ValueError, match=r"mask.shape is \(4, 20\); expected .*\(4, 4, 17\)"):
        path(q[:4], k, v, mask=np.ones((4, 20), bool))
    with pytest.raises(ValueError, match="window right is -3"):
        path(q[:4], k, v, window=(-1, -3))
    with pytest.raises(
        ValueError, match="seqlens_k holds 20; expected lengths from 0 to k's seqlen 17"
    ):
        path(q[:4], k, v, seqlens_k=20)


@every_path
def test_inputs_are_left_as_they_were(path):
    q, k, v = qkv(40, 2, 3, 9, 8, heads_k=1)
    mask, bias = np.tril(np.ones((9, 9), bool)), normal(41, 9, 9)
    arrays = (q, k, v, mask, bias)
    before = [copy_with_layout(x) for x in arrays]
    path(q, k, v, mask=mask, bias=bias)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)
