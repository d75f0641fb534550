# SPDX-License-Identifier: MIT
"""What is forward_sm90's own: its tile table, its stream of works, what it declines."""

import dataclasses

import hostcuda
import ml_dtypes
import numpy as np
import pytest
from compile_matrix import spill_bytes_allowed
from hostcuda.probes import MARKS
from hypothesis import given, settings
from paths import ON_GPU, ON_HOST_CUDA, launches, normal, qkv, readable_by_tma

from cupyflash import _compile, _sm90, attention, devices, plan
from cupyflash.plan import _cached_plan
from cupyflash.reference import attention_reference
from cupyflash.testing import OPTIONS, Problem, assert_attention_close, attention_problems

pytestmark = pytest.mark.kernel("forward_sm90")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def on_host_cuda(test):
    """Of tests that run the kernel on the CPU."""
    for mark in MARKS:
        test = mark(test)
    return test


ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
WRITES = {"problem.o.data", "problem.lse.data", "counter"}


def close(actual, expected):
    (o, lse), (o_ref, lse_ref) = actual, expected
    seen = np.isfinite(lse_ref)
    assert np.isfinite(o.astype("f8")).all()
    assert (lse[~seen] == -np.inf).all()
    np.testing.assert_allclose(lse[seen], lse_ref[seen], rtol=1e-5, atol=1e-5)
    error = np.linalg.norm(o.astype("f8") - o_ref)
    assert error <= 2 * ROUNDING[o.dtype.name] * np.linalg.norm(o_ref)


def run(q, k, v, blocks=None, schedules=False, **options):
    """On the CPU, by no more than so many thread blocks: then each has several works."""
    o, lse, records = launches(q, k, v, kernel="forward_sm90", **options)
    for record in records:
        if blocks is not None:
            record = dataclasses.replace(record, grid=(min(blocks, record.grid[0]), 1, 1))
        if schedules:
            hostcuda.run_schedules(record, writes=WRITES, timeout=200)
        else:
            hostcuda.run(record, writes=WRITES, timeout=200)
    return o, lse


def entries(seed, name, *shape, dtype=BFLOAT16):
    """A bias, or a mask, in rows that TMA reads; a third of the pairs is hidden, some keys are."""
    x = normal(seed, *shape, dtype=dtype)
    hidden = normal((seed, 1), *shape) < -0.4
    hidden[..., ::7] = True
    x[hidden] = -np.inf
    return readable_by_tma(~hidden if name == "mask" else x, shape[-1])


def row_id(tiles):
    return f"{tiles.head_dim}-{tiles.head_dim_v}-{tiles.Br}-{tiles.Bc}-{tiles.score_array}"


# Those with bias or mask would be many builds: three and two consumers do; `make compile` has all.
ROWS = {row_id(t): t for t in _sm90.TABLE if not t.score_array or t.head_dim in (64, 256)}


@on_host_cuda
@pytest.mark.parametrize("tiles", ROWS.values(), ids=ROWS)
def test_each_row_of_the_table(tiles, monkeypatch):
    monkeypatch.setattr(
        _sm90, "TABLE", (dataclasses.replace(tiles, least_keys=0, most_causal_keys=None),)
    )
    _cached_plan.cache_clear()
    try:
        q, k, v = qkv(1, 2, 2, 140, tiles.head_dim, seqlen_k=230, heads_k=1, dtype=BFLOAT16)
        v = v[..., : tiles.head_dim_v]
        general = [{"softcap": 2.0, "causal": True}, {"alibi_slopes": [0.5, 0.01]}]
        if tiles.score_array is None:
            problems = [{}, {"causal": True}, {"window": (60, 20)}, *general]
        else:
            array = entries(3, tiles.score_array, 2, 140, 230)
            problems = [{tiles.score_array: array} | options for options in ({}, *general)]
        for options in problems:
            close(run(q, k, v, blocks=3, **options), attention_reference(q, k, v, **options))
    finally:
        _cached_plan.cache_clear()


@on_host_cuda
@pytest.mark.parametrize("blocks", [1, 3])
def test_works_that_see_nothing_between_others(blocks):
    q, k, v = qkv(2, 6, 1, 200, 64, seqlen_k=900, dtype=np.float16)  # more tiles than stages
    lengths = np.array([0, 0, 900, 0, 0, 77])
    options = {"seqlens_k": lengths, "causal": True}
    o, lse = run(q, k, v, blocks=blocks, schedules=True, **options)
    close((o, lse), attention_reference(q, k, v, **options))
    for entry, length in enumerate(lengths):
        k[entry, :, length:] = np.nan
        v[entry, :, length:] = np.nan
    again, lse_again = run(q, k, v, blocks=blocks, **options)
    assert again.tobytes() == o.tobytes()
    assert lse_again.tobytes() == lse.tobytes()


@on_host_cuda
@pytest.mark.parametrize(
    ("heads", "heads_k", "blocks"), [(5, 5, 6), (6, 2, 9), (5, 5, 4), (6, 2, 6)]
)
def test_every_block_of_queries_of_equal_works_is_done_once(heads, heads_k, blocks):
    """Rounds of the grid that are whole heads, whole groups of heads, and neither."""
    q, k, v = qkv(7, 1, heads, 400, 64, seqlen_k=60, heads_k=heads_k, dtype=np.float16)
    close(run(q, k, v, blocks=blocks), attention_reference(q, k, v))


@on_host_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2])
def test_scores_that_grow_along_the_walk_of_the_keys(seed, dtype):
    """Some rows outgrow their first maximum by far, once or often, beside others that stay."""
    rng = np.random.default_rng(seed)
    q, k, v = qkv(1, 2, 1, 130, 64, seqlen_k=1100, dtype=dtype)
    strength = rng.choice([0, 0, 1, 30, 300, 3000], (130, 1))
    trend = np.linspace(8, 0, 1100)[:, None]  # the last keys come first
    direction = rng.standard_normal(64) / 8
    q = (q * 0.5 + np.sqrt(8 * strength) * direction).astype(dtype)
    k = (k * 0.5 + trend * direction).astype(dtype)
    o, lse = run(q, k, v)
    close((o, lse), attention_reference(q, k, v))
    # A row is, to the bit, what it is beside others.
    stays = np.flatnonzero(strength[:, 0] == 0)
    other = q.copy()
    other[:, :, strength[:, 0] > 0] = 0
    again, _ = run(other, k, v)
    assert again[:, :, stays].tobytes() == o[:, :, stays].tobytes()


@on_host_cuda
def test_queries_that_are_not_there_and_tiles_that_some_do_not_see():
    """Consumers without queries, or above the diagonal of the last tiles, pass those tiles by."""
    for seqlen_q, seqlen_k, options in ((70, 700, {}), (200, 500, {"causal": "top_left"})):
        q, k, v = qkv(1, 3, 1, seqlen_q, 64, seqlen_k=seqlen_k, dtype=np.float16)
        o, lse = run(q, k, v, blocks=2, schedules=True, **options)
        close((o, lse), attention_reference(q, k, v, **options))


def test_what_is_left_to_other_kernels():
    device = devices.named_device("H200")

    def asked(**sizes):
        sizes = {"seqlen_q": 4096, "head_dim": 128, "heads_q": 16, "device": device} | sizes
        return plan(**sizes, kernel="forward_sm90").kernel

    assert asked() == asked(causal=True, window=(9, 9), seqlens=True) == "forward_sm90"
    for declined in (
        {"dtype": "float32"},
        {"bias_dtype": "float32"},
        {"softcap": 1e-10, "alibi": True},
        {"softcap": 1e30, "softmax_scale": 1e-20},
        {"softcap": 1e-12, "softmax_scale": 1e28},
        {"softmax_scale": -0.5},
        {"head_dim": 100},  # rows of 200 bytes
        {"device": "A100"},
    ):
        with pytest.raises(ValueError, match=r"'forward_sm90' .*leave kernel=None"):
            asked(**declined)
    for name, has in (("A100", "8.0"), ("RTX 4090", "8.9"), ("B200", "10.0")):
        with pytest.raises(ValueError, match=rf"needs compute capability 9.0, {name} has {has}"):
            asked(device=name)
    assert asked(mask=True) == asked(bias_dtype="float16") == "forward_sm90"
    for declined, reason in (
        ({"bias_dtype": "float16", "mask": True}, "takes a bias or a mask, not both"),
        ({"bias_dtype": "float32"}, "takes a bias of q's dtype, float16, got float32"),
        ({"bias_dtype": "float16", "seqlen_k": 4100}, "reads arrays .* those of bias are not"),
        ({"mask": True, "seqlen_k": 4104}, "reads arrays .* those of mask are not"),
        ({"head_dim": 100}, "reads arrays .* those of q, k and v are not"),
    ):
        with pytest.raises(ValueError, match=rf"'forward_sm90' {reason}; leave kernel"):
            asked(**declined)
        sizes = {"seqlen_q": 4096, "head_dim": 128, "heads_q": 16, "device": device} | declined
        made = plan(**sizes)
        assert made.kernel == "forward_sm80"
        assert f"not forward_sm90, which {made.not_sm90}" in str(made)


@pytest.mark.parametrize("tiles", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("general", [False, True])
def test_products_are_asynchronous_and_nothing_spills(tiles, general):
    if tiles.score_array and not general:
        pytest.skip("built with all options only")
    if general and tiles.head_dim not in (64, 256):
        pytest.skip("left to `make compile`: three and two consumers, the most columns are enough")
    built = _compile.build("forward_sm90", tiles.options("bfloat16", general), "sm_90a")
    assert "C75" not in built.log  # "wgmma.mma_async instructions are serialized"
    allowed = spill_bytes_allowed("forward_sm90", "sm_90a") if tiles.score_array else 0
    assert max(built.spill_store_bytes, built.stack_bytes) <= allowed
    assert tiles.smem_bytes <= devices.named_device("H200").smem_block_bytes


@on_host_cuda
def test_more_batch_axes_than_a_tensor_map_has():
    q, k, v = qkv(3, 2, 3, 2, 2, 1, 64, dtype=np.float16)
    k = np.broadcast_to(k[:, :1, :, :1], k.shape)
    q, k, v = (x[:, ::2, :, ::2] for x in (q, k, v))
    o, lse, records = launches(q, k, v, kernel="forward_sm90")
    assert len(records) == 2  # one axis of three is walked by launches
    for record in records:
        hostcuda.run(record, writes=WRITES)
    assert_attention_close((o, lse), Problem(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_works_a_block_on_a_gpu(cupy, dtype):
    q, k, v = qkv(4, 40, 16, 512, 64, dtype=np.dtype(dtype if dtype == "float16" else BFLOAT16))
    for options in ({}, {"causal": True}):
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        out = cupy.full(q.shape, np.nan, q.dtype)
        kernel = "forward_sm90"
        o, lse = attention(*arrays, out=out, return_lse=True, kernel=kernel, **options)
        again = attention(*arrays, kernel=kernel, **options)
        assert o.tobytes() == again.tobytes()
        some = np.s_[::13]
        expected = attention_reference(q[some], k[some], v[some], **options)
        close((cupy.asnumpy(o)[some], cupy.asnumpy(lse)[some]), expected)


@on_host_cuda
@pytest.mark.parametrize("slopes", [[3e38, 1e36], [1e30, 1e-38]])
def test_slopes_at_the_end_of_their_range(slopes):
    q, k, v = qkv(9, 1, 2, 20, 64, seqlen_k=20, dtype=np.float16)
    options = {"alibi_slopes": np.float32(slopes), "softmax_scale": 2.0**-10, "causal": True}
    assert_attention_close(run(q, k, v, **options), Problem(q, k, v, options))


# ---- bias and mask -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in ON_HOST_CUDA + ON_GPU if "sm90" in p.id])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_bias_and_mask_agree_with_the_oracle(path, name):
    other = {"bias": "mask", "mask": "bias"}[name]
    drawn = path.draws | {
        "options": [x for x in OPTIONS if x not in (other, "softmax_scale")],
        "lengths": path.size((1, 7, 64, 130, 200, 500), (1, 7, 33)),
        "head_dims": path.size((8, 64, 128, 192, 256), (8, 64)),
        "max_options": 6,
        "max_scores": path.size(2**20, 2**11),
    }

    @settings(max_examples=path.size(300, 25))
    @given(attention_problems(**drawn).filter(lambda problem: name in problem.kwargs))
    def agrees(problem):
        x = problem.kwargs[name]
        if name == "bias":
            x = x.astype(problem.q.dtype)
        kwargs = dict(problem.kwargs) | {name: readable_by_tma(x, problem.k.shape[-2])}
        problem = Problem(*problem.qkv, kwargs, problem.note)
        assert_attention_close(path(*problem.qkv, **problem.kwargs), problem)

    agrees()


@on_host_cuda
@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("shape", [(3, 2, 200), (2, 1), (3, 1, 200), (3, 1, 1), (1,)])
def test_bias_and_mask_broadcast_over_works_of_few_blocks(name, shape):
    q, k, v = qkv(4, 3, 2, 200, 64, seqlen_k=300, heads_k=1, dtype=np.float16)
    array = entries(5, name, *shape, 300, dtype=np.float16)
    for options in ({}, {"causal": True}, {"seqlens_k": np.array([300, 0, 77])}):
        actual = run(q, k, v, blocks=2, **{name: array}, **options)
        close(actual, attention_reference(q, k, v, **{name: array}, **options))


@on_host_cuda
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_works_and_tiles_that_bias_or_mask_hide(name):
    """Rows, tiles and whole works that see nothing; NaN where no query of a head looks."""
    q, k, v = qkv(6, 4, 1, 200, 64, seqlen_k=700, dtype=np.float16)
    hidden = np.zeros((4, 1, 200, 700), bool)
    hidden[0] = True
    hidden[1, :, :, 128:400] = True
    hidden[2, :, 192:] = True
    hidden[3, :, 50:60] = True
    hidden[3, :, :, 650:] = hidden[3, :, :, 3] = True
    array = ~hidden if name == "mask" else np.where(hidden, -np.inf, 0.5).astype(np.float16)
    options = {name: readable_by_tma(array, 700)}
    o, lse = run(q, k, v, blocks=1, schedules=True, **options)
    close((o, lse), attention_reference(q, k, v, **options))
    unseen = hidden.all(axis=2)
    for garbage in (np.nan, np.inf):
        k[unseen], v[unseen] = garbage, -garbage
        again, lse_again = run(q, k, v, blocks=3, **options)
        assert again.tobytes() == o.tobytes()
        assert lse_again.tobytes() == lse.tobytes()


@on_host_cuda
def test_keys_of_nan_that_some_queries_see():
    """A score of NaN does not bring back what the mask or -inf hides from the other queries."""
    q, k, v = qkv(7, 1, 1, 70, 64, seqlen_k=160, dtype=BFLOAT16)
    mask = np.ones((70, 160), bool)
    mask[3:, 50] = False
    expected = attention_reference(q, k, v, mask=mask)
    k[..., 50, :] = np.nan
    for options in ({"mask": mask}, {"bias": np.where(mask, 0, -np.inf).astype(BFLOAT16)}):
        o, lse = run(q, k, v, **options)
        close((o[:, :, 3:], lse[:, :, 3:]), [x[:, :, 3:] for x in expected])
        assert np.isnan(o[:, :, :3].astype("f4")).all()


@on_host_cuda
def test_the_least_bias_of_its_dtype_hides_only_beside_others():
    q, k, v = qkv(8, 1, 1, 70, 64, seqlen_k=160, dtype=BFLOAT16)
    bias = np.zeros((70, 160), BFLOAT16)
    bias[:, 40:] = bias[9] = ml_dtypes.finfo(BFLOAT16).min
    close(run(q, k, v, bias=bias), attention_reference(q, k, v, bias=bias))


@on_host_cuda
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_padding_at_both_ends_of_a_row_for_all_queries(name):
    q, k, v = qkv(9, 5, 1, 70, 64, seqlen_k=700, dtype=np.float16)
    hidden = np.zeros((5, 1, 1, 700), bool)
    hidden[0] = True
    hidden[1, ..., :300] = True
    hidden[2, ..., 129:] = True
    hidden[3] = np.arange(700) != 400
    hidden[4, ..., 128:384] = True
    array = ~hidden if name == "mask" else np.where(hidden, -np.inf, 0.5).astype(np.float16)
    options = {name: readable_by_tma(array, 700)}
    for more in ({}, {"causal": True}, {"seqlens_k": np.array([700, 650, 700, 401, 300])}):
        expected = attention_reference(q, k, v, **options, **more)
        poisoned = k.copy(), v.copy()
        for x in poisoned:
            x[hidden[:, :, 0]] = np.nan
        close(run(q, *poisoned, blocks=2, **options, **more), expected)


@on_host_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "head_dim"), [("mask", 64), ("bias", 128)])
def test_rows_that_outgrow_their_maxima_beside_bias_or_mask(name, head_dim, dtype):
    """By products or by the bias; with rows that see no key of the first tiles, and NaN."""
    seqlen_q, seqlen_k = 70, 784
    rng = np.random.default_rng(11)
    q, k, v = qkv(11, 1, 2, seqlen_q, head_dim, seqlen_k=seqlen_k, heads_k=1, dtype=dtype)
    trend = np.linspace(8, 0, seqlen_k)[:, None]  # the last keys come first
    direction = rng.standard_normal(head_dim) / 8
    strength = rng.choice([0, 0, 1, 30, 300], (seqlen_q, 1))
    q = (q * 0.5 + np.sqrt(8 * strength) * direction).astype(dtype)
    k = (k * 0.5 + trend * direction).astype(dtype)
    array = entries(12, name, seqlen_q, seqlen_k, dtype=np.dtype(dtype)).copy()
    nothing = False if name == "mask" else -np.inf
    array[20:24, 300:] = array[40, :] = nothing
    if name == "bias":
        slope = rng.choice([0, 0.5, 4], (seqlen_q, 1))
        array = (array + slope * trend[:, 0] * 8).astype(dtype)
    options = {name: readable_by_tma(array, seqlen_k)}
    unseen = np.s_[..., ::7, :]  # by every query
    poisoned = k.copy(), v.copy()
    for x, garbage in zip(poisoned, (np.nan, np.inf), strict=True):
        x[unseen] = garbage
    for more in ({}, {"causal": True}, {"alibi_slopes": [0.3, 0.004], "softcap": 30.0}):
        clean = run(q, k, v, **options, **more)
        close(clean, attention_reference(q, k, v, **options, **more))
        again = run(q, *poisoned, **options, **more)
        for x, y in zip(clean, again, strict=True):
            assert x.tobytes() == y.tobytes()


@on_host_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_over_many_tiles(causal, dtype):
    """Slopes that rise by less than a bit in a tile, by many, and away from the diagonal."""
    slopes = np.float32([0.001, 0.03, 0.9, 20, -0.05, 0])
    for seqlen_q in (70, 900):
        q, k, v = qkv(13, 1, len(slopes), seqlen_q, 64, seqlen_k=900, heads_k=1, dtype=dtype)
        options = {"alibi_slopes": slopes, "causal": causal}
        close(run(q, k, v, **options), attention_reference(q, k, v, **options))
