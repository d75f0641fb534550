# SPDX-License-Identifier: MIT
"""What is forward_sm90_float32's own: parts of numbers, its tiles, its warpgroups.

The contract of attention is tested for all kernels alike in test_forward.py and test_cases.py.
"""

import hostcuda
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ON_GPU, ON_HOST_CUDA, Path, launches, normal, qkv

from cupyflash import _compile, _sm90_float32, plan
from cupyflash.testing import Problem, assert_attention_close

KERNEL = "forward_sm90_float32"
pytestmark = pytest.mark.kernel(KERNEL)
HERE = [param for param in ON_HOST_CUDA + ON_GPU if param.values[0].kernel == KERNEL]
both = pytest.mark.parametrize("path", HERE)


def check(path, q, k, v, **options):
    actual = path(q, k, v, **options)
    options.pop("num_splits", None)
    assert_attention_close(actual, Problem(q, k, v, options))
    return actual


@both
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_key_gives_its_values_to_the_bit(path, seed):
    """Three parts are all of a number: its weight is 1."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 1, 3, 64), np.float32)
    v = rng.integers(0, 2**32, (1, 1, 64), np.uint32).view(np.float32)
    v = np.where(np.isfinite(v) & (abs(v) > 2.0**-100), v, np.float32(1.5))
    o, _ = path(q, k[:, :1], v)
    np.testing.assert_array_equal(o, np.broadcast_to(v, o.shape))


@both
@pytest.mark.parametrize("head_dim", [1, 50, 64, 80, 128])
def test_head_dims(path, head_dim):
    q, k, v = qkv(1, 2, 70, head_dim, seqlen_k=140)
    check(path, q, k, v, causal=True)


@both
@pytest.mark.parametrize("dims", [(64, 1), (20, 128), (128, 20), (64, 200), (64, 0)])
def test_values_of_other_columns_than_keys(path, dims):
    d, dv = dims
    check(path, normal(2, 1, 70, d), normal(3, 1, 90, d), normal(4, 1, 90, dv))


@both
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_parts_of_the_keys_are_merged(path, splits):
    q, k, v = qkv(5, 2, 2, 70, 64, seqlen_k=330)
    # The first entry has keys in the first part only.
    check(path, q, k, v, num_splits=splits, causal=True, seqlens_k=np.array([20, 330]))


@both
def test_queries_of_either_consumer_that_are_not_there_or_see_nothing(path):
    for seqlen_q in (1, 64, 65, 129):
        q, k, v = qkv(6, 1, seqlen_q, 64, seqlen_k=200)
        check(path, q, k, v, window=(70, 0))
        check(path, q, k[:, :40], v[:, :40], causal=True)


@both
@pytest.mark.parametrize("columns", [63, 64])
def test_rows_that_no_vector_can_load(path, columns):
    q, k, v = (x[..., 1:] for x in qkv(7, 2, 70, columns + 1, seqlen_k=90))
    check(path, q, k, v)
    check(path, *(x[..., ::-1] for x in (q, k, v)))


@both
def test_scores_of_infinite_keys_and_queries(path):
    q, k, v = qkv(8, 1, 70, 64, seqlen_k=150)
    q[...] = abs(q)
    k[:, 70] = -np.inf  # a score of -inf: a weight of 0
    o, lse = path(q, k, v)
    kept = np.arange(150) != 70
    assert_attention_close((o, lse), Problem(q, k[:, kept], v[:, kept]))
    k[:, 70, 0] = np.inf  # NaN
    q[:, 5, 1:] = 0
    assert np.isnan(path(q, k, v)[0]).all()
    q[:, 3] = np.inf  # of one query
    o, _ = path(q, k[:, kept], v[:, kept])
    assert np.isnan(o[:, 3]).all()
    assert np.isfinite(np.delete(o, 3, 1)).all()


@both
@pytest.mark.parametrize("nan", [0x7FC00000, 0x7F800001, 0xFF80FFFF], ids=hex)
def test_values_that_are_not_finite(path, nan):
    """A NaN that only its lower bits tell from Inf stays one."""
    q, k, v = qkv(9, 1, 70, 64, seqlen_k=150)
    v[:, 75, 3] = np.inf
    v[:, 76, 4] = -np.inf
    v.view(np.uint32)[:, 77, 5] = nan
    v[:, 78, 6], v[:, 79, 6] = np.inf, -np.inf
    o, _ = path(q, k, v)
    assert (o[..., 3] == np.inf).all()
    assert (o[..., 4] == -np.inf).all()
    assert np.isnan(o[..., 5:7]).all()
    finite = np.delete(np.arange(64), [3, 4, 5, 6])
    expected = Problem(q, k, v[..., finite]).reference[0]
    assert_attention_close(o[..., finite], expected)


@both
def test_tiles_with_inf_that_share_a_stage(path):
    """What a tile says of itself is said when nobody reads what the one before has said."""
    q, k, v = qkv(19, 1, 70, 64, seqlen_k=330)
    q[...] = abs(q)
    hidden = np.arange(3, 330, 64)
    k[:, hidden] = -np.inf
    v[:, hidden + 1, 2] = np.inf
    o, lse = path(q, k, v)
    assert (o[..., 2] == np.inf).all()
    kept = ~np.isin(np.arange(330), hidden)
    v[:, hidden + 1, 2] = 0
    expected = Problem(q, k[:, kept], v[:, kept]).reference
    others = np.arange(64) != 2
    assert_attention_close((o[..., others], lse), (expected[0][..., others], expected[1]))


@both
@pytest.mark.parametrize("hides", ["mask", "bias", "length"])
def test_what_is_hidden_from_a_tile_may_be_nan(path, hides):
    q, k, v = qkv(10, 2, 150, 64, seqlen_k=150)
    k[:, 70] = np.nan
    v[:, 71], v[:, 72] = np.nan, np.inf
    shown = np.broadcast_to(np.abs(np.arange(150) - 71) > 1, (150, 150))
    options = {
        "mask": {"mask": shown},
        "bias": {"bias": np.where(shown, normal(11, 150, 150), -np.inf).astype(np.float32)},
        "length": {"seqlens_k": 70},
    }
    check(path, q, k, v, **options[hides])
    if hides == "mask":  # shown to queries of the other tile of queries only
        mixed = shown.copy()
        mixed[140, 72] = True
        o, _ = path(q, k, v, mask=mixed)
        assert np.isfinite(o[:, :128]).all()
        assert not np.isfinite(o[:, 140]).any()
        mixed = shown.copy()
        mixed[5, 72] = True  # shown, but not by position
        assert np.isfinite(path(q, k, v, mask=mixed, causal=True)[0]).all()


@both
def test_all_options_at_once(path):
    q, k, v = qkv(12, 2, 4, 70, 64, seqlen_k=150, heads_k=2)
    options = {"softcap": 3.0, "alibi_slopes": np.float32([0.1, 0.2, 0.0, -0.05])}
    options |= {"seqlens_k": np.array([90, 150]), "softmax_scale": -0.2, "window": (60, 20)}
    for layout in (slice(None), slice(None, None, -1)):
        bias = normal(13, 4, 70, 150)[..., layout]
        mask = (normal(14, 70, 151) > -0.5)[:, 1:][..., layout]
        check(path, q, k, v, bias=bias, mask=mask, **options)
        check(path, q, k, v, bias=bias[:, :1, :1], mask=mask[:1], **options)


class TestOnHostCuda:
    pytestmark = HOSTCUDA

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_no_schedule_changes_a_bit(self, head_dim):
        q, k, v = qkv(15, 1, 1, 70, head_dim, seqlen_k=200)
        o, lse, (launch,) = launches(q, k, v, kernel=KERNEL, num_splits=1, causal=True)
        hostcuda.run_schedules(launch)
        assert_attention_close((o, lse), Problem(q, k, v, {"causal": True}))

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_no_schedule_changes_what_inf_makes(self, head_dim):
        q, k, v = qkv(20, 1, 1, 10, head_dim, seqlen_k=330)
        k[..., 3::64, :] = -np.inf
        v[..., 4::64, 2] = np.inf
        o, _, (launch,) = launches(abs(q), k, v, kernel=KERNEL, num_splits=1)
        hostcuda.run_schedules(launch)
        assert (o[..., 2] == np.inf).all()
        assert np.isfinite(np.delete(o, 2, -1)).all()


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("row", _sm90_float32._TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_products_are_asynchronous_and_nothing_spills(row, general):
    if general and row[:2] not in ((64, 64), (128, 128)):
        pytest.skip("left to `make compile`")
    options = _sm90_float32.Tiles(*row, 4).options("float32", general)
    build = _compile.build(KERNEL, options, "sm_90a")
    assert build.spill_store_bytes == build.spill_load_bytes == 0
    assert "C75" not in build.log  # "wgmma.mma_async instructions are serialized"
    assert build.registers == 168


def test_tiles_that_a_plan_takes():
    def chosen(**sizes):
        known = {"seqlen_q": 4096, "head_dim": 64, "dtype": "float32", "device": "H200"}
        return plan(**known | sizes)

    for head_dim, bucket in ((1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (128, 128)):
        found = chosen(head_dim=head_dim)
        assert (found.kernel, found.tiles.head_dim) == (KERNEL, bucket)
        assert found.smem_bytes <= found.device.smem_block_bytes
    for others in ({"head_dim": 129}, {"seqlen_q": 64}, {"precision": "tf32"}, {"device": "A100"}):
        assert chosen(**others).kernel == "forward_sm80"
    assert chosen(dtype="float64").kernel == "forward_sm80"
    assert chosen(head_dim_v=300).parts.slices == 3
    few = chosen(seqlen_q=200, seqlen_k=8192)
    assert (few.kernel, few.parts.splits > 10) == (KERNEL, True)
    assert chosen(seqlen_q=64, kernel=KERNEL).kernel == KERNEL


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"device": "A100"}, "needs compute capability 9.0, A100 has 8.0"),
        ({"dtype": "float16"}, "takes float32, q is float16"),
        ({"head_dim": 129}, "takes head_dim up to 128, q has 129"),
        ({"seqlen_k": 2**29}, "takes sequences of less than 536870912"),
        ({"batch": 4, "heads_q": 2**30}, "takes less than 2\\^32 heads"),
    ],
)
def test_refusals(sizes, message):
    known = {"seqlen_q": 128, "head_dim": 64, "dtype": "float32", "device": "H200"}
    with pytest.raises(ValueError, match=f"kernel '{KERNEL}' {message}"):
        plan(**known | sizes, kernel=KERNEL)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_error_does_not_grow_with_the_keys(cupy, head_dim):
    """Sums that ran on in the tensor cores would err by 4e-5 at 65,536 keys."""
    rng = cupy.random.default_rng(17)
    q, k, v = (rng.standard_normal((1, n, head_dim), np.float32) for n in (128, 65536, 65536))
    from cupyflash import attention

    for sign in (1, -1):  # scores of one sign sum up
        o = attention(q, abs(k), v, kernel=KERNEL, softmax_scale=sign * head_dim**-0.5)
        s = sign * head_dim**-0.5 * q.astype(np.float64) @ abs(k).astype(np.float64).swapaxes(1, 2)
        p = cupy.exp(s - s.max(-1, keepdims=True))
        expected = p @ v.astype(np.float64) / p.sum(-1, keepdims=True)
        assert cupy.linalg.norm(o - expected) < 1e-6 * cupy.linalg.norm(expected)


@pytest.mark.gpu
def test_many_works_on_a_gpu(cupy):
    """More thread blocks than multiprocessors, of all kinds of lengths."""
    path = Path("gpu", KERNEL)
    for head_dim in (64, 96, 128):
        q, k, v = qkv(18, 3, 8, 700, head_dim, seqlen_k=900, heads_k=4)
        check(path, q, k, v)
        check(path, q, k, v, causal=True, seqlens_k=np.array([100, 0, 900]))
        check(path, q, k, v, window=(300, 40), softcap=20.0)
