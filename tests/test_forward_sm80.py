# SPDX-License-Identifier: MIT
"""What is forward_sm80's own: its tiles, parts of the keys, packed heads, ways to load.

The contract of attention is tested for all kernels alike in test_forward.py and test_cases.py.
"""

import hostcuda
import numpy as np
import pytest
from hostcuda.probes import MARKS as HOSTCUDA
from hostcuda.probes import floats, kernel, record
from paths import assert_same_bits, normal, qkv

from cupyflash import _dtypes, _problem, _sm80, devices
from cupyflash.plan import plan
from cupyflash.testing import DTYPES, Problem, assert_attention_close

pytestmark = pytest.mark.kernel("forward_sm80")
H200 = devices.named_device("H200")


def on_host(q, k, v, *, splits=None, schedules=False, device=H200, **options):
    """(o, lse) of the kernel on the CPU, with the keys in ``splits`` parts."""
    problem = _problem.from_arrays("attention", q, k, v, **options)
    tiles = _sm80.tiles_for(problem, device)
    work = _sm80.parts(problem, tiles, device, splits)
    o = hostcuda.empty(problem.out_shape, problem.dtype)
    lse = hostcuda.empty(problem.out_shape[:-1], problem.acc_dtype)
    for launch in _sm80.records(problem, tiles, work, o, lse, hostcuda):
        (hostcuda.run_schedules if schedules else hostcuda.run)(launch)
    return o, lse


def check(q, k, v, *, splits=None, schedules=False, device=H200, **options):
    actual = on_host(q, k, v, splits=splits, schedules=schedules, device=device, **options)
    assert_attention_close(actual, Problem(q, k, v, options))
    return actual


def dtype_of(name):
    return _dtypes.named(name)


class TestOnHostCuda:
    pytestmark = HOSTCUDA

    @pytest.mark.parametrize("name", DTYPES)
    def test_no_schedule_changes_a_bit(self, name):
        q, k, v = qkv(1, 1, 2, 70, 40, seqlen_k=230, dtype=dtype_of(name))
        check(q, k, v, causal=True, schedules=True)

    def test_no_data_race(self):
        q, k, v = qkv(2, 1, 1, 40, 64, seqlen_k=200, dtype=np.float16)
        problem = _problem.from_arrays("attention", q, k, v)
        tiles = _sm80.tiles_for(problem, H200)
        o, lse = hostcuda.empty((1, 1, 40, 64), q.dtype), None
        work = _sm80.parts(problem, tiles, H200, 1)
        (launch,) = _sm80.records(problem, tiles, work, o, lse, hostcuda)
        hostcuda.run(launch, sanitizer="thread")
        assert np.isfinite(o.astype(float)).all()

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("splits", [2, 3, 7])
    def test_parts_of_the_keys_are_merged(self, name, splits):
        q, k, v = qkv(3, 2, 2, 5, 40, seqlen_k=230, dtype=dtype_of(name))
        # The first entry has keys in the first part only, the last query of none in the others.
        check(q, k, v, splits=splits, causal=True, seqlens_k=np.array([20, 230]))

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("score", [300.0, 2.0**18, -(2.0**18)])
    def test_weights_of_parts_add_up_to_one_at_large_scores(self, name, score):
        """From lse they would not: its rounding is a factor of every weight."""
        root = np.sqrt(abs(score))
        q, k, v = (np.full((1, 1, n, 40), 1, dtype_of(name)) for n in (2, 600, 600))
        q *= q.dtype.type(root * np.sign(score))
        k *= k.dtype.type(root / 40)
        for splits in (2, 3, 4):
            o, lse = on_host(q, k, v, splits=splits, softmax_scale=1.0)
            unit = np.finfo(np.float32 if name != "float64" else np.float64).eps
            np.testing.assert_allclose(
                o.astype(np.float64), 1, rtol=8 * unit if o.itemsize > 2 else 0
            )
            assert np.isfinite(lse).all()

    def test_a_row_without_keys_stays_empty_when_merged(self):
        q, k, v = qkv(4, 1, 1, 9, 40, seqlen_k=6, dtype=np.float32)
        o, lse = on_host(q, k, v, splits=2, causal=True)
        assert (o[..., :3, :] == 0).all()
        assert (lse[..., :3] == -np.inf).all()
        assert np.isfinite(lse[..., 3:]).all()

    @pytest.mark.parametrize("seqlen_q", [1, 7, 33])
    def test_a_group_of_heads_in_one_tile(self, seqlen_q):
        q, k, v = qkv(5, 2, 6, seqlen_q, 64, seqlen_k=150, heads_k=2, dtype=np.float16)
        options = {"causal": True, "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])}
        problem = _problem.from_arrays("attention", q, k, v, **options)
        assert _sm80.pack(problem) == 3
        check(q, k, v, **options)
        check(q, k, v, window=(20, 3))

    def test_slices_of_a_large_head_dim_v(self):
        q, k, v = qkv(6, 1, 2, 20, 64, seqlen_k=40, dtype=np.float64)
        v = normal(7, 1, 2, 40, 300, dtype=np.float64)
        problem = _problem.from_arrays("attention", q, k, v)
        assert _sm80.parts(problem, _sm80.tiles_for(problem, H200), H200).slices == 3
        check(q, k, v)
        check(q, k, v, splits=2)

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("columns", [slice(1, 34), slice(0, 66, 2), slice(33, None, -1)])
    def test_rows_that_no_vector_can_load(self, name, columns):
        wide = qkv(8, 1, 2, 30, 67, seqlen_k=70, dtype=dtype_of(name))
        q, k, v = (x[..., columns] for x in wide)
        actual = check(q, k, v, causal=True)
        copies = [np.ascontiguousarray(x) for x in (q, k, v)]
        padded = [np.zeros((*x.shape[:-1], 64), x.dtype)[..., : x.shape[-1]] for x in copies]
        for to, x in zip(padded, copies, strict=True):
            to[...] = x
        assert_same_bits(on_host(*padded, causal=True), actual)

    @pytest.mark.parametrize("softmax_scale", [-0.3, 1e-9, 40.0])
    @pytest.mark.parametrize("name", ["bfloat16", "float32"])
    def test_any_scale(self, name, softmax_scale):
        q, k, v = qkv(9, 1, 1, 70, 64, seqlen_k=70, dtype=dtype_of(name))
        check(q, k, v, softmax_scale=softmax_scale, causal=True)

    def test_rising_scores_move_the_maximum_often(self):
        q, k, v = qkv(10, 1, 1, 20, 64, seqlen_k=400, dtype=np.float32)
        k += np.linspace(0, 30, 400, dtype=np.float32)[:, None] * np.sign(q[..., 3:4, :])
        check(q, k, v)

    def test_infinite_values_pass_through_the_split_of_float32(self):
        q, k, v = qkv(11, 1, 1, 8, 32, seqlen_k=40, dtype=np.float32)
        v[..., 5, 3] = np.inf
        v[..., 6, 4] = -np.inf
        v[..., 7, 5] = np.nan
        k[..., 9, :] = 0.0
        o, _ = on_host(q, k, v)
        assert (o[..., 3] == np.inf).all()
        assert (o[..., 4] == -np.inf).all()
        assert np.isnan(o[..., 5]).all()
        assert np.isfinite(np.delete(o, [3, 4, 5], -1)).all()

    @pytest.mark.parametrize("name", DTYPES)
    def test_tiles_that_the_mask_hides_are_not_loaded(self, name):
        """Not even read: what lies there is no memory of ours."""
        q, k, v = qkv(16, 1, 2, 150, 40, seqlen_k=300, dtype=dtype_of(name))
        mask = np.random.default_rng(17).random((150, 300)) < 0.5
        mask[:, 64:192] = False  # whole tiles, of whatever dtype
        mask[:128, 256:] = False  # of one block of queries only
        mask[128:, :64] = True
        k[..., 64:192, :] = np.nan
        v[..., 64:192, :] = np.inf
        actual = check(q, k, v, mask=mask, schedules=True)
        k[..., 64:192, :] = v[..., 64:192, :] = 0
        assert_same_bits(on_host(q, k, v, mask=mask), actual)
        check(q, k, v, mask=np.zeros_like(mask))

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("first", [0, 64, 131, 299])
    def test_one_key_is_all_that_the_mask_shows(self, first, splits):
        q, k, v = qkv(18, 1, 1, 9, 64, seqlen_k=300, dtype=np.float16)
        mask = np.arange(300) == first
        o, _ = check(q, k, v, mask=mask[None], splits=splits)
        np.testing.assert_array_equal(o, np.broadcast_to(v[..., first : first + 1, :], o.shape))

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("float_bias", [False, True])
    @pytest.mark.parametrize(
        "arrange",
        [
            pytest.param(lambda x: x, id="whole"),
            pytest.param(lambda x: x[:, :, :1], id="one row"),
            pytest.param(lambda x: x[..., :1], id="one key"),
            pytest.param(lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3), id="T"),
            pytest.param(lambda x: np.concatenate([x, x], -1)[..., ::2], id="every second"),
        ],
    )
    def test_ways_to_load_bias_and_mask(self, name, float_bias, arrange):
        q, k, v = qkv(19, 1, 2, 70, 40, seqlen_k=136, dtype=dtype_of(name))
        bias_dtype = np.float32 if float_bias and name != "float64" else dtype_of(name)
        bias = arrange(normal(20, 1, 2, 70, 136, dtype=bias_dtype))
        mask = arrange(np.random.default_rng(21).random((1, 1, 70, 136)) < 0.8)
        check(q, k, v, bias=bias, schedules=arrange(bias) is bias)
        check(q, k, v, bias=bias, mask=mask, causal=True)

    @pytest.mark.parametrize("name", ["float16", "float32"])
    def test_a_bias_of_minus_infinity_hides_what_is_not_a_number(self, name):
        q, k, v = qkv(22, 1, 1, 40, 64, seqlen_k=150, dtype=dtype_of(name))
        bias = normal(23, 40, 150, dtype=dtype_of(name))
        bias[np.random.default_rng(24).random((40, 150)) < 0.4] = -np.inf
        bias[:, 70:75] = -np.inf
        k[..., 70, :] = np.nan
        k[..., 71, :] = np.inf
        v[..., 72, :] = np.nan
        check(q, k, v, bias=bias)
        check(q, k, v, bias=bias, softcap=3.0, mask=np.arange(150)[None] % 7 > 0)

    def test_bias_and_mask_without_data_race(self):
        q, k, v = qkv(25, 1, 1, 40, 64, seqlen_k=200, dtype=np.float16)
        mask = np.random.default_rng(26).random((40, 200)) < 0.5
        bias = normal(27, 40, 200, dtype=np.float16)
        problem = _problem.from_arrays("attention", q, k, v, bias=bias, mask=mask)
        tiles = _sm80.tiles_for(problem, H200)
        o = hostcuda.empty((1, 1, 40, 64), q.dtype)
        work = _sm80.parts(problem, tiles, H200, 1)
        (launch,) = _sm80.records(problem, tiles, work, o, None, hostcuda)
        hostcuda.run(launch, sanitizer="thread")
        assert np.isfinite(o.astype(float)).all()

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_tf32_errs_as_tf32_does(self, head_dim):
        """More than float32, and no more than operands of 11 bits explain."""
        q, k, v = qkv(28, 1, 1, 64, head_dim, seqlen_k=256, dtype=np.float32)
        exact = Problem(q, k, v).reference[0]
        o, _ = on_host(q, k, v, precision="tf32")
        error = np.linalg.norm(o - exact) / np.linalg.norm(exact)
        assert 1e-5 < error < 2.0**-11
        full, _ = on_host(q, k, v, precision="full")
        assert np.linalg.norm(full - exact) / np.linalg.norm(exact) < 1e-6
        # Cut off without being made up for, all values would be too small.
        v = np.abs(v)
        mean = on_host(q, k, v, precision="tf32")[0].mean(dtype=np.float64)
        assert abs(mean / Problem(q, k, v).reference[0].mean() - 1) < 2.0**-13

    def test_tf32_of_what_is_not_finite(self):
        q, k, v = qkv(29, 1, 1, 8, 32, seqlen_k=40, dtype=np.float32)
        v[..., 5, 3] = np.inf
        v[..., 7, 5] = np.nan
        o, _ = on_host(q, k, v, precision="tf32", softcap=9.0)
        assert (o[..., 3] == np.inf).all()
        assert np.isnan(o[..., 5]).all()
        assert np.isfinite(np.delete(o, [3, 5], -1)).all()

    @pytest.mark.parametrize("device", ["A100", "RTX 4090"])
    def test_tiles_of_other_devices(self, device):
        q, k, v = qkv(12, 1, 1, 140, 64, seqlen_k=140, dtype=np.float16)
        check(q, k, v, causal=True, device=devices.named_device(device))

    def test_mma_sums_without_rounding(self):
        # 2^24 + 1 and 2^24 + 3 lie between two floats: cut off, never rounded up.
        source = '#include "ptx/mma.cuh"\n' + kernel(
            "float d[4] = {x[0], x[1], -x[0], -x[1]}; const unsigned one = 0x3c003c00u;\n"
            "const unsigned a[4] = {t % 4 == 0 ? 0x3c00u : 0u, t % 4 == 0 ? 0xbc00u : 0u, 0, 0};\n"
            "const unsigned b[2] = {one, one}; cupyflash::mma_m16n8k16_f16(d, a, b);\n"
            "for (int e = 0; e < 4; ++e) y[4 * t + e] = d[e];"
        )
        x, y = floats(2), floats(128)
        x[:] = 2.0**24, 2.0**24 + 2
        hostcuda.run(record(x, y, threads=32), source=source)
        np.testing.assert_array_equal(y.reshape(32, 4), [[x[0], x[1], -x[0], -x[1]]] * 32)

    def test_a_copy_lands_when_it_is_waited_for(self):
        source = '#include "ptx/cp_async.cuh"\n' + kernel(
            "extern __shared__ __align__(16) float s[]; s[4 * t] = -1;\n"
            "const unsigned to = cupyflash::shared_address(s + 4 * t);\n"
            "cupyflash::cp_async_16(to, x + 4 * t, 12); cupyflash::cp_async_commit();\n"
            "y[2 * t] = s[4 * t]; cupyflash::cp_async_wait<0>();\n"
            "y[2 * t + 1] = s[4 * t] + s[4 * t + 3];"
        )
        x = floats(256) + 1
        for landing, early in (("late", -1.0), ("eager", None)):
            y = floats(128)
            schedule = hostcuda.Schedule(landing=landing)
            hostcuda.run(record(x, y, smem=1024), source=source, schedule=schedule)
            np.testing.assert_array_equal(y[1::2], x[::4])
            np.testing.assert_array_equal(y[::2], x[::4] if early is None else early)


@pytest.mark.parametrize("name", ["A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_has_tiles_that_fit(name, dtype):
    device = devices.named_device(name)
    for head_dim in (1, 32, 33, 64, 96, 100, 128, 129, 192, 256):
        both = {"mask": True, "bias_dtype": dtype}
        wide = {"mask": True, "bias_dtype": dtype if dtype == "float64" else "float32"}
        for options in ({}, {"softcap": 3.0}, {"seqlen_k": 9}, both, wide):
            p = plan(
                seqlen_q=9 if "seqlen_k" in options else 4096,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
                kernel="forward_sm80",
                **options,
            )
            assert p.smem_bytes + _sm80._STATIC_SMEM <= device.smem_block_bytes
            assert p.tiles.head_dim >= head_dim
            assert p.tiles.Br % (16 * p.tiles.warps) == 0
            assert "forward_sm80" in str(p)


@pytest.mark.parametrize(
    ("device", "sizes", "message"),
    [
        ("T4", {"head_dim": 64}, "needs compute capability 8.0, T4 has 7.5"),
        ("A100", {"head_dim": 257}, "takes head_dim up to 256, q has 257"),
        ("A100", {"head_dim": 64, "seqlen_k": 2**29}, "takes sequences of less than 536870912"),
        (
            "A100",
            {"head_dim": 64, "batch": 2**30, "heads_q": 4},
            r"takes less than 2\^32 heads of all batch entries together",
        ),
    ],
)
def test_refusals(device, sizes, message):
    with pytest.raises(ValueError, match=f"plan: kernel 'forward_sm80' {message}"):
        plan(**{"seqlen_q": 64} | sizes, device=device, kernel="forward_sm80")


def test_the_plan_splits_the_keys_only_where_blocks_are_few():
    sizes = {
        "head_dim": 128,
        "dtype": "bfloat16",
        "device": "A100",
        "seqlen_k": 32768,
        "kernel": "forward_sm80",
    }
    few = plan(seqlen_q=1, heads_q=8, heads_k=8, **sizes)
    assert few.parts.splits > 8
    assert "merged by the last block of a tile" in str(few)
    many = plan(seqlen_q=4096, batch=8, heads_q=32, **sizes)
    assert many.parts.splits == 1


def test_no_specialisation_is_listed_twice():
    listed = list(_sm80.specialisations())
    assert len({(name, options) for name, options, _ in listed}) == len(listed)
    assert len(listed) <= 180


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_on_a_gpu(cupy, name, head_dim):
    from paths import run_on_gpu

    q, k, v = qkv(13, 2, 6, 300, head_dim, seqlen_k=411, heads_k=2, dtype=dtype_of(name))
    mask = np.random.default_rng(14).random((300, 411)) < 0.8
    for options in (
        {},
        {"causal": True},
        {"window": (70, 30), "seqlens_k": np.array([100, 411])},
        {"mask": mask, "bias": normal(15, 6, 300, 411, dtype=dtype_of(name)), "softcap": 8.0},
    ):
        actual = run_on_gpu(q, k, v, kernel="forward_sm80", **options)
        assert_attention_close(actual, Problem(q, k, v, options))
    few = q[:, :, :3]
    assert_attention_close(run_on_gpu(few, k, v, kernel="forward_sm80"), Problem(few, k, v))
